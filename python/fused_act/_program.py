"""Steps of a chain by name, and the two lists that ``torch.ops.fused_act.chain`` takes for them.

A step is ``(name, source, scalars)``: a name of :data:`STEPS`, ``"save"`` or ``"load"``; the source of its operand, which
is None, ``("operand", k)`` or ``("slot", k)``; and its scalars.
"""

from __future__ import annotations

from . import _C

#: The parameters of each step, in order: ``T`` for a tensor operand, ``f`` for a scalar.
STEPS: dict[str, str] = dict(_C._steps)
#: At most that many of each in a program.
LIMITS = {name: _C._program[name] for name in ("steps", "operands", "slots", "scalars")}

_CODES = {name: code for code, name in enumerate(STEPS)} | {name: _C._program[name] for name in ("save", "load")}
_FIRST = {"operand": 0, "slot": LIMITS["operands"]}

Step = tuple[str, "tuple[str, int] | None", tuple[float, ...]]


def encode(steps: list[Step]) -> tuple[list[int], list[float]]:
    """The arguments ``program`` and ``scalars`` of ``torch.ops.fused_act.chain``.

    Raises:
        ValueError: a step that does not exist, or another number of scalars than it takes. What else may be wrong with
            a program the operator says.
    """
    program, scalars = [_C._program["version"]], []
    for name, source, values in steps:
        if name not in _CODES:
            raise ValueError(f"fused_act: there is no step {name!r}; there are {', '.join(_CODES)}")
        takes = STEPS.get(name, "").count("f")
        if len(values) != takes:
            raise ValueError(f"fused_act: step {name} takes {takes} scalars, but {len(values)} are given")
        program += [_CODES[name], -1 if source is None else _FIRST[source[0]] + source[1]]
        scalars += map(float, values)
    return program, scalars
