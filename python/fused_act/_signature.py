"""Python functions with a signature of their own, made from the table.

A function is compiled from its signature, as :mod:`dataclasses` and :mod:`collections` do it: so ``help``, editors,
``inspect`` and TorchDynamo see a plain function, and a call costs no ``*args``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._table import Operator, Parameter


def define(name: str, parameters: list[str], body: list[str], module: dict[str, Any]) -> Callable[..., Any]:
    """Compiles ``def name(parameters): body`` with the ``globals()`` of a module, where TorchDynamo looks names up."""
    source = f"def {name}({', '.join(parameters)}):\n" + "\n".join(f"    {line}" for line in body)
    namespace: dict[str, Any] = {}
    code = compile(source, f"<{module['__name__']}>", "exec", dont_inherit=True)  # annotations as objects, not strings
    exec(code, module, namespace)
    return namespace[name]


def annotated(p: Parameter) -> str:
    """A parameter as it stands in the signature of a function."""
    if p.kind == "operand":
        return f"{p.name}: Tensor"
    return f"{p.name}: float" + ("" if p.default is None else f" = {p.default!r}")


def describe_parameters(op: Operator, operands: bool = True) -> list[str]:
    lines = []
    for p in op.parameters:
        if p.kind == "operand" and not operands:
            continue
        if p.kind == "operand":
            lines.append(
                f"{p.name}: one value per element of dimension ``dim`` of ``x``, or any shape that broadcasts to "
                "``x`` without enlarging it; any of the four dtypes."
            )
        else:
            lines.append(f"{p.name}: a number, kept in the compute type.")
    if op.operands:
        lines.append("dim: the dimension of ``x`` that a one-dimensional operand lies along.")
    return lines
