"""`python -m fused_act operators`: the table of operators in Markdown, as it stands in docs/operators.md."""

from ._table import OPERATORS, Operator

HEADER = """\
# Operators

Written by `python -m fused_act operators` from the table of the library. Every operator exists as
`torch.ops.fused_act.NAME`, as `fused_act.functional.NAME`, as `fused_act._C.NAME` and as a module in `fused_act.nn`;
those with "yes" have a variant `NAME_` that overwrites its first tensor. What is None is left out.
`activation(act, x, alpha)` is the activation of that name, of which alpha is the first parameter; the names are
`linear` and those of all operators with "yes" in the last column. No gain is applied unless one is given.

| operator | equals | gradient at kinks and ties | comes from, replaces | module | in place | activation |
| --- | --- | --- | --- | --- | --- | --- |
"""


def _row(op: Operator) -> str:
    signature = op.schema.replace("Tensor? ", "").replace("Tensor ", "").replace("float? ", "").replace("float ", "")
    signature = signature.replace("str ", "").replace("int ", "").split(" ->")[0]
    cells = [
        f"`{signature}`",
        f"`{op.expression}`",
        op.gradient,
        op.origin,
        f"`{op.module}`",
        "yes" if op.in_place else "",
        "yes" if op.is_activation else "",
    ]
    return "| " + " | ".join(cells) + " |\n"


def markdown() -> str:
    return HEADER + "".join(map(_row, OPERATORS))


def run(options: object) -> int:
    print(markdown(), end="")
    return 0
