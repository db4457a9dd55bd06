"""The whole table, every operator and every activation by name: values, gradients, layouts, in place, modules.

The other files go deeper into what all operators share, on a few of them (`op` in conftest.py).
"""

import inspect
import itertools
import math
import re

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F
from oracle import assert_same, report

import fused_act
from fused_act import functional, nn
from fused_act._table import LISTED

OPS = {op.name: op for op in fused_act.ops()}
ACTIVATIONS = ["linear", *(op.name for op in fused_act.ops() if op.is_activation)]


def activation_parameter(op):
    return next((p.name for p in op.parameters if p.kind == "activation"), None)


def make_variants():
    """Every operator, and where it takes an activation, with every one by name."""
    for op in fused_act.ops():
        name = activation_parameter(op)
        for act in ACTIVATIONS if name else [None]:
            kind = {name: act} if name else {}
            first = OPS[act].parameters[0] if act and act != "linear" and OPS[act].parameters else None
            if first and first.default is None and not first.optional:
                kind["alpha"] = 0.75
            yield pytest.param(op, kind, id=op.name + (f"-{act}" if act else ""))


VARIANTS = list(make_variants())
COLUMNS = 3
SAMPLES = {"bias": (0.0, 0.5, -1.25), "scale": (1.0, 0.5, -2.0), "residual": (1.0, -0.75, 0.0), "up": (1.0, -0.75, 2.5)}


@pytest.fixture(params=list(OPS))
def any_op(request):
    return OPS[request.param]


every_variant = pytest.mark.parametrize("op, kind", VARIANTS)


def scalars_of(op):
    """Required scalars get a value, and one of which one is required; the others keep their defaults."""
    if op.name == "clamp":
        return {"max": 0.75}
    return {p.name: 0.75 for p in op.parameters if p.kind == "scalar" and p.default is None and not p.optional}


def table_of(op, kind, values, dtype, device):
    """x that holds each of `values` beside each sample of every operand, and the operator's arguments."""
    params = {**scalars_of(op), **kind}
    if op.packing:
        gate = values[:, None].repeat(1, COLUMNS)
        up = torch.tensor(SAMPLES["up"], dtype=torch.float64).to(dtype).expand_as(gate)
        x = torch.cat([gate, up], -1) if op.packing == "halves" else torch.stack([gate, up], -1).flatten(-2)
        return x.to(device), params
    if not op.operands:
        return values.to(device), params
    x = values[:, None].repeat(1, COLUMNS)
    for k, p in enumerate(p for p in op.parameters if p.kind == "operand"):
        sample = torch.tensor(SAMPLES.get(p.name, SAMPLES["bias"]), dtype=torch.float64).roll(k).to(dtype)
        params[p.name] = (sample.expand_as(x).contiguous() if p.is_input else sample).to(device)
    return x.to(device), params


def run(op, x, params):
    return getattr(torch.ops.fused_act, op.name)(x, **params)


def slack(op, x, params, exact):
    """The size of the terms that a chain rounds on its way, in units of which its error is measured."""
    size = x.detach().cpu().double().abs()
    if op.packing:
        return exact.abs() * 4
    for p in op.parameters:
        value = params.get(p.name)
        if isinstance(value, torch.Tensor):
            value = value.cpu().double().abs()
            size = size * value.clamp(min=1) if p.name in ("scale", "up") else size + value
    return size.clamp(max=1e300) + exact.abs() * 4


@every_variant
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_value(op, kind, dtype, device):
    """float16 and bfloat16: every bit pattern; float32 and float64: every exponent, kinks and specials."""
    x, params = table_of(op, kind, cases.grid(dtype, op, scalars_of(op)), dtype, device)
    y = run(op, x, params)
    alone = op.is_activation or (kind and kind[activation_parameter(op)] == "linear")
    if dtype in cases.HALVES and alone:
        return oracle.assert_half_value(op, y, x, params)
    if dtype in cases.WIDES and not oracle.transcendental(op, params):
        return assert_same(y, oracle.reference(op, x, params), x=x)
    exact, got = oracle.oracle(op, x, params), y.cpu().double()
    eps = torch.finfo(oracle.COMPUTE[dtype]).eps
    if dtype == torch.float64:  # PyTorch's own formulas lose |x|^2 ulp in their tails; x - tanh(x) cancels
        limit = 1e-14 * exact.abs() * (1 + x.cpu().abs().clamp(max=40) ** 2 if not op.packing else 100) + 1e-300
        if op.name == "tanhshrink":
            limit = limit + 4e-16 * x.cpu().abs()
    else:
        limit = (4 if dtype == torch.float32 else 1) * oracle.ulp(exact, dtype) + 1e-37
    if not alone:
        limit = limit + 8 * eps * slack(op, x, params, exact)
    ok = ((got - exact).abs() <= limit) | oracle.same(got, exact.to(dtype).double())
    # The chain in the compute type may overflow on the way, or round to the other side of a jump.
    chain = oracle.reference(op, x, params).cpu().to(dtype).double()
    ok |= ((got - chain).abs() <= limit) | oracle.same(got, chain)
    report(ok, actual=got, exact=exact)


@pytest.mark.parametrize("op", [op for op in fused_act.ops() if op.is_activation], ids=lambda op: op.name)
def test_float32_where_functions_bend(op, device):
    """The grid of test_value could miss what is beyond 4 ulp at one number of 10,000."""
    x, params = cases.sweep().to(device), scalars_of(op)
    oracle.assert_value(op, run(op, x, params), x, params)


@cases.needs_cuda
@pytest.mark.parametrize(
    "op", [op for op in fused_act.ops() if op.is_activation and oracle.transcendental(op)], ids=lambda op: op.name
)
def test_every_float32(op):
    """gelu was 5 ulp off at 6 of these numbers."""
    params, count = scalars_of(op), 2**26
    for first in range(-(2**31), 2**31, count):
        x = (torch.arange(count, dtype=torch.int32, device="cuda") + first).view(torch.float32)
        oracle.assert_value(op, run(op, x, params), x, params, device="cuda", rounded_once=True)


@every_variant
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_gradient(op, kind, dtype, device):
    """Against float64 autograd, at kinks, ties and far values too."""
    values = cases.grid(dtype, op, scalars_of(op))
    if dtype in cases.HALVES:
        values = values[:: 1 if op.is_activation else 7]
    limit = 1e18 if dtype in cases.WIDES else 1e30  # beyond, PyTorch's float64 formulas overflow
    values = values[(values.abs() < limit) & ((values.abs() > 1e-300) | (values == 0))]
    x, params = table_of(op, kind, values, dtype, device)
    out = run(op, x, params)
    go = torch.tensor([1.0, -0.5, 3.0], dtype=dtype, device=device).repeat(out.numel() // 3 + 1)[: out.numel()]
    go = go.view_as(out)
    leaves = {k: v.clone().requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in params.items()}
    leaf = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(run(op, leaf, leaves), leaf, go)
    (exact, *_), (rounded, *_) = (oracle.gradients(op, x, params, go, double=double) for double in (True, False))
    got, rounded = got.cpu().double(), rounded.cpu().double()
    go = go.cpu().double().abs()
    if op.packing == "halves":
        go = torch.cat([go, go], -1)
    elif op.packing == "pairs":
        go = go.repeat_interleave(2, -1)
    scale = go * (exact / go).abs().clamp(min=1)
    if not op.is_activation or dtype == torch.float64:  # where PyTorch's formulas lose |x| ulp in float64
        scale = scale * 8 * (1 + x.cpu().double().abs()).clamp(max=64)
    ok = oracle.within(got, exact, scale, dtype) | oracle.within(got, rounded, scale, dtype)
    # A sum that rounds to a kink is on another side of it in float64.
    near = ok.double().mean() if op.operands and dtype in cases.HALVES else float(ok.all())
    if near < (0.99 if op.operands else 1):
        report(ok, actual=got, exact=exact, x=x.cpu())


SMOOTH = dict(atol=1e-5, rtol=1e-4, fast_mode=True)


def small(op, device, dtype=torch.float64, shape=(3, 4, 6), seed=0):
    """Leaves: x and an operand each, in the operator's order."""
    g = torch.Generator().manual_seed(seed)

    def leaf(*size):
        return (torch.rand(size, generator=g, dtype=torch.float64) * 4 - 2).to(dtype).to(device).requires_grad_()

    channels = shape[op.dim] if op.dim is not None else 0
    return [leaf(*shape)] + [
        leaf(*shape) if p.is_input else leaf(channels) for p in op.parameters if p.kind == "operand"
    ]


def as_function(op, kind, function=None):
    """The operator as a function of x and its operands."""
    function = function or getattr(torch.ops.fused_act, op.name)
    return lambda x, *operands: function(x, **dict(zip(op.operands, operands)), **scalars_of(op), **kind)


@every_variant
def test_numerical_derivatives(op, kind, device):
    """First and second order, reverse and forward mode, for x and every operand."""
    f, leaves = as_function(op, kind), small(op, device)
    assert torch.autograd.gradcheck(f, leaves, check_forward_ad=True, **SMOOTH)
    assert torch.autograd.gradgradcheck(f, leaves, check_fwd_over_rev=True, **SMOOTH)


@every_variant
def test_optional_operands_may_be_absent(op, kind, device):
    optional = [p.name for p in op.parameters if p.kind == "operand" and p.optional]
    if not optional:
        pytest.skip("all operands are required")
    x, *operands = small(op, device)
    given = {n: v for n, v in zip(op.operands, operands) if n not in optional}
    zeros = {n: torch.zeros_like(v) for n, v in zip(op.operands, operands) if n in optional}
    f = as_function(op, kind)
    results = []
    for extra in ({}, zeros):
        y = getattr(torch.ops.fused_act, op.name)(x, **given, **extra, **scalars_of(op), **kind)
        results.append((y, *torch.autograd.grad(y.sum(), [x, *given.values()])))
    for a, b in zip(*results):
        assert_same(a, b)
    assert f(x, *operands).shape == x.shape


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_every_layout(any_op, dtype, device):
    """Each stride pattern of x, the operands and the incoming gradient gives the bits of the contiguous ones."""
    op, kind = any_op, {activation_parameter(any_op): "silu"} if activation_parameter(any_op) else {}
    for shape in ((3, 4, 6, 16), (2, 8, 4, 8), (5, 4, 6)):
        plain = [t.detach() for t in small(op, device, dtype, shape)]

        def both(tensors, go):
            leaves = [t.detach().requires_grad_() for t in tensors]
            y = as_function(op, kind)(*leaves)
            go = torch.ones_like(y) if go is None else go(torch.ones_like(y))
            return [y, *torch.autograd.grad(y, leaves, go)]

        for name, layout in cases.LAYOUTS.items():
            moved = [layout(plain[0]), *(layout(t) if t.dim() > 1 else t for t in plain[1:])]
            same_values = [t.contiguous() for t in moved]
            got, want = both(moved, layout), both(same_values, None)
            for a, b in zip(got[: 1 + sum(t.dim() > 1 for t in plain)], want):
                assert torch.equal(a, b), (name, shape)
            if not op.packing:
                assert got[0].stride() == torch.empty_like(moved[0]).stride(), (name, shape)
            assert got[1].stride() == torch.empty_like(moved[0]).stride(), (name, shape)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_independent_of_length_and_position(any_op, dtype, device):
    op, kind = any_op, {activation_parameter(any_op): "gelu"} if activation_parameter(any_op) else {}
    cycle = torch.tensor([math.nan, math.inf, -math.inf, 3.0, -3.0, 0.0, 0.75, 1e4, -0.001, 2.0, -7.5]).to(dtype)
    params = {**scalars_of(op), **kind, **{n: torch.tensor([0.5], dtype=dtype, device=device) for n in op.operands}}
    pairs = op.packing == "pairs"

    def value(x):
        if op.packing:
            one = torch.ones_like(x)
            x = torch.stack([x, one], -1).flatten() if pairs else torch.cat([x, one])
        return run(op, x.to(device), params).cpu()

    alone = torch.cat([value(v.reshape(1)) for v in cycle])
    index = torch.arange(70) % len(cycle)
    for n in range(1, 71):
        turned = (index[:n] + n) % len(cycle)
        assert_same(value(cycle[turned]), alone[turned])


# ---------------------------------------------------------------------------------------------------------------------
# In place


IN_PLACE = [v for v in VARIANTS if v.values[0].in_place]


@pytest.mark.parametrize("op, kind", IN_PLACE)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "crop", "offset_1", "transposed"])
def test_in_place(op, kind, layout, device):
    for dtype in cases.DTYPES:
        x, *operands = (t.detach() for t in small(op, device, dtype, (2, 4, 3, 4)))
        x = cases.LAYOUTS[layout](x)
        expected = as_function(op, kind)(x, *operands)
        version = x._version
        result = as_function(op, kind, getattr(torch.ops.fused_act, op.in_place))(x, *operands)
        assert result is x or result.data_ptr() == x.data_ptr()
        assert x._version == version + 1
        assert_same(x, expected)


@pytest.mark.parametrize("op, kind", IN_PLACE)
def test_in_place_gradient_is_that_of_the_operator(op, kind, device):
    """Twice, since nothing that is saved is overwritten; and the second derivative."""
    for dtype in cases.DTYPES:
        leaves = small(op, device, dtype)
        f, f_ = as_function(op, kind), as_function(op, kind, getattr(torch.ops.fused_act, op.in_place))
        z = leaves[0] * 1
        y, plain = f_(z, *leaves[1:]), f(*leaves)
        assert y.data_ptr() == z.data_ptr()
        weight = cases.operand_values(y.shape, dtype, 3).to(device)
        want = torch.autograd.grad(plain, leaves, weight, create_graph=True)
        for _ in range(2):
            got = torch.autograd.grad(y, leaves, weight, create_graph=True)
            for a, b in zip(got, want):
                assert_same(a.detach(), b.detach())
        if dtype == torch.float64 and any(g.requires_grad for g in want):
            sums = [sum(g.sin().sum() for g in gradients) for gradients in (got, want)]
            second = [torch.autograd.grad(total, leaves, allow_unused=True) for total in sums]
            for a, b, leaf in zip(*second, leaves):
                a, b = (torch.zeros_like(leaf) if t is None else t for t in (a, b))
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name, saved", [("relu", "the result"), ("silu", "a copy"), ("hardswish", "a copy")])
def test_what_in_place_saves(name, saved, device):
    """A copy of x only where the result does not tell the derivative, as PyTorch; and none without a gradient."""
    kept = []
    f_ = getattr(functional, name + "_")
    x = torch.randn(3, 5, device=device, requires_grad=True)
    z = x * 1
    before = z.detach().clone()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        f_(z)
    assert [t.data_ptr() == z.data_ptr() for t in kept] == [saved == "the result"]
    assert torch.equal(kept[0], z.detach() if saved == "the result" else before)
    z = x.detach() * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: pytest.fail("saved"), lambda t: t):
        f_(z)


def transforms_of(step):
    """The same gradients by autograd and by transforms of torch.func, and what forward mode says of a direction."""

    def by_autograd(x, v):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(step(leaf), leaf, create_graph=True)
        (second,) = torch.autograd.grad((grad * v).sum(), leaf)
        return grad.detach(), (grad.detach() * v).sum(), second

    def by_transforms(x, v):
        grad = torch.func.grad(step)
        _, along = torch.func.jvp(step, (x,), (v,))
        _, second = torch.func.jvp(grad, (x,), (v,))
        return grad(x), along, second

    def by_others(x, v):
        grad = torch.func.vmap(torch.func.grad(step))(x[None])[0]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(), v)
            along = torch.autograd.forward_ad.unpack_dual(step(dual)).tangent
        return grad, along.detach(), torch.func.vjp(torch.func.grad(step), x)[1](v)[0]

    return by_autograd, by_transforms, by_others


@pytest.mark.parametrize("name", ["silu", "hardswish", "relu", "leaky_relu", "gelu"])
def test_in_place_through_transforms(name, device):
    """What is returned counts, and what was given."""
    in_place, plain = getattr(functional, name + "_"), getattr(functional, name)
    x, v = torch.randn(2, 3, 4, device=device, dtype=torch.float64)

    def of_returned(x):
        return (in_place(x * 1.5) * x).sum()

    def of_given(x):
        z = x * 1.5
        in_place(z)
        return (z * x).sum()

    want = transforms_of(lambda x: (plain(x * 1.5) * x).sum())[0](x, v)
    for step in (of_returned, of_given):
        for by in transforms_of(step):
            for a, b in zip(by(x, v), want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["silu", "mish_mish", "hardswish"])
def test_in_place_tangents_of_tangents(name, device):
    """Forward mode in forward mode is the second derivative along both directions."""
    in_place, plain = getattr(functional, name + "_"), getattr(functional, name)
    x, u, v = torch.randn(3, 12, device=device, dtype=torch.float64)

    def inner(x):
        return torch.func.jvp(lambda x: in_place(x * 1), (x,), (u,))[1]

    hessian = torch.func.hessian(lambda x: plain(x).sum())(x)
    got = torch.func.jvp(inner, (x,), (v,))[1]
    torch.testing.assert_close(got, hessian.diagonal() * u * v, rtol=1e-12, atol=1e-12)
    assert got.any()


def test_in_place_modules_through_functional_call(device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), nn.SiLU(inplace=True), torch.nn.Linear(5, 1)).to(device)
    plain = torch.nn.Sequential(model[0], torch.nn.SiLU(), model[2])
    x, parameters = torch.randn(3, 4, device=device), dict(model.named_parameters())
    got, want = (
        torch.func.grad(lambda p, m=m: torch.func.functional_call(m, p, (x,)).sum())(parameters) for m in (model, plain)
    )
    for key in parameters:
        torch.testing.assert_close(got[key], want[key])
        assert got[key].abs().sum() > 0


@pytest.mark.parametrize("residual", [lambda z: z, lambda z: z.view_as(z), lambda z: z.detach(), lambda z: z[:1]])
def test_in_place_with_an_operand_in_the_same_memory_in_training(residual, device):
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)

    def step(add):
        z = x * 1
        return torch.autograd.grad(add(z, residual(z)).square().sum(), x)[0]

    got = step(lambda z, r: functional.add_act_(z, r, "silu"))
    torch.testing.assert_close(got, step(lambda z, r: F.silu(z + r)), rtol=1e-12, atol=1e-12)


def test_in_place_of_a_view_in_training(device):
    x = torch.randn(4, 6, device=device, requires_grad=True)
    for f_, eager in ((functional.silu_, F.silu), (functional.relu_, F.relu)):
        z = x * 2
        f_(z[:, ::2])
        want = x * 2
        eager(want[:, ::2], inplace=True)
        torch.testing.assert_close(z, want)
        torch.testing.assert_close(
            *(torch.autograd.grad(t.square().sum(), x)[0] for t in (z, want)), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("dtype", cases.HALVES, ids=str)
def test_in_place_gradient_of_every_bit_pattern(dtype, device):
    for op in fused_act.ops():
        if not op.is_activation:
            continue
        x = cases.patterns(dtype).to(device).requires_grad_()
        y = getattr(torch.ops.fused_act, op.in_place)(x * 1, **scalars_of(op))
        (got,) = torch.autograd.grad(y, x, torch.ones_like(y))
        (want,) = torch.autograd.grad(run(op, x, scalars_of(op)), x, torch.ones_like(y))
        assert_same(got, want, x=x.detach())


WINDOWS = [
    ((4, 3), (2, 1)), ((3, 5, 4), (8, 2, 3)), ((2, 3, 4), (5, 0, 1)), ((9, 9), (3, 5)), ((2, 2), (7, 7)),
    ((4, 3), (3, 1)), ((2, 3), (3, 2)), ((3, 2), (2, 3)), ((5, 1, 3), (9, 0, 3)), ((0, 4), (0, 0)), ((3, 3), (7, 5)),
    ((2, 2, 2), (6, 3, 2)),
]  # fmt: skip


@pytest.mark.parametrize("sizes, strides", WINDOWS, ids=str)
def test_in_place_in_windows(sizes, strides, device):
    """Of what as_strided lays over itself eager writes some elements twice, or not."""
    memory = torch.linspace(-1, 1, 101, device=device)
    before = memory.clone()
    indices = itertools.product(*map(range, sizes))
    places = [sum(i * stride for i, stride in zip(index, strides)) for index in indices]
    if len(set(places)) < len(places):
        with pytest.raises(RuntimeError, match="share memory"):
            functional.relu_(memory.as_strided(sizes, strides))
        with pytest.raises(RuntimeError, match="share memory"):
            functional.relu_(torch.empty(101, device="meta").as_strided(sizes, strides))
        with pytest.raises(RuntimeError, match="share memory"):
            torch.func.functionalize(functional.relu_)(memory.as_strided(sizes, strides))
        assert torch.equal(memory, before)
        return
    functional.relu_(memory.as_strided(sizes, strides))
    expected = before.clone()
    expected[places] = before[places].relu()
    assert torch.equal(memory, expected)


def test_in_place_refuses_what_eager_refuses(device):
    leaf = torch.randn(4, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        functional.relu_(leaf)
    with pytest.raises(RuntimeError, match="share memory"):
        functional.relu_(torch.randn(1, device=device).expand(4))
    saved = torch.randn(4, device=device, requires_grad=True)
    y = saved.exp()
    functional.relu_(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_counts_in_inference_mode_too(device):
    x = torch.randn(4, device=device, requires_grad=True)
    z = x * 1
    w = z * z
    with torch.inference_mode():
        functional.silu_(z[:2])
        made_there = torch.ones(3, device=device)
        functional.silu_(made_there)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        w.sum().backward()
    before = made_there.clone()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        functional.silu_(made_there)
    assert torch.equal(made_there, before)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_in_place_a_call_that_fails_counts_nothing(mode, device):
    x = torch.randn(3, 7, device=device, requires_grad=True)
    z = x * 1
    w = z * z
    wide = z[:, :1].expand(3, 7)
    fails = [
        lambda: functional.relu_bias_(z, torch.randn(6, device=device)),
        lambda: functional.bias_act_(z, None, "no such activation"),
        lambda: functional.add_act_(z, torch.randn(2, 3, 7, device=device), "relu"),
        lambda: functional.relu_(wide),
    ]
    for fail in fails:
        with mode(), pytest.raises((RuntimeError, ValueError)):
            fail()
    assert z._version == 0
    w.sum().backward()
    assert torch.equal(x.grad, 2 * x)


def test_in_place_saves_nothing_that_no_gradient_reads(device):
    x = torch.randn(3, 6, device=device, requires_grad=True)
    y = functional.bias_act_(x * 1.5, torch.randn(6, device=device), "linear")
    y.mul_(2)
    assert_same(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, 3.0))


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "silu"])
def test_in_place_in_compiled_autograd(name, device):
    x = torch.randn(3, 6, device=device, requires_grad=True)
    in_place, plain = getattr(functional, name + "_"), getattr(functional, name)
    y = in_place(x * 1.5).square().sum()
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        (got,) = torch.autograd.grad(y, x)
    torch.testing.assert_close(got, torch.autograd.grad(plain(x * 1.5).square().sum(), x)[0])


def test_in_place_with_an_operand_in_the_same_memory(device):
    x = torch.randn(6, 4, device=device)
    expected = torch.relu(x + x[0])
    functional.add_act_(x, x[:1], "relu")
    assert torch.equal(x, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Compile, transforms, registration


def test_compile_and_opcheck(any_op, device):
    torch._dynamo.reset()
    op, kind = any_op, {activation_parameter(any_op): "mish"} if activation_parameter(any_op) else {}
    leaves = small(op, device, torch.float32)
    f = as_function(op, kind, getattr(functional, op.name))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    # The incoming gradient is expanded in one and dense in the other, and sums take another order.
    for t, u in zip(*(torch.autograd.grad(function(*leaves).sum(), leaves) for function in (compiled, f))):
        torch.testing.assert_close(t, u, rtol=1e-6, atol=1e-6)
    arguments = {**dict(zip(op.operands, leaves[1:])), **scalars_of(op), **kind}
    torch.library.opcheck(getattr(torch.ops.fused_act, op.name).default, (leaves[0],), arguments)
    if op.in_place:
        detached = [t.detach() for t in leaves]
        arguments.update(zip(op.operands, detached[1:]))
        torch.library.opcheck(getattr(torch.ops.fused_act, op.in_place).default, (detached[0].clone(),), arguments)
        f_ = as_function(op, kind, getattr(functional, op.in_place))
        compiled = torch.compile(lambda x, *o: f_(x * 2, *o) + 1, fullgraph=True, backend="aot_eager")
        assert_same(compiled(*detached), f(detached[0] * 2, *detached[1:]) + 1)


def test_vmap(any_op, device):
    op, kind = any_op, {activation_parameter(any_op): "elu"} if activation_parameter(any_op) else {}
    batch = [torch.stack([t.detach() for t in same]) for same in zip(*(small(op, device, seed=s) for s in range(3)))]
    f = as_function(op, kind)
    want = torch.stack([f(*(t[i] for t in batch)) for i in range(3)])
    assert_same(torch.func.vmap(f)(*batch), want)

    def gradient(*tensors):
        return torch.func.grad(lambda *t: f(*t).square().sum(), argnums=tuple(range(len(tensors))))(*tensors)

    for k, together in enumerate(torch.func.vmap(gradient)(*batch)):
        each = torch.stack([gradient(*(t[i] for t in batch))[k] for i in range(3)])
        torch.testing.assert_close(together, each)
    if op.in_place:
        x = batch[0].clone()
        torch.func.vmap(as_function(op, kind, getattr(torch.ops.fused_act, op.in_place)))(x, *batch[1:])
        assert_same(x, want)


def test_the_namespace_holds_exactly_the_documented_names():
    documented = {n for op in (*fused_act.ops(), *LISTED) for n in (op.name, *op.derived, op.in_place) if n}
    registered = {
        s.removeprefix("fused_act::").split(".")[0]
        for s in torch._C._dispatch_get_all_op_names()
        if s.startswith("fused_act::")
    }
    internal = {name for name in registered if name.startswith("_")}  # autograd's own
    assert registered - internal == documented
    assert all(re.fullmatch(r"_(\w+?)_coded(_backward|_jvp)?", name)[1] in documented for name in internal)


def test_mutation_is_declared():
    for op in fused_act.ops():
        for name in filter(None, (op.name, *op.derived, op.in_place)):
            schema = getattr(torch.ops.fused_act, name).default._schema
            written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
            assert written == ([op.input] if name == op.in_place else [])


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def test_clear_errors():
    x = torch.randn(2, 6)
    with pytest.raises(ValueError, match="no activation 'swish'; there are linear, relu"):
        functional.bias_act(x, act="swish")
    with pytest.raises(ValueError, match="alpha is None, but the activation 'fatrelu' has no default .* threshold"):
        functional.bias_act(x, act="fatrelu")
    with pytest.raises(ValueError, match="alpha is 0.5, but the activation 'silu' has no parameter"):
        functional.bias_act(x, act="silu", alpha=0.5)
    with pytest.raises(ValueError, match=r"fused_act.softshrink: lambd must be at least 0 \(-1\)"):
        functional.softshrink(x, -1.0)
    with pytest.raises(ValueError, match="min_val is greater than max_val"):
        functional.hardtanh(x, 2.0, 1.0)
    with pytest.raises(ValueError, match=r"has shape \[2, 5\], whose last dimension cannot be split in two"):
        functional.silu_and_mul(x[:, :5])
    with pytest.raises(ValueError, match="no dimension"):
        functional.silu_and_mul(torch.tensor(1.0))
    with pytest.raises(ValueError, match="gate_bias has 5 elements, but gate.shape"):
        functional.gated(x, x, "silu", gate_bias=torch.zeros(5))
    with pytest.raises(TypeError, match="residual is None"):
        torch.ops.fused_act.add_act(x, None, "relu")


# ---------------------------------------------------------------------------------------------------------------------
# Definitions of other projects, in our own words


def test_definitions_of_other_projects(device):
    x = torch.randn(5, 12, dtype=torch.float64, device=device)
    a, b = x[:, :6], x[:, 6:]
    # vLLM's documentation: the first half goes through the activation and multiplies the second.
    assert torch.allclose(functional.silu_and_mul(x), a / (1 + torch.exp(-a)) * b)
    assert torch.allclose(functional.gelu_and_mul(x), 0.5 * a * (1 + torch.erf(a / math.sqrt(2))) * b)
    cubic = math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)
    assert torch.allclose(functional.gelu_tanh_and_mul(x), 0.5 * a * (1 + torch.tanh(cubic)) * b)
    # gpt-oss: gate and linear part alternate, both limited, and the linear part has one added.
    gate, up = x[:, ::2].clamp(max=7), x[:, 1::2].clamp(-7, 7)
    assert torch.allclose(functional.swiglu_oai(x), gate / (1 + torch.exp(-1.702 * gate)) * (up + 1))
    # StyleGAN: bias, leaky ReLU of slope 0.2, a gain of sqrt(2), and limits.
    bias = torch.randn(12, dtype=torch.float64, device=device)
    z = x + bias
    style = torch.where(z < 0, z * 0.2, z) * math.sqrt(2)
    got = functional.bias_act(x, bias, "leaky_relu", alpha=0.2, gain=math.sqrt(2), clamp=1.5)
    assert torch.allclose(got, style.clamp(-1.5, 1.5))
    # Misra's paper and Howard's.
    assert torch.allclose(functional.mish(x), x * torch.tanh(torch.log1p(torch.exp(x))))
    assert torch.allclose(functional.hardswish(x), x * F.relu6(x + 3) / 6)


def test_gated_reads_strided_halves_in_place(device):
    packed = torch.randn(6, 5, 32, device=device)
    gate, up = packed.chunk(2, -1)
    assert_same(functional.gated(gate, up, "silu"), functional.silu_and_mul(packed))


@pytest.mark.parametrize("act", [op.name for op in fused_act.ops() if op.is_activation and oracle.transcendental(op)])
def test_gradient_of_the_half_beside_a_gate(act, dtype, device):
    """It is the gate's value, no result there: some formulas share an exponential with the derivative. Where the value
    is e^-k its error may be 1.5 k eps more, but is relative, whatever large number the gradient is multiplied by."""
    grid = cases.grid(dtype, OPS[act], scalars_of(OPS[act]))
    gate = torch.cat([torch.linspace(-8, 8, 20001, dtype=torch.float64), grid])
    gate = gate[gate.abs() <= 8].to(dtype).to(device)
    scalars = {"alpha": 0.75} if scalars_of(OPS[act]) else {}
    up = torch.ones_like(gate, requires_grad=True)
    (got,) = torch.autograd.grad(torch.ops.fused_act.gated(gate, up, act, **scalars), up, torch.full_like(up, 32))
    got, x = got.cpu().double(), gate.cpu().double()
    exact = 32 * oracle.oracle(OPS[act], gate, scalars_of(OPS[act])).cpu()
    eps = torch.finfo(oracle.COMPUTE[dtype]).eps
    size = -(exact / 32).abs().clamp(1e-300, 1).log()
    limit = eps * (4 + 1.5 * size * (x < -2)) if dtype != torch.float64 else 1e-14 * (1 + x**2)
    limit = limit * exact.abs() + torch.finfo(dtype).smallest_normal
    if act == "tanhshrink" and dtype == torch.float64:  # the oracle's x - tanh(x) cancels
        limit = limit + 32 * 4e-16 * x.abs()
    if dtype in cases.HALVES:
        limit = limit + 0.5 * oracle.ulp(exact, dtype) * (1 + 2**-8)
    report(((got - exact).abs() <= limit) | oracle.same(got, exact.to(dtype).double()), actual=got, exact=exact, gate=x)


def test_training_step_with_gradient_penalty(device):
    """A generator and a discriminator with bias_act as StyleGAN uses it, and the R1 penalty, equal to eager."""

    def leaky(x, bias):
        return functional.bias_act(x, bias, "leaky_relu", alpha=0.2, gain=math.sqrt(2))

    def eager(x, bias):
        return F.leaky_relu(x + bias.reshape(1, -1, *[1] * (x.dim() - 2)), 0.2) * math.sqrt(2)

    def step(act):
        torch.manual_seed(3)
        make = dict(dtype=torch.float64, device=device)
        g = [torch.randn(16, 8, **make) * 0.3, torch.zeros(16, **make), torch.randn(3, 4, 3, 3, **make) * 0.3]
        d = [torch.randn(6, 3, 3, 3, **make) * 0.3, torch.randn(6, **make), torch.randn(1, 6 * 4, **make) * 0.3]
        for t in (*g, *d):
            t.requires_grad_()
        image = F.conv2d(act(torch.randn(2, 8, **make) @ g[0].T, g[1]).view(2, 4, 2, 2), g[2], padding=1)

        def judge(x):
            return F.linear(act(F.conv2d(x, d[0], padding=1), d[1]).flatten(1), d[2])

        real = torch.randn(2, 3, 2, 2, **make).requires_grad_()
        score = judge(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        loss = F.softplus(judge(image)).mean() + F.softplus(-score).mean() + 5 * slope.square().sum([1, 2, 3]).mean()
        return [loss, *torch.autograd.grad(loss, [*g, *d])]

    for a, b in zip(step(leaky), step(eager)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Modules


def test_modules_take_torchs_arguments(device):
    twins = [name for name in nn.__all__ if hasattr(torch.nn, name)]
    assert {"Hardswish", "ReLU", "GELU", "SiLU", "LogSigmoid", "Threshold", "Softplus", "ELU"} <= set(twins)
    x = torch.randn(4, 7, device=device)
    for name in twins:
        ours, theirs = getattr(nn, name), getattr(torch.nn, name)
        arguments = (0.1, 2.0) if name == "Threshold" else ()
        for kwargs in ({}, {"inplace": True}, {"approximate": "tanh"}):
            if not set(kwargs) <= set(inspect.signature(theirs).parameters):
                continue
            a, b = ours(*arguments, **kwargs), theirs(*arguments, **kwargs)
            torch.testing.assert_close(a(x.clone()), b(x.clone()))
            assert not a.state_dict() and repr(a)
    assert torch.equal(nn.Hardtanh(-2.0, 0.5)(x), torch.nn.Hardtanh(-2.0, 0.5)(x))


def test_modules_with_parameters(device):
    x = torch.randn(3, 8, 5, device=device)
    module = nn.BiasAct(8, "silu", gain=2.0).to(device)
    assert set(module.state_dict()) == {"bias"} and not module.bias.any()
    module.bias.data.normal_()
    torch.testing.assert_close(module(x), F.silu(x + module.bias[:, None]) * 2)
    assert nn.BiasAct(act="relu").bias is None and torch.equal(nn.BiasAct(act="relu")(x), x.relu())
    norm = nn.ScaleShiftAct(8, "relu").to(device)
    assert norm.scale.eq(1).all() and not norm.shift.any()
    assert torch.equal(nn.AddAct("relu")(x, x), (x + x).relu())
    assert torch.equal(nn.Gated("linear")(x, x), x * x)


@pytest.mark.parametrize("affine", [True, False])
def test_fold_batchnorm(affine, device):
    bn = torch.nn.BatchNorm2d(6, affine=affine).to(device).eval()
    bn.running_mean.normal_()
    bn.running_var.uniform_(0.3, 3)
    if affine:
        bn.weight.data.normal_()
        bn.bias.data.normal_()
    x = torch.randn(2, 6, 3, 3, device=device)
    y = functional.scale_shift_act(x, *nn.fold_batchnorm(bn), "silu")
    torch.testing.assert_close(y, F.silu(bn(x)))
    with pytest.raises(ValueError, match="no running statistics"):
        nn.fold_batchnorm(torch.nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(TypeError, match="fold_batchnorm: expected a BatchNorm, but got a Linear"):
        nn.fold_batchnorm(torch.nn.Linear(2, 2))
