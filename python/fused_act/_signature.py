"""Python functions with a signature of their own, made from the table.

A function is compiled from its signature, as :mod:`dataclasses` and :mod:`collections` do it: so ``help``, editors,
``inspect`` and TorchDynamo see a plain function, and a call costs no ``*args``. All of a module are compiled at once:
one by one they took a quarter of the time of this import.
"""

from __future__ import annotations

import linecache
import textwrap
from typing import Any

from ._table import Operator, Parameter


def function(name: str, parameters: list[str], body: list[str], returns: str = "") -> str:
    """The source of ``def name(parameters) -> returns: body``."""
    signature = f"def {name}({', '.join(parameters)}){returns and f' -> {returns}'}:"
    return "\n".join([signature, *(f"    {line}" for line in body)])


def subclass(name: str, base: str, functions: list[str]) -> str:
    """The source of a class with these functions."""
    return "\n".join([f"class {name}({base}):", *(textwrap.indent(f, "    ") for f in functions)])


def define(sources: list[str], module: dict[str, Any]) -> None:
    """Runs all sources in the ``globals()`` of a module, where TorchDynamo looks names up."""
    source, file = "\n".join(sources) + "\n", f"<{module['__name__']}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # for tracebacks and inspect.getsource
    exec(compile(source, file, "exec", dont_inherit=True), module)  # annotations as objects, not strings


def annotated(p: Parameter) -> str:
    """A parameter as it stands in the signature of a function."""
    type_ = {"operand": "Tensor", "scalar": "float", "activation": "str"}[p.kind]
    if p.optional:
        return f"{p.name}: {type_} | None = None"
    return f"{p.name}: {type_}" + ("" if p.default is None else f" = {p.default!r}")


def describe_parameters(op: Operator, operands: bool = True) -> list[str]:
    lines = []
    for p in op.parameters:
        left_out = " None: left out." if p.optional else ""
        if p.is_input:
            if operands:
                lines.append(f"{p.name}: a tensor of the shape of ``{op.input}``, or one that broadcasts to it.")
        elif p.kind == "operand":
            if operands:
                lines.append(
                    f"{p.name}: one value per element of dimension ``dim`` of ``{op.input}``, or any shape that "
                    f"broadcasts to ``{op.input}`` without enlarging it; any of the four dtypes.{left_out}"
                )
        elif p.kind == "activation":
            lines.append(f"{p.name}: ``linear`` or the name of an activation: an operator without operands.")
        elif p.name == "alpha" and any(q.kind == "activation" for q in op.parameters):
            lines.append(
                "alpha: the first parameter of the activation; None: its default. Its other parameters have their "
                "defaults, or 0."
            )
        else:
            lines.append(f"{p.name}: a number, kept in the compute type.{left_out}")
    if op.operands:
        lines.append(f"dim: the dimension of ``{op.input}`` that a one-dimensional operand lies along.")
    return lines
