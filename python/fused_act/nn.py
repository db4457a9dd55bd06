"""The operators as modules: ``fused_act.nn.<Module>(...)``, one per operator of :func:`fused_act.ops`.

A tensor operand becomes a parameter of the module with ``num_features`` elements, initialised to zero (``bias``, say);
a scalar becomes an attribute.
"""

from __future__ import annotations

import torch
from torch import Tensor  # noqa: F401  (the functions compiled below name it)

from . import functional  # noqa: F401  (and this)
from ._signature import annotated, define, describe_parameters
from ._table import OPERATORS, Operator

__all__ = [op.module for op in OPERATORS]


class _Pointwise(torch.nn.Module):
    _operator: Operator

    def extra_repr(self) -> str:
        shown = [f"num_features={self.num_features}"] if self._operator.operands else []
        shown += [f"{p.name}={getattr(self, p.name)!r}" for p in self._operator.parameters if p.kind == "scalar"]
        if self._operator.operands:
            shown.append(f"dim={self.dim}")
        return ", ".join(shown)

    def reset_parameters(self) -> None:
        """Sets every operand to zero."""
        for name in self._operator.operands:
            torch.nn.init.zeros_(getattr(self, name))


def _document(op: Operator) -> str:
    lines = [f"``{op.expression}``: the module of :func:`fused_act.functional.{op.name}`.", ""]
    described = describe_parameters(op, operands=False)
    if op.operands:
        names = ", ".join(f"``{name}``" for name in op.operands)
        described.insert(0, f"num_features: elements of the parameter {names}.")
        described.append("device, dtype: of the parameter.")
    if described:
        lines += ["Args:", *(f"    {line}" for line in described)]
    return "\n".join(lines)


def _make(op: Operator) -> type[_Pointwise]:
    scalars = [p for p in op.parameters if p.kind == "scalar"]
    # Parameters without a default come first, as Python demands.
    scalars.sort(key=lambda p: p.default is not None)
    parameters = ["self"]
    body = ["torch.nn.Module.__init__(self)"]
    if op.operands:
        parameters.append("num_features: int")
        body.append("self.num_features = num_features")
    parameters += map(annotated, scalars)
    body += [f"self.{p.name} = {p.name}" for p in scalars]
    if op.operands:
        parameters.append("dim: int = 1")
        parameters += ["device: torch.device | str | int | None = None", "dtype: torch.dtype | None = None"]
        body.append("self.dim = dim")
        for name in op.operands:
            body.append(f"self.{name} = torch.nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))")
        body.append("self.reset_parameters()")
    arguments = ["x", *(f"self.{p.name}" for p in op.parameters), *(["self.dim"] if op.operands else [])]
    call = f"return functional.{op.name}({', '.join(arguments)})"
    return type(
        op.module,
        (_Pointwise,),
        {
            "__module__": __name__,
            "__doc__": _document(op),
            "_operator": op,
            "__init__": define("__init__", parameters, body, globals()),
            "forward": define("forward", ["self", "x: Tensor"], [call], globals()),
        },
    )


for _op in OPERATORS:
    globals()[_op.module] = _make(_op)

del _op
