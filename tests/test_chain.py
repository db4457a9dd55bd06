"""torch.ops.fused_act.chain: any chain of steps that is put together at run time.

A chain is tested as the operators of the table are: it is written out as a PyTorch expression, which oracle.py takes as
it takes those of the table.
"""

import random
import re

import cases
import oracle
import pytest
import torch
from cases import DTYPES
from oracle import assert_gradient, assert_operand_gradient, assert_same, assert_value
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import fused_act
from fused_act import _C, _table
from fused_act._program import encode

chain = torch.ops.fused_act.chain

# Each step: the expression of its value v, its source o and its scalars a and b; and choices of the scalars.
STEPS = {
    "Relu": ("relu(v)", [()]),
    "LeakyRelu": ("F.leaky_relu(v, a)", [(0.01,), (-0.5,)]),
    "Relu6": ("F.relu6(v)", [()]),
    "Hardtanh": ("F.hardtanh(v, a, b)", [(-1.0, 2.0)]),
    "Clamp": ("clamp(v, a, b)", [(-0.5, 0.75)]),
    "AbsClamp": ("clamp(v, -a, a)", [(1.5,)]),
    "MinScalar": ("clamp(v, max=a)", [(0.3,)]),
    "Threshold": ("F.threshold(v, a, b)", [(0.5, -1.0)]),
    "FatRelu": ("F.threshold(v, a, 0)", [(0.1,)]),
    "Hardshrink": ("F.hardshrink(v, a)", [(0.5,)]),
    "Softshrink": ("F.softshrink(v, a)", [(0.5,)]),
    "Hardsigmoid": ("F.hardsigmoid(v)", [()]),
    "Hardswish": ("F.hardswish(v)", [()]),
    "HardswishWritten": ("v * clamp((v + 3) / 6, 0, 1)", [()]),
    "HardMish": ("v / 2 * clamp(v + 2, 0, 2)", [()]),
    "Square": ("v * v", [()]),
    "Softsign": ("F.softsign(v)", [()]),
    "Sigmoid": ("torch.sigmoid(v)", [()]),
    "Logsigmoid": ("F.logsigmoid(v)", [()]),
    "Tanh": ("torch.tanh(v)", [()]),
    "Tanhshrink": ("F.tanhshrink(v)", [()]),
    "Softplus": ("F.softplus(v, a, b)", [(1.0, 20.0)]),
    "Elu": ("F.elu(v, a)", [(1.5,)]),
    "Celu": ("F.celu(v, a)", [(1.5,)]),
    "Selu": ("F.selu(v)", [()]),
    "Silu": ("F.silu(v)", [()]),
    "SiluScaled": ("v * torch.sigmoid(a * v)", [(1.702,)]),
    "QuickGelu": ("v * torch.sigmoid(1.702 * v)", [()]),
    "Gelu": ("F.gelu(v)", [()]),
    "GeluTanh": ("F.gelu(v, approximate='tanh')", [()]),
    "Mish": ("F.mish(v)", [()]),
    "Min": ("torch.minimum(v, torch.full_like(v, a))", [(0.3,)]),
    "Add": ("v + o", [()]),
    "MulOperand": ("v * o", [()]),
    "Shift": ("v + a", [(0.3,)]),
    "AddOne": ("v + 1", [()]),
    "Mul": ("v * a", [(0.3,), (-0.75,)]),
    "Div": ("v / a", [(3.0,), (-0.75,)]),
    "Sub": ("v - o", [()]),
    "Rsub": ("o - v", [()]),
    "DivOperand": ("v / o", [()]),
    "Rdiv": ("o / v", [()]),
    "Minimum": ("torch.minimum(v, o)", [()]),
    "Maximum": ("torch.maximum(v, o)", [()]),
    "MaxScalar": ("clamp(v, min=a)", [(0.3,)]),
    "Neg": ("-v", [()]),
    "Abs": ("torch.abs(v)", [()]),
    "Exp": ("torch.exp(v)", [()]),
    "Log": ("torch.log(v)", [()]),
    "Sqrt": ("torch.sqrt(v)", [()]),
    "Rsqrt": ("torch.rsqrt(v)", [()]),
    "Reciprocal": ("1 / v", [()]),
    "RsubScalar": ("a - v", [(0.3,), (2.0,)]),
    "RdivScalar": ("a / v", [(3.0,), (-0.75,)]),
    "PowScalar": ("torch.pow(v, a)", [(float(p),) for p in (2, 3, 4, 5, 8, -1, -2, 0.5, -0.5)]),
    "Lerp": ("torch.lerp(v, o, a)", [(0.25,), (0.75,), (-0.6,), (1.0,)]),
    "PRelu": ("F.prelu(v.reshape(1, -1), o.expand_as(v).reshape(-1)).reshape(v.shape)", [()]),
    "ClampMin": ("clamp(v, min=o)", [()]),
    "ClampMax": ("clamp(v, max=o)", [()]),
    "Gt": ("(v > a).to(v.dtype) + no_slope(v)", [(0.5,), (0.0,)]),
    "Ge": ("(v >= a).to(v.dtype) + no_slope(v)", [(0.5,), (0.0,)]),
    "Lt": ("(v < a).to(v.dtype) + no_slope(v)", [(0.5,), (0.0,)]),
    "Le": ("(v <= a).to(v.dtype) + no_slope(v)", [(0.5,), (0.0,)]),
    "Eq": ("(v == a).to(v.dtype) + no_slope(v)", [(0.5,), (0.0,)]),
    "GtOperand": ("(v > o).to(v.dtype) + no_slope(v) + no_slope(o)", [()]),
    "GeOperand": ("(v >= o).to(v.dtype) + no_slope(v) + no_slope(o)", [()]),
    "LtOperand": ("(v < o).to(v.dtype) + no_slope(v) + no_slope(o)", [()]),
    "LeOperand": ("(v <= o).to(v.dtype) + no_slope(v) + no_slope(o)", [()]),
    "EqOperand": ("(v == o).to(v.dtype) + no_slope(v) + no_slope(o)", [()]),
    "Where": ("torch.where(o != 0, v, a) + no_slope(o)", [(0.25,)]),
    "WhereNot": ("torch.where(o != 0, a, v) + no_slope(o)", [(0.25,)]),
}
MASKS = [name for name, (expression, _) in STEPS.items() if "no_slope" in expression]
PARAMETERS = dict(_C._steps)
UNARY = [name for name in STEPS if "T" not in PARAMETERS[name]]
BINARY = [name for name in STEPS if "T" in PARAMETERS[name]]

CHAIN_ONLY = list(STEPS)[list(STEPS).index("Sub") :]  # of which no operator of the table is made

# Values that differ from eager's in the last digits, beside those that oracle.py knows.
INEXACT = {"sqrt", "rsqrt", "pow"}


def test_every_step_is_tested():
    assert list(PARAMETERS) == list(STEPS)


def as_operator(steps):
    """The chain as an operator of the table would be, and the scalars as its parameters."""
    lines, scalars, operands = ["v = x"], {}, set()
    for name, source, values in steps:
        where = source and (f"s{source[1]}" if source[0] == "slot" else f"operand_{source[1]}")
        if source and source[0] == "operand":
            operands.add(where)
        if name in ("save", "load"):
            lines.append(f"{where} = v" if name == "save" else f"v = {where} + 0 * x")
            continue
        names = {letter: f"c{len(scalars) + i}" for i, letter in enumerate("ab"[: len(values)])}
        scalars.update(zip(names.values(), values))
        tree = oracle.ast.parse(STEPS[name][0])
        for node in oracle.ast.walk(tree):
            if isinstance(node, oracle.ast.Name):
                node.id = {"o": where, **names}.get(node.id, node.id)
        lines.append(f"v = {oracle.ast.unparse(tree)}")
    parameters = [_table.Parameter(name, "scalar") for name in scalars]
    parameters += [_table.Parameter(name, "operand") for name in sorted(operands)]
    fields = dict.fromkeys(("schema", "packing", "gradient", "origin", "module", "derived", "in_place", "steps"), "")
    op = fused_act.Operator(
        name="chain", input="x", parameters=tuple(parameters), dim=-1, expression="; ".join([*lines, "v"]),
        is_activation=False, **fields,
    )  # fmt: skip
    return op, scalars


def run(steps, x, operands=()):
    return chain(x, list(operands), *encode(steps))


def params_of(scalars, operands):
    return {**scalars, **{f"operand_{k}": t for k, t in enumerate(operands)}}


@pytest.fixture(autouse=True)
def inexact(monkeypatch):
    monkeypatch.setattr(oracle, "TRANSCENDENTAL", oracle.TRANSCENDENTAL | INEXACT)


def single(name):
    return [[(name, ("operand", 0) if "T" in PARAMETERS[name] else None, scalars)] for scalars in STEPS[name][1]]


# ---------------------------------------------------------------------------------------------------------------------
# One step


# Derivatives that leave the range of the compute type before the gradient does.
STEEP = {"Square", "Exp", "Log", "Sqrt", "Rsqrt", "Reciprocal", "RdivScalar", "PowScalar"}


def assert_steep_gradient(op, actual, x, params, go):
    """As assert_gradient, but that both may overflow where the derivative all but does."""
    x, go, actual = x.detach().cpu(), go.cpu().double(), actual.cpu().double()
    slope, expected = oracle.slopes(op, x, params)[0], oracle.oracle_gradients(op, x, params, go)[0]
    ok = oracle.within(actual, expected, go.abs() * slope.abs().clamp(min=1), x.dtype)
    ok |= (actual.isinf() | expected.isinf()) & (4 * slope).to(oracle.COMPUTE[x.dtype]).isinf()
    oracle.report(ok, actual=actual, expected=expected, x=x, go=go)


# Half types: where they are rounded is tested below, for whole chains.
@pytest.mark.parametrize(
    "name, dtype",
    [(name, dtype) for name in UNARY for dtype in cases.WIDES if dtype == torch.float32 or name in CHAIN_ONLY],
)
def test_step(name, dtype, device):
    for steps in single(name):
        op, scalars = as_operator(steps)
        x = (cases.grid(dtype, op, scalars) + 0.0).to(device)  # a zero's sign is that of 1 / sqrt(x)
        if scalars.get("c0") in (0.5, -0.5):
            x = x.abs()  # torch.pow(-inf, -1.5), in the derivative, is 0
        x.requires_grad_()
        y = run(steps, x)
        assert_value(op, y, x, scalars)
        go = cases.ordinary(dtype)[torch.arange(x.numel()) % 509].to(device)
        check = assert_steep_gradient if name in STEEP else assert_gradient
        check(op, torch.autograd.grad(y, x, go)[0], x, scalars, go)


@pytest.mark.parametrize("name", sorted(set(UNARY) & set(CHAIN_ONLY)))
def test_step_on_all_halves(name, half, device):
    for steps in single(name):
        x = cases.patterns(half).to(device)
        assert_value(as_operator(steps)[0], run(steps, x), x, as_operator(steps)[1])


@pytest.mark.parametrize("name", BINARY)
def test_step_with_operand(name, dtype, device):
    x = cases.ordinary(dtype).to(device).requires_grad_()
    operand = cases.operand_values(x.shape, dtype).to(device).requires_grad_()
    go = cases.ordinary(dtype).flip(0).to(device)
    for steps in single(name):
        op, scalars = as_operator(steps)
        params = params_of(scalars, [operand])
        y = run(steps, x, [operand])
        assert_value(op, y, x, params)
        grad_x, grad_operand = torch.autograd.grad(y, [x, operand], go)
        assert_gradient(op, grad_x, x, params, go)
        expected = oracle.oracle_gradients(op, x, params, go)[1]
        assert_operand_gradient(grad_operand, expected, expected.abs(), operand, x)


@pytest.mark.parametrize("name", BINARY)
def test_ties_infinities_and_nan_of_two_numbers(name, device):
    values = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 0.5, 2.0, torch.inf, torch.nan], device=device)
    x, operand = (t.clone().requires_grad_() for t in torch.meshgrid(values, values, indexing="ij"))
    for steps in single(name):
        op, scalars = as_operator(steps)
        params = params_of(scalars, [operand])
        # torch.clamp's gradient depends on its version; CONTRACT's does not.
        functional = oracle.GRADIENTS if name in ("ClampMin", "ClampMax") else torch.nn.functional
        y, expected = run(steps, x, [operand]), oracle.evaluate(op, x, params, functional)
        assert_same(y, expected, x=x, operand=operand)
        go = torch.full_like(x, 3.0)
        for got, want in zip(*(torch.autograd.grad(t, [x, operand], go) for t in (y, expected))):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("exponent", [2.0, 3.0, -1.0])
def test_powers_that_are_products_equal_eager(exponent, wide):
    x = cases.exponents(wide)
    assert_same(run([("PowScalar", None, (exponent,))], x), x**exponent, x=x)


@pytest.mark.parametrize("name", [n for n in STEPS if n not in ("Hardsigmoid", "Hardswish")])
def test_derivatives_of_every_order(name):
    for steps in single(name):
        x = (torch.rand(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.35).requires_grad_()
        inputs = [x]
        if name in BINARY:
            inputs.append((x.detach().flip(0) + 0.7)[:, None].expand(7, 7)[:, :1].clone().requires_grad_())

        def function(x, *operands):
            return run(steps, x.expand(7, 7) if operands else x, operands)

        assert gradcheck(function, inputs, check_forward_ad=True)
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


# ---------------------------------------------------------------------------------------------------------------------
# Chains

SHAPE = (3, 4, 5, 6)
# Per channel, per row, as large as x, and along the last dimension.
OPERANDS = [(4, 1, 1), (3, 1, 1, 1), SHAPE, (6,)]

POSITIVE = [("Abs", None, ()), ("Shift", None, (0.3,))]
BOUNDED = [("AbsClamp", None, (1.5,))]
# What comes before a step so that neither values nor derivatives explode.
BEFORE = {name: POSITIVE for name in ("Log", "Sqrt", "Rsqrt", "Reciprocal", "RdivScalar", "Rdiv")}
BEFORE |= {name: BOUNDED for name in ("Exp", "Square", "MulOperand")} | {"PowScalar": BOUNDED + POSITIVE}
ARITHMETIC = [
    name
    for name, (expression, _) in STEPS.items()
    if not (oracle.TRANSCENDENTAL | INEXACT) & set(re.findall(r"[A-Za-z_]\w*", expression))
]


def random_chain(seed, names, length=12):
    """Steps with their sources: any operand, or a slot that was saved."""
    draw = random.Random(seed)
    steps, saved = [], set()
    while len(steps) < draw.randint(1, length):
        name = draw.choice([*names, *["save", "load"] * 3])
        slot = ("slot", draw.randrange(3))
        operand = ("operand", draw.randrange(4))
        source = slot if slot in saved and draw.random() < 0.6 and name not in ("DivOperand", "Lerp") else operand
        if name == "save":
            steps.append(("save", slot, ()))
            saved.add(slot)
        elif name == "load":
            steps.append(("load", source, ()))
        else:
            steps += BEFORE.get(name, [])
            steps.append((name, source if name in BINARY else None, draw.choice(STEPS[name][1])))
    return steps


def make_inputs(dtype, device, seed=0):
    """x and four operands, away from zero."""
    g = torch.Generator().manual_seed(seed)
    drawn = [torch.rand(shape, generator=g, dtype=torch.float64) + 0.5 for shape in (SHAPE, *OPERANDS)]
    signs = [torch.randint(0, 2, t.shape, generator=g) * 2 - 1 for t in drawn]
    return [(2 * t * s).to(dtype).to(device).requires_grad_() for t, s in zip(drawn, signs)]


@pytest.mark.parametrize("seed", range(40))
def test_random_chain(seed, device):
    steps = random_chain(seed, list(STEPS))
    op, scalars = as_operator(steps)
    x, *operands = inputs = make_inputs(torch.float64, device, seed)
    y = run(steps, x, operands)
    params = params_of(scalars, operands)
    expected = oracle.evaluate(op, x, params, oracle.GRADIENTS) + 0 * sum(t.sum() for t in inputs)
    # Eager's kernels for these, and so the library's, hold 1/6 in float32 on CUDA.
    inexact = x.is_cuda and any(name in ("Hardsigmoid", "Hardswish") for name, _, _ in steps)
    torch.testing.assert_close(y, expected, rtol=1e-6 if inexact else 1e-9, atol=1e-6 if inexact else 1e-11)
    near = 1e-6 if inexact else 1e-8

    def derivatives(y):
        g = torch.Generator().manual_seed(seed)
        go, *along = (torch.rand(t.shape, generator=g, dtype=torch.float64).to(device) for t in [y, *inputs])
        go.requires_grad_()
        first = torch.autograd.grad(y, inputs, go, create_graph=True)
        return *first, *torch.autograd.grad(first, [go, *inputs], along, allow_unused=True, materialize_grads=True)

    for got, want in zip(derivatives(y), derivatives(expected), strict=True):
        torch.testing.assert_close(got, want, rtol=near, atol=near * max(1.0, want.abs().max().item()))

    tangents = make_inputs(torch.float64, device, seed + 1)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t.detach(), v.detach()) for t, v in zip(inputs, tangents)]
        got, want = (
            forward_ad.unpack_dual(t).tangent
            for t in (
                run(steps, duals[0], duals[1:]),
                oracle.evaluate(op, duals[0], params_of(scalars, duals[1:]), oracle.GRADIENTS),
            )
        )
    torch.testing.assert_close(
        torch.zeros_like(y) if got is None else got,
        torch.zeros_like(y) if want is None else want,
        rtol=near, atol=near,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_arithmetic_equals_eager(seed, device):
    steps = random_chain(seed + 100, ARITHMETIC)
    op, scalars = as_operator(steps)
    x, *operands = make_inputs(torch.float32, device, seed)
    assert_value(op, run(steps, x, operands), x, params_of(scalars, operands))


@pytest.mark.parametrize("seed", range(5))
def test_half_types_are_rounded_once(seed, half, device):
    steps = random_chain(seed + 200, list(STEPS))
    inputs = make_inputs(half, device, seed)
    (x, *operands), wide = inputs, [t.detach().float().requires_grad_() for t in inputs]
    y, exact = run(steps, x, operands), run(steps, wide[0], wide[1:])
    assert_same(y, exact.to(half))
    go = cases.ordinary(half)[torch.arange(x.numel()) % 509].reshape(SHAPE).to(device)
    gradients = [torch.autograd.grad(t, i, go.to(t.dtype)) for t, i in ((y, inputs), (exact, wide))]
    for got, want in zip(*gradients, strict=True):
        assert_same(got, want.to(half))


def test_operands_have_their_own_dtypes(dtype, device):
    steps = [(n, ("operand", k), ()) for k, n in enumerate(["Add", "MulOperand", "Maximum", "Sub"])]
    x = make_inputs(dtype, device)[0]
    compute = oracle.COMPUTE[dtype]
    operands = [t.detach().to(d).requires_grad_() for t, d in zip(make_inputs(torch.float64, device)[1:], DTYPES)]
    y = run(steps, x, operands)
    assert y.dtype == dtype
    same = [t.detach().to(compute).requires_grad_() for t in (x, *operands)]
    expected = run(steps, same[0], same[1:])
    assert_same(y, expected.to(dtype))
    go = torch.ones_like(y)
    for got, want, to in zip(
        torch.autograd.grad(y, operands, go), torch.autograd.grad(expected, same[1:], go.to(compute)), operands
    ):
        assert_same(got, want.to(to.dtype))


def test_a_slot_may_be_written_again_and_read_often(device):
    steps = [
        ("save", ("slot", 1), ()),
        ("Add", ("slot", 1), ()),
        ("save", ("slot", 1), ()),
        ("Silu", None, ()),
        ("MulOperand", ("slot", 1), ()),
        ("MulOperand", ("slot", 1), ()),
        ("save", ("slot", 0), ()),
        ("load", ("slot", 1), ()),
        ("Sub", ("slot", 0), ()),
    ]
    x = torch.linspace(-3, 3, 101, dtype=torch.float64, device=device, requires_grad=True)
    double = x + x
    expected = double - torch.nn.functional.silu(double) * double * double
    y = run(steps, x)
    torch.testing.assert_close(y, expected)
    go = torch.rand_like(x)
    torch.testing.assert_close(*(torch.autograd.grad(t, x, go) for t in (y, expected)))


@pytest.mark.parametrize("shape", [*OPERANDS, (), (1,), (1, 1, 1, 1)], ids=str)
def test_an_operand_that_is_read_often(shape, dtype, device):
    names = ["MulOperand", "Add", "Sigmoid", "MulOperand", "Rsub"]
    steps = [(n, ("operand", 0) if n in BINARY else None, ()) for n in names]
    op, scalars = as_operator(steps)
    x = make_inputs(dtype, device)[0]
    operand = cases.operand_values(shape, dtype).to(device).requires_grad_()
    params = params_of(scalars, [operand])
    go = cases.ordinary(dtype)[torch.arange(x.numel()) % 509].reshape(SHAPE).to(device)
    got = torch.autograd.grad(run(steps, x, [operand]), operand, go)[0]
    _, want = oracle.oracle_gradients(op, x, params, go)
    assert_operand_gradient(got, want, want.abs() + 4.0 * x.numel() / max(1, operand.numel()), operand, x)


def test_an_operand_that_no_step_reads(device):
    x, *operands = make_inputs(torch.float32, device)
    y = run([("Add", ("operand", 1), ())], x, operands)
    grads = torch.autograd.grad(y.sum(), operands)
    for k, (grad, operand) in enumerate(zip(grads, operands)):
        assert_same(grad, torch.full_like(operand, x.numel() / operand.numel() if k == 1 else 0.0))


def test_root_of_a_value_that_is_nearly_zero(device):
    """Backward, too, has to know a sigmoid where it is subnormal: at 0 the root's derivative is infinite."""
    x = torch.linspace(-95, -60, 101, device=device, requires_grad=True)
    y = run([("Sigmoid", None, ()), ("Sqrt", None, ())], x)
    double = x.detach().double().requires_grad_()
    got, want = (torch.autograd.grad(t.sum(), v)[0] for t, v in ((y, x), (torch.sigmoid(double).sqrt(), double)))
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=0)


def test_no_steps_give_a_copy(dtype, device):
    x = make_inputs(dtype, device)[0]
    y = chain(x, [], [1], [])
    assert_same(y, x)
    assert y.data_ptr() != x.data_ptr()
    go = torch.ones_like(x)
    assert_same(torch.autograd.grad(y, x, go)[0], go)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts(layout, device):
    steps = random_chain(7, list(STEPS)) + [("Add", ("operand", 2), ()), ("Mul", None, (0.5,))]
    x, *operands = make_inputs(torch.float32, device)
    strided = cases.LAYOUTS[layout](x.detach()).requires_grad_()
    plain = strided.detach().contiguous().requires_grad_()
    y, want = run(steps, strided, operands), run(steps, plain, operands)
    assert_same(y, want)
    assert y.stride() == torch.empty_like(strided).stride()
    go = torch.rand_like(want)
    got, want = (torch.autograd.grad(t, x, go)[0] for t, x in ((y, strided), (want, plain)))
    assert_same(got, want)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 4), (23,), (2, 3, 2, 2, 3, 2)], ids=str)
def test_shapes(shape, device):
    steps = [
        ("save", ("slot", 0), ()),
        ("Sigmoid", None, ()),
        ("MulOperand", ("slot", 0), ()),
        ("Sub", ("operand", 0), ()),
    ]
    x = torch.rand(shape, device=device, requires_grad=True)
    operand = torch.rand(shape[-1:], device=device, requires_grad=True)
    y = run(steps, x, [operand])
    torch.testing.assert_close(y, torch.nn.functional.silu(x) - operand)
    grad_x, grad_operand = torch.autograd.grad(y.sum(), [x, operand])
    assert grad_x.shape == x.shape
    assert_same(grad_operand, torch.full_like(operand, -x.numel() / max(1, operand.numel())))


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong with a program

CODE = {name: code for code, name in enumerate(PARAMETERS)}
SAVE, LOAD = -1, -2


@pytest.mark.parametrize(
    "program, scalars, message",
    [
        ([], [], "program is empty, but must begin with its version, 1"),
        ([2], [], r"program\[0\], the version of the encoding, is 2, but this library knows version 1"),
        ([1, 0], [], "program has 2 elements"),
        ([1] + [0, -1] * 25, [], "program has 25 steps, but 24 are the most"),
        ([1], [0.0] * 25, "there are 25 scalars, but 24 are the most"),
        ([1, len(STEPS), -1], [], rf"program\[1\] is {len(STEPS)}, but a code is"),
        ([1, 0, -1, -3, -1], [], r"program\[3\] is -3, but a code is -2 \(load\), -1 \(save\), or the place of a step"),
        ([1, 2**62, -1], [], r"program\[1\] is 4611686018427387904"),
        ([1, 0, 0], [], r"program\[2\] is 0, but Relu takes no operand: its source must be -1"),
        ([1, 0, 2**32 - 1], [], r"program\[2\] is 4294967295, but Relu takes no operand"),
        ([1, CODE["Add"], -1], [], r"program\[2\] is -1, but a source is the place of an operand, 0 to 3, or "),
        ([1, CODE["Add"], 1], [], r"program\[2\] is 1, but there is no operand 1"),
        ([1, CODE["Add"], 7], [], r"program\[2\] is 7, but a source is"),
        ([1, CODE["Add"], 256], [], r"program\[2\] is 256, but a source is"),
        ([1, CODE["Add"], -(2**63)], [], r"program\[2\] is -9223372036854775808, but a source is"),
        ([1, CODE["Add"], 5], [], r"program\[2\] is 5, but nothing was saved in slot 1 before"),
        ([1, LOAD, 4], [], r"program\[2\] is 4, but nothing was saved in slot 0 before"),
        ([1, LOAD, -1], [], r"program\[2\] is -1, but a source is"),
        ([1, SAVE, 0], [], r"program\[2\] is 0, but a value is saved in a slot, 4 to 6"),
        ([1, SAVE, 7], [], r"program\[2\] is 7, but a value is saved in a slot"),
        ([1, CODE["Mul"], -1], [], r"program\[1\] is .* \(Mul\), which takes scalars\[0\], but there are 0 scalars"),
        ([1, CODE["Clamp"], -1], [1.0], r"\(Clamp\), which takes scalars\[1\], but there are 1 scalars"),
        ([1, CODE["Mul"], -1], [1.0, 2.0], "there are 2 scalars, but the steps of program take 1"),
        ([1, CODE["Hardtanh"], -1], [2.0, 1.0], r"\(Hardtanh\) of scalars\[0\], which is 2: min_val is greater"),
        ([1, CODE["Mul"], -1, CODE["PowScalar"], -1], [1.0, 1.7], r"program\[3\] .* of scalars\[1\], which is 1.7: "),
    ],
)  # fmt: skip
def test_malformed_program(program, scalars, message, device):
    x, operand = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    with pytest.raises(ValueError, match="^fused_act.chain: .*" + message):
        chain(x, [operand], program, scalars)
    with pytest.raises(ValueError, match=message):
        chain(x.to("meta"), [operand.to("meta")], program, scalars)
    with pytest.raises(ValueError, match=message):
        torch.ops.fused_act.chain_backward(x, x, [operand], program, scalars)


def test_anything_is_a_chain_or_an_error(device):
    draw = random.Random(5)
    x, operands = torch.rand(2, 3, device=device), [torch.rand(3, device=device), torch.rand(2, 1, device=device)]
    ran = 0
    for _ in range(4000):
        program, scalars = encode(random_chain(draw.random(), list(STEPS), 6))
        for _ in range(draw.choice([0, 1, 1, 2])):
            place = draw.randrange(len(program))
            program[place] = draw.choice(
                [-3, -2, -1, 0, 1, 3, 4, 6, 7, 30, 55, 56, 255, 256, 2**31, -(2**63), 2**63 - 1]
            )
        if draw.random() < 0.2:
            del program[draw.randrange(len(program)) :]
        if draw.random() < 0.2:
            scalars = scalars[:-1] if draw.random() < 0.5 else [*scalars, 0.0]
        try:
            chain(x, operands, program, scalars)
            ran += 1
        except ValueError as error:
            assert str(error).startswith("fused_act.chain: "), error
    assert 200 < ran < 3800


def test_too_many_operands_and_wrong_ones(device):
    x = torch.ones(2, 3, device=device)
    program, scalars = encode([("Add", ("operand", 0), ())])
    with pytest.raises(ValueError, match="fused_act.chain: there are 5 operands, but 4 are the most"):
        chain(x, [x] * 5, program, scalars)
    with pytest.raises(ValueError, match=r"fused_act.chain: operand_0 has 2 elements, but x.shape\[1\] is 3"):
        chain(x, [x[:, 0]], program, scalars)
    with pytest.raises(ValueError, match="fused_act.chain: operand_0 of shape .* does not broadcast to x of shape"):
        chain(x, [x.expand(2, 2, 3)], program, scalars)
    with pytest.raises(TypeError, match="fused_act.chain: operand_0 has dtype int64"):
        chain(x, [x.long()], program, scalars)


@pytest.mark.parametrize(
    "step, message",
    [
        (("Relux", None, ()), "step 1, 'Relux', does not exist; there are Relu, "),
        (("Relu", None, (1.0,)), r"step 1, 'Relu', takes 0 scalars, but is given \(1.0,\)"),
        (("Relu", ("operand", 0), ()), "step 1, 'Relu', takes no source"),
        (("Add", None, ()), "step 1, 'Add', takes a source"),
        (("Add", ("operand", 4), ()), r"step 1, 'Add', has the source \('operand', 4\), but there are"),
        (("Add", ("place", 0), ()), r"has the source \('place', 0\)"),
        (("save", ("slot", 3), ()), r"has the source \('slot', 3\)"),
        (("Clamp", None, (1.0,)), "takes 2 scalars"),
    ],
)
def test_encode_says_what_is_wrong(step, message):
    with pytest.raises(ValueError, match="^fused_act.chain: .*" + message):
        encode([("Relu", None, ()), step])


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch's machinery

CHAIN = [
    ("Add", ("operand", 0), ()),
    ("save", ("slot", 0), ()),
    ("Sigmoid", None, ()),
    ("MulOperand", ("slot", 0), ()),
    ("Mul", None, (0.5,)),
    ("Maximum", ("operand", 1), ()),
]
PROGRAM, SCALARS = encode(CHAIN)


def written_out(x, bias, floor):
    return torch.maximum(torch.nn.functional.silu(x + bias) * 0.5, floor)


def chain_inputs(dtype=torch.float64, device="cpu"):
    g = torch.Generator().manual_seed(3)
    shapes = [(2, 3, 5), (3, 1), (2, 3, 5)]
    return [torch.randn(s, generator=g, dtype=dtype).to(device).requires_grad_() for s in shapes]


def test_opcheck(device):
    x, bias, floor = chain_inputs(torch.float32, device)
    given = ([bias, floor], PROGRAM, SCALARS)
    ops = torch.ops.fused_act
    torch.library.opcheck(ops.chain.default, (x, *given))
    torch.library.opcheck(
        ops.chain.default, (x.detach().mT.requires_grad_(), [bias.detach().mT, bias.detach()[0]], *given[1:])
    )
    torch.library.opcheck(
        ops.chain_jvp.default, (x, *given), {"x_tangent": x.detach(), "operand_0_tangent": bias.detach()}
    )
    mask = [True, True, False, False, False]
    torch.library.opcheck(ops.chain_backward.default, (torch.ones_like(x), x, *given, mask))
    detached = [t.detach() for t in (x, bias, floor)]
    tangents = (detached[0], detached[1], None, None, None, [True] * 6)
    torch.library.opcheck(
        ops.chain_double_backward.default, (torch.ones_like(x), detached[0], detached[1:], *given[1:], *tangents)
    )


def test_compile(device, fresh_dynamo):
    def function(x, bias, floor):
        return chain(x, [bias, floor], PROGRAM, SCALARS) * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = chain_inputs(torch.float32, device)
    y, want = compiled(*inputs), function(*inputs)
    assert_same(y, want)
    for got, want in zip(*(torch.autograd.grad(t.sum(), inputs) for t in (y, want))):
        assert_same(got, want)


def test_compiled_autograd(device, fresh_dynamo):
    inputs = chain_inputs(torch.float32, device)
    other = [*PROGRAM[:-2], CODE["Minimum"], 1]
    for program in (PROGRAM, other):  # two programs are two graphs
        want = torch.autograd.grad(chain(inputs[0], inputs[1:], program, SCALARS).sum(), inputs)
        y = chain(inputs[0], inputs[1:], program, SCALARS)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
            got = torch.autograd.grad(y.sum(), inputs)
        for a, b in zip(got, want):
            assert_same(a, b)


def test_export(device):
    class Module(torch.nn.Module):
        def forward(self, x, bias, floor):
            return chain(x, [bias, floor], PROGRAM, SCALARS)

    inputs = tuple(t.detach() for t in chain_inputs(torch.float32, device))
    sizes = {0: torch.export.Dim("n")}
    exported = torch.export.export(Module(), inputs, dynamic_shapes=(sizes, None, sizes))
    larger = tuple(torch.cat([t, t]) if t.dim() == 3 else t for t in inputs)
    assert_same(exported.module()(*larger), Module()(*larger))


@pytest.mark.parametrize(
    "in_dims", [(0, None, None), (0, 0, None), (2, None, 1), (None, 1, 0), (None, None, 2)], ids=str
)
def test_vmap(in_dims, device):
    def batched(t, d):
        copies = torch.stack([t.detach() * (1 + k / 4) for k in range(3)])
        return t.detach() if d is None else copies.movedim(0, d)

    inputs = [batched(t, d) for t, d in zip(chain_inputs(device=device), in_dims)]

    def function(x, bias, floor):
        return chain(x, [bias, floor], PROGRAM, SCALARS)

    torch.testing.assert_close(
        torch.func.vmap(function, in_dims)(*inputs), torch.func.vmap(written_out, in_dims)(*inputs)
    )

    def gradients(function):
        return torch.func.grad(lambda *inputs: function(*inputs).square().sum(), argnums=(0, 1, 2))

    for got, want in zip(*(torch.func.vmap(gradients(f), in_dims)(*inputs) for f in (function, written_out))):
        torch.testing.assert_close(got, want)


def test_torch_func(device):
    x, bias, floor = (t.detach() for t in chain_inputs(device=device))

    def function(x, bias):
        return chain(x, [bias, floor], PROGRAM, SCALARS)

    def expected(x, bias):
        return written_out(x, bias, floor)

    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        got, want = (transform(lambda *a: f(*a).sum(-1), argnums=(0, 1))(x, bias) for f in (function, expected))
        torch.testing.assert_close(got, want)
    got, want = (torch.func.jvp(f, (x, bias), (x, bias)) for f in (function, expected))
    torch.testing.assert_close(got, want)


def test_a_third_derivative_is_an_error():
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    y = run([("Tanh", None, ())], x).sum()
    for _ in range(2):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="fused_act.chain.*third derivative"):
        torch.autograd.grad(y.sum(), x)


def test_any_subset_of_inputs_may_require_a_gradient(device):
    inputs = chain_inputs(device=device)
    want = torch.autograd.grad(written_out(*inputs).sum(), inputs)
    for chosen in range(1, 8):
        some = [t.detach().requires_grad_(bool(chosen >> k & 1)) for k, t in enumerate(inputs)]
        chain(some[0], some[1:], PROGRAM, SCALARS).sum().backward()
        for t, w in zip(some, want):
            if t.requires_grad:
                torch.testing.assert_close(t.grad, w)
            else:
                assert t.grad is None


FORMS = {
    "bias": lambda act, x, b, s, u: act(x + b),
    "scale and shift": lambda act, x, b, s, u: act(x * s + b),
    "bias, residual before": lambda act, x, b, s, u: act(x + b + u),
    "bias, residual after": lambda act, x, b, s, u: act(x + b) + u,
    "residual after": lambda act, x, b, s, u: act(x) + u,
    "gated": lambda act, x, b, s, u: act(x) * u,
    "gated with biases": lambda act, x, b, s, u: act(x + b) * (u + s),
    "a bias, among numbers": lambda act, x, b, s, u: act(((x + b) * 1.5 / 3.0) - 0.25) * 0.75 + 0.5,
    "less a bias": lambda act, x, b, s, u: act((x - b) / 3.0),
    "less a residual": lambda act, x, b, s, u: act(x - u) * 1.7,
    "among numbers, a bias at the end": lambda act, x, b, s, u: act(x * 1.5 + 0.5) * -2.0 + b,
    "among numbers": lambda act, x, b, s, u: act(x / 3.0) * 1.7,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["relu", "silu", "gelu", "hardswish", "softplus"])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_gives_what_its_steps_give(form, act, dtype, device):
    """forms.h: what is compiled for all of a chain, and the chain one step after the other, as it runs if something
    follows that changes nothing. With and without codes, in whole blocks and in less, dense and not."""
    act = getattr(torch.nn.functional, act)
    alone = fused_act.fuse(lambda x, b, s, u: FORMS[form](act, x, b, s, u))
    followed = fused_act.fuse(lambda x, b, s, u: FORMS[form](act, x, b, s, u) * 1.0 * 1.0)
    for shape in ((1, 1, 1, 1), (3, 2, 5, 1), (2, 7, 33, 31), (3, 4, 64, 64)):
        *outer, width = shape
        wide, u, go = (cases.filled((*outer, n * width + 1), dtype, seed=n).to(device) for n in (2, 3, 4))
        b, s = (cases.filled((shape[1], 1, 1), dtype, seed=n).to(device) for n in (5, 6))
        dense = wide[..., :width].contiguous()
        last = dense.contiguous(memory_format=torch.channels_last)
        for x in (
            dense,
            last,
            dense.transpose(0, 1).contiguous().transpose(0, 1),
            wide[..., 1::2],
            wide[..., 1 : 1 + width],
        ):
            for needs in ((1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 0, 0), (1, 1, 0, 1), (0, 0, 1, 0)):
                tensors = (x, b, s, u[..., :width])
                leaves = [t.detach().requires_grad_(bool(n)) for t, n in zip(tensors, needs)]
                asked = [t for t in leaves if t.requires_grad]
                results = []
                for f in (alone, followed):
                    y = f(*leaves)
                    gradients = [None] * len(asked)
                    if y.requires_grad:  # not where no operand of the form is asked for
                        gradients = torch.autograd.grad(y, asked, go[..., :width], allow_unused=True)
                    results.append([f(*(t.detach() for t in leaves)), y, *gradients])
                for got, want in zip(*results):
                    if got is None:
                        assert want is None
                    elif got.shape == x.shape or device.type == "cpu":
                        assert_same(got, want)
                    else:  # sums, in another order
                        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-1)
