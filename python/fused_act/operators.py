"""`python -m fused_act operators`: the table of operators in Markdown, as it stands in docs/operators.md."""

from . import _C
from ._table import OPERATORS, Operator

HEADER = """\
# Operators

Written by `python -m fused_act operators` from the table of the library. Every operator exists as
`torch.ops.fused_act.NAME`, as `fused_act.functional.NAME`, as `fused_act._C.NAME` and as a module in `fused_act.nn`;
those with "yes" have a variant `NAME_` that overwrites its first tensor. What is None is left out. `activation(act,
x, alpha)` is the activation of that name, of which alpha is the first parameter; the names are `linear` and those of
all operators with "yes" in the last column. No gain is applied unless one is given. An operand of one dimension and
more than one element lies along `dim`, whichever that is; any other broadcasts as PyTorch does it, without enlarging
the result.

| operator | equals | gradient at kinks and ties | comes from, replaces | module | in place | activation |
| --- | --- | --- | --- | --- | --- | --- |
"""

FOOTER = """
## Chains

`torch.ops.fused_act.chain(x, operands, program, scalars)` takes its steps in the call: what `fused_act.fuse` makes of a
run of pointwise operations. The value starts as `x`, each step replaces it, and the last one is the result, with the
dtype and the strides of `torch.empty_like(x)`, rounded once. Operands broadcast to `x`, as PyTorch broadcasts, without
enlarging it.

`program` is a list of int: {version}, the version of the encoding, and for each step its code and the source of its
operand. A source is {none} where the step takes none, 0 to {last_operand} for an operand, {first_slot} to {last_slot}
for a slot. Code {save} saves the value to a slot, code {load} replaces it by an operand or a slot; others are below.
`scalars` has the scalars of all steps, in order. There can be {steps} steps, {operands} operands, {slots} slots and
{scalars} scalars. What is wrong with a program is a ValueError.

`("Mul", None, (2.0,)), ("Gelu", None, ()), ("Add", ("operand", 0), ())` is `gelu(x * 2) + operands[0]`:
`fused_act._program.encode` makes a program and its scalars of that. In the table "o" is a step that takes an operand,
and with one (`v` is the value before, `o` the operand, `a` the scalar) `Sub` is `v - o`, `Rsub` `o - v`, `Shift` `v +
a`, `RsubScalar` `a - v`, `AbsClamp` `clamp(v, -a, a)`, `MinScalar` and `MaxScalar` `clamp` to `a` from above and
below, `Min` the same with the derivative of `torch.minimum`, `SiluScaled` `v * sigmoid(a * v)`, `HardswishWritten` `v
* clamp((v + 3) / 6, 0, 1)`, `Where` `torch.where(o != 0, v, a)` and `WhereNot` `torch.where(o != 0, a, v)`.

| code | step | operand | scalars |
| --- | --- | --- | --- |
"""


def _footer() -> str:
    limits = _C._encoding
    first = limits["operands"]
    places = {"last_operand": first - 1, "first_slot": first, "last_slot": first + limits["slots"] - 1}
    rows = "".join(
        f"| {code} | `{name}` | {'o' if 'T' in parameters else ''} | {parameters.count('f') or ''} |\n"
        for code, (name, parameters) in enumerate(_C._steps)
    )
    return FOOTER.format(**limits, **places) + rows


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
    return HEADER + "".join(map(_row, OPERATORS)) + _footer()


def run(options: object) -> int:
    print(markdown(), end="")
    return 0
