"""First derivatives (CONTRACT, section 2): kinks, ties, NaN, selection, accuracy, operand sums, what is saved."""

import contextlib
import gc
import math
import threading
import weakref

import cases
import oracle
import pytest
import torch
from cases import call, smooth_function, tracked
from oracle import assert_gradient, assert_operand_gradient, assert_same

import fused_act
from fused_act._program import encode


def run(op, x, params, grad_output):
    x, params, leaves = tracked(x, params)
    return torch.autograd.grad(call(op, x, params), leaves, grad_output)


def one_operand(op, dtype, device, value=0.3):
    return {n: torch.tensor([value], dtype=dtype, device=device) for n in cases.operands(op)}


def incoming(n, dtype):
    """Gradients of many magnitudes, both signs, with zeros."""
    g = torch.Generator().manual_seed(6)
    go = torch.exp2(torch.rand(n, generator=g) * 10 - 5).double() * torch.randint(-1, 2, (n,), generator=g)
    return go.to(dtype)


def test_gradient_for_x(op, dtype, device):
    """Every half bit pattern, every exponent of the wider types, kinks and their neighbours, NaN, infinities."""
    for chosen in cases.scalar_sets(op):
        x = cases.grid(dtype, op, chosen).to(device)
        params = {**chosen, **one_operand(op, dtype, device)}
        for go in (torch.ones(len(x), dtype=dtype), incoming(len(x), dtype)):
            go = go.to(device)
            assert_gradient(op, run(op, x, params, go)[0], x, params, go)


def test_gradient_exactly_at_kinks(op, dtype, device):
    """At kinks and ties, exactly representable here, the convention is autograd's for the written-out expression."""
    for chosen in cases.scalar_sets(op):
        values = [v for v in cases.kinks(op, chosen) if oracle.rounded(v, dtype) == oracle.rounded(v, torch.float64)]
        x = torch.tensor(values, dtype=dtype, device=device)
        params = {**chosen, **one_operand(op, dtype, device)}
        exact = oracle.slopes(op, x, params)[0]
        actual = run(op, x, params, torch.ones_like(x))[0].cpu().double()
        ok = (actual - exact).abs() <= 4 * torch.finfo(dtype).eps * exact.abs().clamp(min=1)
        oracle.report(ok, actual=actual, expected=exact, x=x.cpu())


@pytest.mark.parametrize(
    "name, arguments, x, slope",
    [
        ("relu_hardswish", {}, 0.0, 0.0),
        ("relu_hardswish", {}, 3.0, 1.5),  # F.hardswish(relu(x)) would give 1
        ("hardsigmoid", {}, -3.0, 0.0),
        ("hardsigmoid", {}, 3.0, 0.0),
        ("hardsigmoid", {}, math.nan, 0.0),
        ("relu_bias", {"bias": [0.5]}, 0.0, 0.0),
        ("div_leaky_relu", {"divisor": 2.0, "negative_slope": 0.25}, 0.0, 0.125),
        ("min_bias_scale", {"value": 0.5, "bias": [1.0], "scale": 4.0}, 0.5, 2.0),  # a tie: one half
        ("min_bias_scale", {"value": 0.5, "bias": [1.0], "scale": 4.0}, 0.75, 0.0),
    ],
)
def test_slopes_worked_out_by_hand(name, arguments, x, slope, dtype, device):
    arguments = {
        k: torch.tensor(v, dtype=dtype, device=device) if isinstance(v, list) else v for k, v in arguments.items()
    }
    leaf = torch.tensor([[x]], dtype=dtype, device=device, requires_grad=True)
    getattr(torch.ops.fused_act, name)(leaf, **arguments).backward()
    assert leaf.grad.item() == slope


def test_nan_input_gradient(op, dtype, device):
    """The gradient at a NaN is eager's for a one-element tensor, whatever the length."""
    for chosen in cases.scalar_sets(op):
        for n in (1, 7, 64, 1000):
            x = torch.full((n,), math.nan, dtype=dtype, device=device)
            go = incoming(n, dtype).to(device)
            params = {**chosen, **one_operand(op, dtype, device)}
            assert_gradient(op, run(op, x, params, go)[0], x, params, go)


@pytest.mark.parametrize("go", [math.inf, -math.inf, math.nan], ids=str)
def test_selection_not_masking(op, dtype, device, go):
    """Where the branch with x is not taken, an infinite or NaN incoming gradient gives 0, not NaN."""
    for chosen in cases.scalar_sets(op):
        x = torch.cat([cases.finite_grid(dtype, op, chosen), cases.specials(dtype)])
        x = x[~x.isnan()].to(device)
        params = {**chosen, **one_operand(op, dtype, device)}
        slope, computed = oracle.slopes(op, x, params)
        masked = (slope == 0) & (computed == 0)
        grad = run(op, x, params, torch.full_like(x, go))[0].cpu()
        eager = oracle.oracle_gradients(op, x, params, torch.full_like(x, go))[0]
        oracle.report(~masked | (grad == 0) | (eager != 0), grad=grad, x=x.cpu())
        settled = (slope == 0) == (computed == 0)
        # Eager multiplies go into the terms of a product rule, inf - inf; the operator multiplies the derivative once.
        right = oracle.same(grad.double(), eager) | (eager.isnan() & oracle.same(grad.double(), slope.double() * go))
        oracle.report(masked | ~settled | right, grad=grad, eager=eager, x=x.cpu())


def test_selection_for_operands(operand_op, dtype, device):
    """Elementwise operand gradients (full shape) against autograd in float64, infinite incoming gradients included."""
    for chosen in cases.scalar_sets(operand_op):
        x = cases.finite_grid(dtype, operand_op, chosen, 2000).to(device)
        operands = {
            n: cases.operand_values(x.shape, dtype, k).to(device) for k, n in enumerate(cases.operands(operand_op))
        }
        params = {**chosen, **operands, "dim": 0}
        go = incoming(len(x), dtype).to(device)
        go[::7] = math.inf
        _, *expected = oracle.oracle_gradients(operand_op, x, params, go)
        _, *slopes = oracle.oracle_gradients(operand_op, x, params, torch.ones_like(go))
        for actual, want, slope in zip(run(operand_op, x, params, go)[1:], expected, slopes, strict=True):
            actual = actual.cpu().double()
            near = oracle.within(actual, want, go.cpu().double().abs() + want.abs(), dtype)
            # As above: inf - inf in eager's product rule, the slope times inf in the operator.
            exact = want.isnan() & oracle.same(actual, slope * go.cpu().double())
            oracle.report(near | exact, actual=actual, want=want)


# ---------------------------------------------------------------------------------------------------------------------
# Operand gradients


@pytest.mark.parametrize("form", cases.OPERAND_FORMS)
def test_operand_gradient_of_every_form(operand_op, dtype, device, form):
    for shape in ((6, 5, 4, 7), (16, 24), (3, 4, 33), (2, 8, 3, 3, 3)):
        if cases.OPERAND_FORMS[form](shape) is None:
            continue
        for layout in ("contiguous", "channels_last", "step_all"):
            x = cases.LAYOUTS[layout](cases.filled(shape, dtype, operand_op).to(device))
            params = cases.make_params(operand_op, shape, dtype, device, form)
            go = cases.filled(shape, dtype, seed=2).to(device)
            check_gradients(operand_op, x, params, go)


def check_gradients(op, x, params, go):
    grad_x, *operand_grads = run(op, x, params, go)
    assert_gradient(op, grad_x, x, params, go)
    expected = oracle.oracle_gradients(op, x, params, go)[1:]
    # what is summed, without cancellation: |go| max(1, |df/db|) of each element
    full = cases.with_operands(params, lambda t: oracle.align(t, x, params.get("dim", 1)).expand(x.shape))
    slopes = oracle.oracle_gradients(op, x, full, torch.ones(x.shape))[1:]
    terms = [go.cpu().double().abs() * slope.abs().clamp(min=1) for slope in slopes]
    operands = [v for v in params.values() if isinstance(v, torch.Tensor)]
    for actual, want, term, operand in zip(operand_grads, expected, terms, operands, strict=True):
        aligned = oracle.align(operand, x, params.get("dim", 1))
        magnitude = term.sum_to_size(aligned.shape).reshape(operand.shape)
        assert_operand_gradient(actual, want, magnitude, operand, x)


@pytest.mark.parametrize("operand_dtype", cases.DTYPES, ids=str)
def test_operand_gradient_has_the_operands_dtype(operand_op, dtype, device, operand_dtype):
    shape = (37, 12, 5)
    x = cases.filled(shape, dtype, operand_op).to(device)
    params = cases.make_params(operand_op, shape, operand_dtype, device)
    check_gradients(operand_op, x, params, cases.filled(shape, dtype, seed=3).to(device))


@pytest.mark.parametrize("layout", ["step_inner", "expanded_all", "transposed", "offset_1", "windows"])
def test_operand_gradient_of_strided_operands(operand_op, device, layout):
    shape = (4, 6, 5)
    for form in ("channel", "full", "inner_dims"):
        x = cases.filled(shape, torch.float32, operand_op).to(device)
        params = cases.make_params(operand_op, shape, torch.float32, device, form)
        params = cases.with_operands(params, cases.LAYOUTS[layout])
        check_gradients(operand_op, x, params, cases.filled(shape, torch.float32, seed=3).to(device))


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -4])
def test_operand_along_any_dim(operand_op, dtype, device, dim):
    shape = (3, 5, 4, 7)
    x = cases.filled(shape, dtype, operand_op).to(device)
    params = dict(cases.some_scalars(operand_op), dim=dim)
    for k, name in enumerate(cases.operands(operand_op)):
        params[name] = cases.operand_values((shape[dim],), dtype, k).to(device)
    oracle.assert_value(operand_op, call(operand_op, x, params), x, params)
    check_gradients(operand_op, x, params, cases.filled(shape, dtype, seed=2).to(device))


def constant_operand_slope(op, params):
    """df/d(operand) where it is one number for the x used here, else None."""
    x = torch.ones(2, 1, dtype=torch.float64)
    grads = oracle.oracle_gradients(op, x, params, torch.tensor([[1.0], [0.0]]))[1:]
    return [g.item() for g in grads]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "expanded_all"])
@pytest.mark.parametrize("rows, channels, inner", [(4096, 3, 1), (4096, 1, 1), (64, 3, 64), (1, 2, 4096), (4097, 5, 3)])
def test_ones_in_half_precision_sum_exactly(operand_op, half, device, layout, rows, channels, inner):
    """4,096 rows of ones sum to 4096: summed in float16 they would stop at 2048, in bfloat16 at 256."""
    if half == torch.bfloat16 and rows == 4097:
        rows = 4096
    params = dict(cases.some_scalars(operand_op))
    for name in cases.operands(operand_op):
        params[name] = torch.zeros(channels, dtype=half)
    slope = constant_operand_slope(operand_op, cases.with_operands(params, lambda t: t[:1]))
    x = cases.LAYOUTS[layout](torch.ones(rows, channels, inner, dtype=half)).to(device)
    grads = run(operand_op, x, cases.with_operands(params, lambda t: t.to(device)), torch.ones_like(x))
    for grad, per_element in zip(grads[1:], slope):
        want = torch.tensor(rows * inner * per_element, dtype=torch.float64).to(half)
        assert (grad.cpu() == want).all(), (grad, want)


@pytest.mark.parametrize("shape", [(65537, 3), (3, 65537), (1, 1, 300001), (65, 64, 9, 9), (2, 5000, 3)], ids=str)
def test_long_sums_are_accurate(operand_op, dtype, device, shape):
    x = cases.filled(shape, dtype, operand_op).to(device)
    go = cases.filled(shape, dtype, seed=2).to(device)
    for form in ("channel", "one_element", "per_row"):
        check_gradients(operand_op, x, cases.make_params(operand_op, shape, dtype, device, form), go)


def test_operand_gradient_is_deterministic(operand_op, dtype, device):
    for shape in ((65, 64, 11, 9), (50003, 4), (4, 3, 30001)):
        for layout in ("contiguous", "channels_last"):
            x = cases.LAYOUTS[layout](cases.filled(shape, dtype, operand_op)).to(device)
            go = cases.filled(shape, dtype, seed=2).to(device)
            params = cases.make_params(operand_op, shape, dtype, device)
            first = run(operand_op, x, params, go)
            for _ in range(4):
                for a, b in zip(run(operand_op, x, params, go), first):
                    assert_same(a, b)


# ---------------------------------------------------------------------------------------------------------------------
# Only what is asked, undefined gradients, two backward passes


def subsets(op):
    n = 1 + len(cases.operands(op))
    return [[bool(i >> k & 1) for k in range(n)] for i in range(1, 2**n)]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 4), (2, 5, 64), (4, 8, 1024)], ids=str)
def test_any_subset_of_inputs_may_require_a_gradient(op, dtype, shape, device):
    x = cases.filled(shape, dtype, op).to(device)
    params = cases.make_params(op, shape, dtype, device)
    go = cases.filled(shape, dtype, seed=2).to(device)
    every = run(op, x, params, go)
    for needs in subsets(op):
        leaf = x.detach().requires_grad_(needs[0])
        names = cases.operands(op)
        own = {**params, **{n: params[n].detach().requires_grad_(needs[1 + k]) for k, n in enumerate(names)}}
        inputs = [leaf, *(own[n] for n in names)]
        y = call(op, leaf, own)
        assert y.requires_grad
        grads = torch.autograd.grad(y, [t for t in inputs if t.requires_grad], go)
        for a, b in zip(grads, [g for g, n in zip(every, needs) if n], strict=True):
            assert_same(a, b)


def test_backward_operator_returns_only_what_the_mask_asks(operand_op, device):
    shape = (3, 5, 4)
    x = cases.filled(shape, torch.float32, operand_op).to(device)
    params = {"dim": 1, **cases.make_params(operand_op, shape, torch.float32, device)}
    go = cases.ordinary(torch.float32)[:60].reshape(shape).to(device)
    every = run(operand_op, x, params, go)
    for mask in [[False] * (1 + len(cases.operands(operand_op))), *subsets(operand_op)]:
        grads = cases.derived(operand_op, "backward")(go, x, **params, output_mask=mask)
        assert len(grads) == len(mask)
        for grad, wanted, full in zip(grads, mask, every):
            if wanted:
                assert_same(grad, full)
            else:
                assert grad is None


def test_no_graph_when_nothing_requires_a_gradient(op, device):
    x = cases.filled((3, 5), torch.float32, op).to(device)
    params = cases.make_params(op, x.shape, torch.float32, device)
    assert not call(op, x, params).requires_grad
    with torch.no_grad():
        y = call(op, *tracked(x, params)[:2])
    assert not y.requires_grad and y.grad_fn is None


class NoGradient(torch.autograd.Function):
    """Passes its input on and returns an undefined gradient."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_undefined_incoming_gradient(op, device):
    x, params, leaves = tracked(
        cases.filled((3, 5), torch.float32, op).to(device), cases.make_params(op, (3, 5), torch.float32, device)
    )
    NoGradient.apply(call(op, x, params)).sum().backward()
    assert all(leaf.grad is None or (leaf.grad == 0).all() for leaf in leaves)


def test_two_backward_passes_give_exactly_twice_one(op, dtype, device):
    x, params, leaves = tracked(
        cases.filled((33, 7, 5), dtype, op).to(device), cases.make_params(op, (33, 7, 5), dtype, device)
    )
    y = call(op, x, params)
    go = cases.filled(y.shape, dtype, seed=2).to(device)
    kept = x.detach().clone(), go.clone()
    once = torch.autograd.grad(y, leaves, go, retain_graph=True)
    y.backward(go, retain_graph=True)
    y.backward(go)
    for leaf, grad in zip(leaves, once):
        assert_same(leaf.grad, grad + grad)
    assert_same(x.detach(), kept[0])
    assert_same(go, kept[1])


def test_second_backward_without_retain_graph_is_an_error(op):
    x, params, _ = tracked(cases.filled((3, 5), torch.float32, op), cases.make_params(op, (3, 5), torch.float32))
    y = call(op, x, params)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_changed_input_is_noticed(op):
    leaf = cases.filled((3, 5), torch.float32, op).requires_grad_()
    x = leaf * 1.0
    y = call(op, x, cases.make_params(op, x.shape, torch.float32))
    x.add_(1.0)
    try:
        y.sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:  # nothing was saved of x but what cannot change (a mask)
        fresh = cases.filled((3, 5), torch.float32, op).requires_grad_()
        call(op, fresh, cases.make_params(op, fresh.shape, torch.float32)).sum().backward()
        assert_same(leaf.grad, fresh.grad)


@pytest.mark.parametrize("incoming_kind", ["expanded", "zeros", "channels_last"])
def test_incoming_gradients_of_other_layouts(op, dtype, device, incoming_kind):
    shape = (3, 5, 4, 6)
    x = cases.filled(shape, dtype, op).to(device)
    params = cases.make_params(op, shape, dtype, device)
    go = {
        "expanded": lambda: torch.ones((), dtype=dtype).expand(shape),
        "zeros": lambda: torch.zeros(shape, dtype=dtype),
        "channels_last": lambda: cases.LAYOUTS["channels_last"](cases.filled(shape, dtype, seed=2)),
    }[incoming_kind]().to(device)
    (grad_x, *sums), (expected, *expected_sums) = run(op, x, params, go), run(op, x, params, go.contiguous())
    assert_same(grad_x, expected)
    for a, b in zip(sums, expected_sums, strict=True):  # of 72 terms, in an order that may depend on the layout
        torch.testing.assert_close(a, b, rtol=64 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps)


# ---------------------------------------------------------------------------------------------------------------------
# What is saved for backward


def chain(x, operands, *steps):
    return torch.ops.fused_act.chain(x, operands, *encode(steps))


OPERAND = ("operand", 0)
ADDED = {
    "before": (lambda x, r, b: torch.ops.fused_act.add_act(x, r, "silu"), "x"),
    "beside a bias": (lambda x, r, b: torch.ops.fused_act.add_act(x, r, "gelu", bias=b), "x"),
    "after": (lambda x, r, b: torch.ops.fused_act.act_add(x, r, "silu", bias=b), "go"),
    "alone": (lambda x, r, b: torch.ops.fused_act.add_act(x, r, "linear"), "go"),
    "after a factor": (
        lambda x, r, b: chain(x, [r], ("Mul", None, (2.0,)), ("Add", OPERAND, ()), ("Silu", None, ())),
        None,
    ),
    "twice": (lambda x, r, b: chain(x, [r], ("Add", OPERAND, ()), ("Silu", None, ()), ("Add", OPERAND, ())), None),
    "also a factor": (
        lambda x, r, b: chain(x, [r], ("Add", OPERAND, ()), ("Silu", None, ()), ("MulOperand", OPERAND, ())),
        None,
    ),
    "in another order": (lambda x, r, b: torch.ops.fused_act.add_act(x, r, "silu"), None),
    "of another dtype": (lambda x, r, b: torch.ops.fused_act.add_act(x, r, "silu"), None),
    "of one row": (lambda x, r, b: torch.ops.fused_act.add_act(x, r, "silu"), None),
}


@pytest.mark.parametrize("shape", [(5, 4, 7, 6), (5, 32, 16, 16)], ids=["small", "large"])
@pytest.mark.parametrize("how", ADDED)
def test_gradient_of_what_is_added_is_a_tensor_that_is_there(how, shape, device):
    """That of x or the incoming one, as in ATen for a sum; no other is. Two leaves do not share what they keep."""
    function, same = ADDED[how]
    g = torch.Generator().manual_seed(1)
    x, r, b, go = (torch.randn(s, generator=g).to(device) for s in (shape, shape, shape[1:2], shape))
    own = r.double() if "dtype" in how else r.mT.contiguous().mT if "order" in how else r[:1] if "row" in how else r
    leaves = [x.requires_grad_(), own.detach().requires_grad_(), b.requires_grad_()]
    y = function(*leaves)
    grad_x, grad = torch.autograd.grad(y, leaves[:2], go, retain_graph=True)
    assert shares_storage(grad, grad_x) == (same == "x") and shares_storage(grad, go) == (same == "go")
    (alone,) = torch.autograd.grad(y, leaves[1], go, retain_graph=True)
    assert torch.equal(grad, alone)
    wide = [t.detach().cpu().double().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(function(*wide), wide[:2], go.cpu().double())
    for got, want in zip((grad_x, grad), expected, strict=True):
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)
    y.backward(go)
    assert not shares_storage(leaves[0].grad, leaves[1].grad) and not shares_storage(leaves[1].grad, go)
    assert torch.equal(leaves[1].grad, grad)


def saved(op, x, params):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = call(op, x, params)
    return y, kept


def shares_storage(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_saves_only_inputs_or_less(op, dtype, device):
    x, params, leaves = tracked(
        cases.filled((33, 7, 5), dtype, op).to(device), cases.make_params(op, (33, 7, 5), dtype, device)
    )
    y, kept = saved(op, x, params)
    inputs = [x, *(v for v in params.values() if isinstance(v, torch.Tensor))]
    own = [t for t in kept if not any(shares_storage(t, i) for i in inputs)]
    assert sum(t.numel() * t.element_size() for t in own) <= x.numel() // 4, "an intermediate tensor is saved"
    assert not any(shares_storage(t, y) for t in kept), "the output is saved"
    assert len(kept) <= len(inputs)


def test_saves_nothing_that_a_gradient_does_not_need(operand_op, device):
    """An operand whose gradient does not depend on x saves nothing of x, and the other way round."""
    shape = (33, 7, 5)
    x = cases.filled(shape, torch.float32, operand_op).to(device)
    params = cases.make_params(operand_op, shape, torch.float32, device)
    go = torch.ones(shape)
    names = cases.operands(operand_op)

    def grads(x, params):
        return oracle.oracle_gradients(operand_op, x, params, go)

    shifted = {**params, **{n: params[n] + 1.3 for n in names}}
    if torch.equal(grads(x, params)[0], grads(x, shifted)[0]):
        _, kept = saved(operand_op, *tracked(x, params, operands_need=False)[:2])
        assert kept and all(t.shape == x.shape or t.numel() < x.numel() // 4 for t in kept)
        assert not any(shares_storage(t, params[n]) for t in kept for n in names), "an operand is saved for nothing"
    if all(torch.equal(a, b) for a, b in zip(grads(x, params)[1:], grads(x * 1.7 - 0.3, params)[1:])):
        _, kept = saved(operand_op, *tracked(x, params, x_needs=False)[:2])
        assert not kept, "saved for the gradient of an operand that needs nothing"


@pytest.mark.parametrize("name", ["relu_bias", "min_bias_scale"])
def test_bias_gradient_needs_nothing_and_x_needs_x(name):
    """The general test above, spelt out for two operators."""
    (op,) = (op for op in fused_act.ops() if op.name == name)
    x = cases.filled((4, 6), torch.float32, op)
    params = cases.make_params(op, x.shape, torch.float32)
    assert not saved(op, *tracked(x, params, x_needs=False)[:2])[1]
    leaf, own, _ = tracked(x, params)
    kept = saved(op, leaf, own)[1]
    assert len(kept) == 1 and (shares_storage(kept[0], leaf) or kept[0].numel() < x.numel())


def test_saves_nothing_without_gradients(op, device):
    x = cases.filled((33, 7, 5), torch.float32, op).to(device)
    params = cases.make_params(op, x.shape, torch.float32, device)
    assert not saved(op, x, params)[1]
    with torch.no_grad():
        assert not saved(op, *tracked(x, params)[:2])[1]


def test_saved_tensor_hooks_may_replace_what_is_saved(op):
    """Offloading: the hooks store copies, and backward works from those."""
    x, params, leaves = tracked(cases.filled((9, 5), torch.float32, op), cases.make_params(op, (9, 5), torch.float32))
    go = torch.ones(9, 5)
    expected = torch.autograd.grad(call(op, x, params), leaves, go)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone().numpy(), lambda a: torch.from_numpy(a)):
        y = call(op, x, params)
    for a, b in zip(torch.autograd.grad(y, leaves, go), expected):
        assert_same(a, b)


def test_graph_is_freed(op):
    """No cycle keeps the input alive once the output is gone."""
    leaf = cases.filled((9, 5), torch.float32, op).requires_grad_()
    x = leaf * 1.0
    watch = weakref.ref(x)
    y = call(op, x, cases.make_params(op, x.shape, torch.float32))
    del x
    gc.disable()
    try:
        del y
        assert watch() is None
    finally:
        gc.enable()


def test_graph_says_its_name(op):
    """In profiles and anomaly reports the node must be recognisable."""
    x = cases.filled((3, 5), torch.float32, op).requires_grad_()
    node = call(op, x, cases.make_params(op, x.shape, torch.float32)).grad_fn
    assert op.name.replace("_", "") in node.name().lower().replace("_", "")


# ---------------------------------------------------------------------------------------------------------------------
# Numerical checks by PyTorch itself


@pytest.mark.parametrize("chosen_index", [0, -1])
def test_gradcheck(op, device, chosen_index):
    """First and forward-mode derivatives, batched, with undefined gradients, against finite differences."""
    function, leaves = smooth_function(op, cases.scalar_sets(op)[chosen_index], device)
    assert torch.autograd.gradcheck(
        function,
        leaves,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


def test_gradient_is_finite_where_the_derivative_is(device):
    """g taken through the chain in forward order, g / divisor * slope, would overflow on the way."""
    for dtype, big in ((torch.float32, 1e38), (torch.bfloat16, 1e38), (torch.float64, 1e308)):
        for slope in (0.01, 0.0):
            x = torch.tensor([-1.0, -2.0], dtype=dtype, device=device, requires_grad=True)
            y = torch.ops.fused_act.div_leaky_relu(x, 0.1, slope)
            grad = torch.autograd.grad(y, x, torch.full_like(x, big))[0]
            expected = torch.full_like(x, big).double() * slope * 10
            torch.testing.assert_close(grad.double(), expected, rtol=1e-2, atol=0)


def test_batched_gradients_of_operands_alone(operand_op, device):
    """torch.autograd.grad(is_grads_batched=True) runs the Node under vmap's older form, which knows few operators."""
    x = cases.filled((2, 3, 4), torch.float64).to(device)
    params = cases.make_params(operand_op, x.shape, torch.float64, device)
    _, own, leaves = tracked(x, params, x_needs=False)
    go = torch.stack([cases.filled(x.shape, torch.float64, seed=k) for k in range(3)]).to(device)
    batched = torch.autograd.grad(call(operand_op, x, own), leaves, go, is_grads_batched=True)
    single = [torch.autograd.grad(call(operand_op, x, own), leaves, g) for g in go]
    for n, grads in enumerate(batched):
        torch.testing.assert_close(grads, torch.stack([s[n] for s in single]))


def test_two_threads_in_one_graph(op):
    """Without retain_graph the later one raises; nothing is read while it is released."""
    x = cases.filled((20000,), torch.float32).requires_grad_()
    params = {**cases.some_scalars(op), **{n: torch.ones(()) for n in cases.operands(op)}}
    for _ in range(30):
        h = call(op, x * 1.0, params)
        losses = h.sum(), (h * 2).sum()
        barrier = threading.Barrier(2)

        def backward(loss, barrier=barrier):
            barrier.wait()
            with contextlib.suppress(RuntimeError):  # "backward through the graph a second time"
                loss.backward()

        workers = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
