"""The operators as functions: ``fused_act.functional.<name>(x, ...)``, one per operator of :func:`fused_act.ops`.

Each equals its written-out PyTorch expression, computed in one kernel: float32 for float16, bfloat16 and float32,
float64 for float64, rounded once when the result is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor  # noqa: F401  (the functions compiled below name it)

from ._signature import annotated, define, describe_parameters, function
from ._table import OPERATORS, Operator

_functions = {name: op for op in OPERATORS for name in (op.name, op.in_place) if name}
__all__ = list(_functions)


def _document(op: Operator, in_place: bool) -> str:
    lines = [f"``{op.expression}``, in one kernel, forward and backward.", "", "Args:"]
    shape = {
        "": "any shape and strides",
        "halves": "shape (..., 2 d), the gate in the first half of the last dimension; any strides",
        "pairs": "shape (..., 2 d), the gate at even places of the last dimension; any strides",
    }[op.packing]
    lines.append(f"    {op.input}: a tensor of {shape}; float16, bfloat16, float32 or float64, CPU or CUDA.")
    lines += [f"    {line}" for line in describe_parameters(op)]
    lines += ["", "Returns:"]
    if in_place:
        lines.append(f"    ``{op.input}``, overwritten.")
    elif op.packing:
        lines.append(f"    A tensor of shape (..., d) with the dtype of ``{op.input}``, rounded once.")
    else:
        lines.append(f"    A tensor with the dtype and the strides of ``torch.empty_like({op.input})``.")
    lines.append("")
    if op.gradient:
        lines += [f"Gradient at kinks and ties: {op.gradient}.", ""]
    lines += [f"Source: {op.origin}.", "", "Raises:", "    TypeError: a dtype that is not one of the four."]
    if op.operands:
        lines.append(f"    ValueError: an operand whose shape does not fit ``{op.input}``.")
        lines.append(f"    IndexError: a ``dim`` that ``{op.input}`` does not have.")
    if any(p.kind == "activation" for p in op.parameters):
        lines.append("    ValueError: an activation that does not exist, or an ``alpha`` for one without a parameter.")
    if op.packing:
        lines.append("    ValueError: a last dimension that cannot be split in two.")
    if in_place:
        lines.append(
            f"    RuntimeError: elements of ``{op.input}`` that share memory; a leaf that requires a gradient."
        )
    return "\n".join(lines)


def _source(op: Operator, name: str) -> str:
    parameters = [f"{op.input}: Tensor", *map(annotated, op.parameters)]
    arguments = [op.input, *(p.name for p in op.parameters)]
    if op.operands:
        parameters.append(f"dim: int = {op.dim}")
        arguments.append("dim")
    # Of the operator a global, _NAME_operator: two attribute look-ups less in each call.
    return function(name, parameters, [f"return _{name}_operator({', '.join(arguments)})"], "Tensor")


globals().update({f"_{name}_operator": getattr(torch.ops.fused_act, name).default for name in _functions})
define([_source(op, name) for name, op in _functions.items()], globals())
for _name, _op in _functions.items():
    globals()[_name].__doc__ = _document(_op, _name == _op.in_place)

del _functions, _name, _op
