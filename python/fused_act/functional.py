"""The operators as functions: ``fused_act.functional.<name>(x, ...)``, one per operator of :func:`fused_act.ops`.

Each equals its written-out PyTorch expression, computed in one kernel: float32 for float16, bfloat16 and float32,
float64 for float64, rounded once when the result is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._signature import annotated, define, describe_parameters
from ._table import OPERATORS, Operator

__all__ = [op.name for op in OPERATORS]


def _document(op: Operator) -> str:
    lines = [f"``{op.expression}``, in one kernel, forward and backward.", "", "Args:"]
    lines.append("    x: a tensor of any shape and strides; float16, bfloat16, float32 or float64, CPU or CUDA.")
    lines += [f"    {line}" for line in describe_parameters(op)]
    lines += ["", "Returns:", "    A tensor with the dtype and the strides of ``torch.empty_like(x)``.", ""]
    if op.gradient:
        lines += [f"Gradient at kinks and ties: {op.gradient}.", ""]
    lines += ["Raises:", "    TypeError: a dtype that is not one of the four."]
    if op.operands:
        lines.append("    ValueError: an operand whose shape does not fit ``x``.")
        lines.append("    IndexError: a ``dim`` that ``x`` does not have.")
    return "\n".join(lines)


def _make(op: Operator):
    parameters = ["x: Tensor", *map(annotated, op.parameters)]
    arguments = ["x", *(p.name for p in op.parameters)]
    if op.operands:
        parameters.append("dim: int = 1")
        arguments.append("dim")
    operator = f"_{op.name}_operator"  # a global: two attribute look-ups less in each call
    globals()[operator] = getattr(torch.ops.fused_act, op.name).default
    function = define(op.name, parameters, [f"return {operator}({', '.join(arguments)})"], globals())
    function.__annotations__["return"] = Tensor
    function.__doc__ = _document(op)
    return function


for _op in OPERATORS:
    globals()[_op.name] = _make(_op)

del _op
