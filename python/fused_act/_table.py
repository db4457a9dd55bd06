"""The operators as data. Everything in Python that exists once per operator is made from this table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _C

# Words of an operator's name that a class name does not merely capitalise.
_ACRONYMS = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "oai": "OAI"}
_TORCH_NAMES = {name.lower(): name for name in dir(torch.nn) if name[0].isupper()}

# Operands as large as x, which a module takes with x; any other is a parameter of the module.
_INPUTS = {"residual", "up"}


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operator after its first tensor.

    Attributes:
        name: as in the schema.
        kind: ``"scalar"`` (a float), ``"operand"`` (a tensor) or ``"activation"`` (the name of one).
        default: of a scalar or an activation; None where there is none, or where it is None.
        optional: whether None may be given. The step that takes the parameter is then left out.
    """

    name: str
    kind: str
    default: float | str | None = None
    optional: bool = False

    @property
    def is_input(self) -> bool:
        """Whether a module takes this operand in each call and does not hold it as a parameter."""
        return self.kind == "operand" and self.name in _INPUTS


@dataclass(frozen=True)
class Operator:
    """One operator of the library.

    Attributes:
        name: of ``torch.ops.fused_act.<name>``, ``fused_act.functional.<name>`` and ``fused_act._C.<name>``.
        schema: of the forward operator, as the dispatcher knows it.
        input: the name of its first tensor, whose dtype the result has and, unless it is packed, whose shape.
        parameters: the others, without ``dim``, which exists exactly when there is an operand.
        dim: the default of ``dim``.
        packing: how the last dimension of the first tensor has two tensors: ``"halves"``, ``"pairs"`` or ``""``.
        expression: the PyTorch statements, separated by ``;``, whose last one is the value. Operands stand in it
            shaped so that they broadcast, ``relu`` and ``clamp`` are torch's, ``activation(name, x, alpha)`` is the
            activation of that name. What is None is left out.
        gradient: its conventions at kinks and ties.
        origin: where it comes from and what it replaces.
        module: the class in ``fused_act.nn``.
        derived: the dispatcher operators that its derivatives are made of.
        in_place: the name of the variant that overwrites its first tensor, or None.
        is_activation: whether it can be named where an operator takes an activation.
        steps: the names of its steps, which take the parameters in order, where they are the same in every call.
    """

    name: str
    schema: str
    input: str
    parameters: tuple[Parameter, ...]
    dim: int | None
    packing: str
    expression: str
    gradient: str
    origin: str
    module: str
    derived: tuple[str, ...]
    in_place: str | None
    is_activation: bool
    steps: tuple[str, ...]

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if p.kind == "operand")


def _module_name(name: str) -> str:
    """torch.nn's spelling where it has the module."""
    built = "".join(_ACRONYMS.get(word, word.capitalize()) for word in name.split("_"))
    return _TORCH_NAMES.get(name.replace("_", ""), built)


def _read(listed: bool) -> tuple[Operator, ...]:
    table = []
    for entry in _C._operators:
        if entry["listed"] != listed:
            continue
        name, schemas = entry["name"], entry["schemas"]
        in_place = f"{name}_" if f"{name}_" in schemas else None
        same = ("name", "input", "dim", "packing", "expression", "gradient", "origin", "is_activation", "steps")
        table.append(
            Operator(
                **{key: entry[key] for key in same},
                schema=schemas[name],
                parameters=tuple(Parameter(*p) for p in entry["parameters"]),
                module=_module_name(name),
                derived=tuple(s for s in schemas if s not in (name, in_place)),
                in_place=in_place,
            )
        )
    return tuple(table)


OPERATORS = _read(listed=False)

# Their steps are given in each call (_program.py), so they have no function, no module and no row in the documentation.
LISTED = _read(listed=True)


def ops() -> tuple[Operator, ...]:
    """The table of operators, in the order of the list that the library was built from."""
    return OPERATORS
