"""The operators as modules: ``fused_act.nn.<Module>(...)``, one per operator of :func:`fused_act.ops`.

A module that ``torch.nn`` has too takes the same arguments. A tensor operand becomes a parameter of the module with
``num_features`` elements, initialised to zero (``bias``, say; ``scale`` to one), but for those as large as the input,
which are given in each call. A scalar and an activation's name become attributes.
"""

from __future__ import annotations

import functools
import inspect

import torch
from torch import Tensor  # noqa: F401  (the functions compiled below name it)

from . import functional
from ._signature import annotated, define, describe_parameters, function, subclass
from ._table import OPERATORS, Operator, Parameter

__all__ = [*(op.module for op in OPERATORS), "fold_batchnorm"]


def _parameters(op: Operator) -> list[Parameter]:
    """The operands that are parameters of the module."""
    return [p for p in op.parameters if p.kind == "operand" and not p.is_input]


@functools.cache
def _has_inplace(op: Operator) -> bool:
    """Whether the module takes ``inplace``: where torch.nn's does."""
    twin = getattr(torch.nn, op.module, None)
    return twin is not None and "inplace" in inspect.signature(twin).parameters


class _Pointwise(torch.nn.Module):
    _operator: Operator

    def extra_repr(self) -> str:
        op = self._operator
        has_parameters = bool(_parameters(op))
        shown = [f"num_features={self.num_features}"] if has_parameters else []
        shown += [f"{p.name}={getattr(self, p.name)!r}" for p in op.parameters if p.kind != "operand"]
        if has_parameters:
            shown.append(f"dim={self.dim}")
        if getattr(self, "inplace", False):
            shown.append("inplace=True")
        return ", ".join(shown)

    def _check(self, num_features: object = None, act: str = "linear") -> None:
        """What the call of the operator, or the tensor of the parameter, would say later and less clearly."""
        name = f"fused_act.nn.{type(self).__name__}"
        if num_features is not None and (not isinstance(num_features, int) or num_features < 0):
            raise TypeError(f"{name}: num_features is {num_features!r}, but must be a number of elements")
        known = ["linear", *(op.name for op in OPERATORS if op.is_activation)]
        if act not in known:
            raise ValueError(f"{name}: there is no activation {act!r}; there are {', '.join(known)}")

    def reset_parameters(self) -> None:
        """Sets every operand to zero, and ``scale`` to one."""
        for p in _parameters(self._operator):
            if (value := getattr(self, p.name)) is not None:
                torch.nn.init.constant_(value, p.name == "scale")


def _document(op: Operator) -> str:
    lines = [f"``{op.expression}``: the module of :func:`fused_act.functional.{op.name}`.", ""]
    described = describe_parameters(op, operands=False)
    parameters = _parameters(op)
    if parameters:
        names = ", ".join(f"``{p.name}``" for p in parameters)
        optional = " None: no parameter." if all(p.optional for p in parameters) else ""
        described.insert(0, f"num_features: elements of the parameter {names}.{optional}")
        described.append("device, dtype: of the parameter.")
    else:
        described = [line for line in described if not line.startswith("dim:")]
    if _has_inplace(op):
        described.append(f"inplace: overwrite the input, as :func:`fused_act.functional.{op.in_place}` does.")
    if described:
        lines += ["Args:", *(f"    {line}" for line in described)]
    return "\n".join(lines)


def _source(op: Operator) -> str:
    others = [p for p in op.parameters if p.kind != "operand"]
    parameters = _parameters(op)
    arguments = [annotated(p) for p in others]
    body = ["super().__init__()", *(f"self.{p.name} = {p.name}" for p in others)]
    checked = ["num_features=num_features"] if parameters else []
    checked += [f"act={p.name}" for p in others if p.kind == "activation"]
    if checked:
        body.append(f"self._check({', '.join(checked)})")
    if parameters:
        optional = all(p.optional for p in parameters)
        arguments.insert(0, "num_features: int | None = None" if optional else "num_features: int")
        arguments.append(f"dim: int = {op.dim}")
        arguments += ["device: torch.device | str | int | None = None", "dtype: torch.dtype | None = None"]
        body += ["self.num_features = num_features", "self.dim = dim"]
        for p in parameters:
            made = "torch.nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))"
            body.append(f"self.{p.name} = {made}" + (" if num_features is not None else None" if optional else ""))
        body.append("self.reset_parameters()")
    if _has_inplace(op):
        arguments.append("inplace: bool = False")
        body.append("self.inplace = inplace")
    # Parameters without a default come first, as Python demands.
    arguments.sort(key=lambda argument: "=" in argument)
    inputs = [op.input, *(p.name for p in op.parameters if p.is_input)]
    given = [op.input, *(p.name if p.is_input else f"self.{p.name}" for p in op.parameters)]
    if op.operands:
        given.append("self.dim" if parameters else f"{op.dim}")
    call = [f"return functional.{op.name}({', '.join(given)})"]
    if _has_inplace(op):
        call.insert(0, f"if self.inplace: return functional.{op.in_place}({', '.join(given)})")
    init = function("__init__", ["self", *arguments], body)
    forward = function("forward", ["self", *(f"{name}: Tensor" for name in inputs)], call)
    return subclass(op.module, "_Pointwise", [init, forward])


define([_source(op) for op in OPERATORS], globals())
for _op in OPERATORS:
    _module = globals()[_op.module]
    _module.__doc__, _module._operator = _document(_op), _op

del _op, _module


class GELU(globals()["GELU"]):
    """``F.gelu(x, approximate=approximate)``.

    Args:
        approximate: ``"none"`` for the error function, ``"tanh"`` for its approximation.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f"fused_act.nn.GELU: approximate is {approximate!r}, but must be 'none' or 'tanh'")
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x) if self.approximate == "none" else functional.gelu_tanh(x)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


def fold_batchnorm(bn: torch.nn.modules.batchnorm._BatchNorm) -> tuple[Tensor, Tensor]:
    """The ``scale`` and ``shift`` of :func:`fused_act.functional.scale_shift_act` that a BatchNorm in eval mode is.

    ``scale = weight / sqrt(running_var + eps)`` and ``shift = bias - running_mean * scale``, computed in float64 and
    rounded once to the dtype of the running statistics. Both carry gradients to ``weight`` and ``bias``.

    Args:
        bn: a BatchNorm that tracks running statistics. Its mode is not looked at.

    Raises:
        TypeError: ``bn`` is no BatchNorm.
        ValueError: ``bn`` has no running statistics.
    """
    if not isinstance(bn, torch.nn.modules.batchnorm._BatchNorm):
        raise TypeError(f"fused_act.nn.fold_batchnorm: expected a BatchNorm, but got a {type(bn).__name__}")
    if bn.running_mean is None or bn.running_var is None:
        raise ValueError("fused_act.nn.fold_batchnorm: the BatchNorm has no running statistics to fold")
    scale = (bn.running_var.double() + bn.eps).rsqrt()
    if bn.weight is not None:
        scale = scale * bn.weight.double()
    shift = -bn.running_mean.double() * scale
    if bn.bias is not None:
        shift = shift + bn.bias.double()
    return scale.to(bn.running_var.dtype), shift.to(bn.running_var.dtype)
