"""The operators as data. Everything in Python that exists once per operator is made from this table."""

from __future__ import annotations

from dataclasses import dataclass

from . import _C

# Words of an operator's name that a class name does not merely capitalise.
_ACRONYMS = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "elu": "ELU", "selu": "SELU", "celu": "CELU"}


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operator after ``x``: a ``"scalar"`` (float) or an ``"operand"`` (tensor)."""

    name: str
    kind: str
    default: float | None = None


@dataclass(frozen=True)
class Operator:
    """One operator of the library.

    Attributes:
        name: of ``torch.ops.fused_act.<name>``, ``fused_act.functional.<name>`` and ``fused_act._C.<name>``.
        schema: of the forward operator, as the dispatcher knows it.
        parameters: those after ``x``, without ``dim``, which exists exactly when there is an operand.
        expression: the PyTorch statements, separated by ``;``, whose last one is the value. Operands stand in it
            shaped so that they broadcast to ``x``, and ``relu`` and ``clamp`` are torch's.
        gradient: its conventions at kinks and ties.
        module: the class in ``fused_act.nn``.
        derived: the dispatcher operators that its derivatives are made of.
    """

    name: str
    schema: str
    parameters: tuple[Parameter, ...]
    expression: str
    gradient: str
    module: str
    derived: tuple[str, ...]

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if p.kind == "operand")


def _module_name(name: str) -> str:
    return "".join(_ACRONYMS.get(word, word.capitalize()) for word in name.split("_"))


def _read() -> tuple[Operator, ...]:
    table = []
    for entry in _C._operators:
        name = entry["name"]
        schemas = entry["schemas"]
        table.append(
            Operator(
                name=name,
                schema=schemas[name],
                parameters=tuple(Parameter(*p) for p in entry["parameters"]),
                expression=entry["expression"],
                gradient=entry["gradient"],
                module=_module_name(name),
                derived=tuple(s for s in schemas if s != name),
            )
        )
    return tuple(table)


OPERATORS = _read()


def ops() -> tuple[Operator, ...]:
    """The table of operators, in the order of the list that the library was built from."""
    return OPERATORS
