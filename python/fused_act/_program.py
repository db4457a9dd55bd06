"""How a chain of steps is written for ``torch.ops.fused_act.chain``, which runs any chain in one kernel.

    program, scalars = encode([("Mul", None, (2.0,)), ("save", ("slot", 0), ()), ("Sigmoid", None, ()),
                               ("MulOperand", ("slot", 0), ()), ("Add", ("operand", 0), ())])
    y = torch.ops.fused_act.chain(x, [bias], program, scalars)      # v = 2 * x; v * sigmoid(v) + bias

A program is its version and then, for each step, the step's code and that of its source: a list of int. The scalars of
all steps follow one another in a list of their own. A step acts on the value of the step before it, the first one on
``x``. ``save`` writes the value to a slot, ``load`` replaces it by its source, which is an operand or a slot, and so is
the source of a step that takes a second number. Operands follow the rules of broadcasting and may not enlarge ``x``.
"""

from __future__ import annotations

from collections.abc import Iterable

from . import _C

# Step by name: its code, the number of its scalars, and whether it has a source.
_STEPS = {name: (code, parameters.count("f"), "T" in parameters) for code, (name, parameters) in enumerate(_C._steps)}
_STEPS |= {name: (_C._encoding[name], 0, True) for name in ("save", "load")}

# Kind of source: the code of the first one, and how many there are.
_SOURCES = {"operand": (0, _C._encoding["operands"]), "slot": (_C._encoding["operands"], _C._encoding["slots"])}


def encode(
    steps: Iterable[tuple[str, tuple[str, int] | None, tuple[float, ...]]],
) -> tuple[list[int], list[float]]:
    """The program and the scalars of a chain.

    Args:
        steps: for each step its name, its source and its scalars. The name is one of ``_C._steps``, ``"save"`` or
            ``"load"``; the source None, ``("operand", k)`` or ``("slot", k)``.

    Raises:
        ValueError: a step that does not exist, or a source or scalars that it does not take. How long a chain may be,
            and whether its operands and slots have values, the operator checks itself.
    """
    program, scalars = [_C._encoding["version"]], []
    for n, (name, source, values) in enumerate(steps):
        where = f"fused_act.chain: step {n}, {name!r},"
        if name not in _STEPS:
            raise ValueError(f"{where} does not exist; there are {', '.join(_STEPS)}")
        code, count, has_source = _STEPS[name]
        if len(values) != count:
            raise ValueError(f"{where} takes {count} scalars, but is given {tuple(values)!r}")
        if has_source != (source is not None):
            raise ValueError(f"{where} takes {'a' if has_source else 'no'} source, but is given {source!r}")
        program += [code, _C._encoding["none"] if source is None else _source(where, *source)]
        scalars += map(float, values)
    return program, scalars


def _source(where: str, kind: str, place: int) -> int:
    first, count = _SOURCES.get(kind, (0, 0))
    if not isinstance(place, int) or not 0 <= place < count:
        known = ", ".join(f"({kind!r}, 0 to {count - 1})" for kind, (_, count) in _SOURCES.items())
        raise ValueError(f"{where} has the source {(kind, place)!r}, but there are {known}")
    return first + place
