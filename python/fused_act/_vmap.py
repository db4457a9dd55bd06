"""vmap rules of all dispatcher operators, by one rule: the batch becomes the first dimension of ``x``.

Operands are brought to the number of dimensions of ``x`` first, so that their own batch dimension can stand beside
it; where the gradient of an operand is returned the operand is spread over the batch, which gives a gradient for
each sample.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ._table import LISTED, OPERATORS, Operator


def _like_x(t: Tensor, bdim: int | None, batch: int) -> Tensor:
    return t.expand(batch, *t.shape) if bdim is None else t.movedim(bdim, 0)


def _like_operand(
    t: Tensor, bdim: int | None, batch: int, dims: int, dim: int, spread: bool, device: torch.device
) -> Tensor:
    """``t`` as (batch or 1, then ``dims`` dimensions that broadcast to a sample of ``x``)."""
    if t.dim() == 0 and t.device != device:  # a number on the CPU beside an x on another device
        if not spread:
            return t
        t = t.to(device)
    t = t.unsqueeze(0) if bdim is None else t.movedim(bdim, 0)
    own = t.dim() - 1
    if own == 1 and dims > 1 and t.shape[1] != 1:
        shape = [1] * dims
        shape[dim] = t.shape[1]
        t = t.reshape(t.shape[0], *shape)
    elif own < dims:
        t = t.reshape(t.shape[0], *[1] * (dims - own), *t.shape[1:])
    return t.expand(batch, *t.shape[1:]) if spread else t


def _arguments(overload: torch._ops.OpOverload) -> dict[str, Any]:
    """The names of the arguments, with their defaults."""
    return {a.name: a.default_value if a.has_default_value() else None for a in overload._schema.arguments}


def _rule(op: Operator, overload: torch._ops.OpOverload, arguments: dict[str, Any], call, in_place: bool = False):
    operands = set(op.operands)
    names = list(arguments)
    results = [r.name for r in overload._schema.returns]
    operand_of = {}  # argument or result -> the operand that it is shaped like
    for name in (*names, *results):
        for operand in operands:
            if name in (operand, f"{operand}_tangent", f"grad_grad_{operand}", f"grad_{operand}"):
                operand_of[name] = operand
    gradients = any(r in operand_of for r in results)

    def rule(info, in_dims, *args, **kwargs):
        values = arguments | dict(zip(names, args)) | kwargs
        bdims = dict(zip(names, in_dims)) | {name: None for name in kwargs}
        batch = info.batch_size
        dims = values[op.input].dim() - (bdims[op.input] is not None)
        dim = values.get("dim", -1)
        if operands and dims and -dims <= dim < dims:
            dim %= dims
        elif operands and any(
            values[o].dim() - (bdims[o] is not None) == 1 and values[o].shape[-1 if bdims[o] in (None, 0) else 0] != 1
            for o in operands
            if values[o] is not None
        ):
            raise IndexError(f"fused_act.{op.name}: dim is {dim}, but {op.input} has {dims} dimensions")
        device = values[op.input].device
        shapes = {}
        for name in names:
            value = values[name]
            if not isinstance(value, Tensor):
                continue
            bdim = bdims[name]
            if name in operand_of:
                shape = list(value.shape)
                if bdim is not None:
                    del shape[bdim]
                shapes[name] = shape
                values[name] = _like_operand(value, bdim, batch, dims, dim, gradients, device)
            else:
                values[name] = _like_x(value, bdim, batch)
        if "dim" in values:
            values["dim"] = 0  # read only by a one-dimensional operand: that of a batch of numbers
        if in_place and bdims[op.input] is None:
            raise ValueError(f"fused_act.{op.in_place}: {op.input} is not batched, but another argument is")
        out = call(*values.values())
        if in_place:
            return args[0], bdims[op.input]
        if not isinstance(out, tuple):
            return out, 0
        out = [
            t if t is None or name not in operand_of else t.reshape(batch, *shapes[operand_of[name]])
            for name, t in zip(results, out)
        ]
        return tuple(out), tuple(None if t is None else 0 for t in out)

    return rule


def _listed_rule(op: Operator, overload: torch._ops.OpOverload):
    """The rule of an operator whose operands are in a list is that of one to which they are given singly."""
    arguments = _arguments(overload)
    place, most = list(arguments).index("operands"), len(op.operands)

    def single(values, operands=None):
        operands = values[place] if operands is None else operands
        return *values[:place], *operands, *[None] * (most - len(operands)), *values[place + 1 :]

    def call(*values):
        operands = [t for t in values[place : place + most] if t is not None]
        return overload(*values[:place], operands, *values[place + most :])

    names, defaults = single(list(arguments), op.operands), single(list(arguments.values()), [])
    rule = _rule(op, overload, dict(zip(names, defaults)), call)
    return lambda info, in_dims, *args: rule(info, single(in_dims), *single(args))


# One for all rules: each of its own would take register_vmap longer than the rest.
_library = torch.library.Library("fused_act", "FRAGMENT")


@functools.cache  # once, also where the package is reloaded
def register() -> None:
    for op in LISTED:
        for name in (op.name, *op.derived):
            overload = getattr(torch.ops.fused_act, name).default
            torch.library.register_vmap(f"fused_act::{name}", _listed_rule(op, overload), lib=_library)
    for op in OPERATORS:
        for name in (op.name, *op.derived):
            overload = getattr(torch.ops.fused_act, name).default
            rule = _rule(op, overload, _arguments(overload), overload)
            torch.library.register_vmap(f"fused_act::{name}", rule, lib=_library)
        if op.in_place:
            overload = getattr(torch.ops.fused_act, op.in_place).default
            rule = _rule(op, overload, _arguments(overload), overload, True)
            torch.library.register_vmap(f"fused_act::{op.in_place}", rule, lib=_library)
