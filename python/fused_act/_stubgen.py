"""Writes type stubs beside the modules whose contents exist only at run time: _C, functional and nn.

setup.py runs it on the built package (`python -m fused_act._stubgen`), so the stubs describe that very binary.
"""

import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch

from . import _C, functional, nn, ops

HEADER = """\
# Written by fused_act._stubgen from the built library.
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
"""

# Attributes of _C that are no functions; a module's own (__name__, ...) are str.
DATA_TYPES = {bool: "bool", dict: "dict[str, int]", tuple: "tuple[Any, ...]"}


def python_type(schema_type: str) -> str:
    """`Optional[List[int]]`, as a schema prints its types, is `Sequence[int] | None`."""
    if match := re.fullmatch(r"Optional\[(.*)\]", schema_type):
        return f"{python_type(match[1])} | None"
    return schema_type.replace("List", "Sequence").replace("number", "float")


def schema_signature(schema: torch.FunctionSchema) -> str:
    """The Python signature of a dispatcher operator."""
    arguments = []
    for argument in schema.arguments:
        text = f"{argument.name}: {python_type(str(argument.real_type))}"
        if argument.has_default_value():
            text += f" = {argument.default_value!r}"
        if argument.kwarg_only and "*" not in arguments:
            arguments.append("*")
        arguments.append(text)
    results = [python_type(str(result.real_type)) for result in schema.returns]
    # What output_mask leaves out is None.
    if any(argument.name == "output_mask" for argument in schema.arguments):
        results = [f"{result} | None" for result in results]
    result = results[0] if len(results) == 1 else f"tuple[{', '.join(results)}]"
    return f"({', '.join(arguments)}) -> {result}"


def function_stub(name: str, signature: str, doc: str | None, indent: str = "") -> str:
    if not doc:
        return f"{indent}def {name}{signature}: ...\n"
    body = textwrap.indent('"""' + inspect.cleandoc(doc).replace("\\", "\\\\") + '"""', indent + "    ")
    return f"{indent}def {name}{signature}:\n{body}\n"


def public_members(module: ModuleType, kind: Callable[[object], bool]) -> Iterator[tuple[str, typing.Any]]:
    names = getattr(module, "__all__", None) or sorted(vars(module))
    return ((name, vars(module)[name]) for name in names if not name.startswith("_") and kind(vars(module)[name]))


def extension_stub() -> str:
    stubs = [HEADER]
    stubs += [f"{name}: {DATA_TYPES[type(value)]}\n" for name, value in vars(_C).items() if type(value) in DATA_TYPES]
    for name, function in public_members(_C, inspect.isbuiltin):
        # A docstring begins with the schema or, where the function is no dispatcher operator, the Python signature.
        first_line, _, doc = (function.__doc__ or "").partition("\n")
        if operator := getattr(torch.ops.fused_act, name, None):
            signature = schema_signature(operator.default._schema)
        else:
            signature = first_line.removeprefix(name)
        stubs.append(function_stub(name, signature, doc))
    return "\n".join(stubs)


def annotation(value: object) -> str:
    if isinstance(value, str):
        return value
    return inspect.formatannotation(value).replace("torch.Tensor", "Tensor")


def python_signature(function: Callable[..., object], result: str) -> str:
    signature = inspect.signature(function)
    parameters = [
        parameter
        if parameter.annotation is parameter.empty
        else parameter.replace(annotation=Literally(annotation(parameter.annotation)))
        for parameter in signature.parameters.values()
    ]
    return f"{signature.replace(parameters=parameters, return_annotation=signature.empty)} -> {result}"


class Literally:
    """An annotation that `str(signature)` prints as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def functional_stub() -> str:
    functions = public_members(functional, inspect.isfunction)
    stubs = [function_stub(name, python_signature(f, "Tensor"), f.__doc__) for name, f in functions]
    return "\n".join([HEADER, *stubs])


def nn_stub() -> str:
    """The modules with their attributes: Module.__getattr__ hides the types of parameters from a checker."""
    stubs = [HEADER]
    for operator in ops():
        module = getattr(nn, operator.module)
        types = {"operand": "torch.nn.Parameter", "scalar": "float", "activation": "str"}
        held = [p for p in operator.parameters if not p.is_input]
        attributes = {p.name: types[p.kind] + (" | None" if p.optional else "") for p in held}
        if any(p.kind == "operand" for p in held):
            attributes |= {"num_features": "int | None", "dim": "int"}
        lines = [f"class {operator.module}(torch.nn.Module):"]
        lines.append(textwrap.indent('"""' + inspect.cleandoc(module.__doc__) + '"""', "    "))
        lines += [f"    {name}: {type_}" for name, type_ in attributes.items()]
        lines.append(f"    def __init__{python_signature(module.__init__, 'None')}: ...")
        # __call__ too: Module's is declared to return Any.
        forward = python_signature(module.forward, "Tensor")
        lines += [f"    def {name}{forward}: ..." for name in ("forward", "__call__")]
        stubs.append("\n".join(lines) + "\n")
    stubs.append(function_stub("fold_batchnorm", str(inspect.signature(nn.fold_batchnorm)), nn.fold_batchnorm.__doc__))
    return "\n".join(stubs)


def main() -> None:
    folder = Path(__file__).parent
    for name, stub in {"_C": extension_stub(), "functional": functional_stub(), "nn": nn_stub()}.items():
        (folder / f"{name}.pyi").write_text(stub)


if __name__ == "__main__":
    main()
