"""Second derivatives, forward mode and the end at the third (CONTRACT, section 2, "orders")."""

import cases
import oracle
import pytest
import torch
import torch.autograd.forward_ad as fwad
from cases import call, smooth_function, tracked
from oracle import assert_same


def second_order(evaluate, x, params, go, cotangents):
    """Gradients of sum(first-order gradients * cotangents) with respect to go, x and each operand."""
    leaves = [t for t in (x, *params.values()) if isinstance(t, torch.Tensor)]
    first = torch.autograd.grad(evaluate(x, params), leaves, go, create_graph=True)
    pairs = [(f, c) for f, c in zip(first, cotangents) if c is not None and f.requires_grad]
    total = sum((f * c.to(f)).sum() for f, c in pairs)
    return torch.autograd.grad(total, [go, *leaves], allow_unused=True, materialize_grads=True)


def oracle_second_order(op, x, params, go, cotangents):
    params = oracle.converted(op, params, oracle.COMPUTE[x.dtype], torch.float64, "cpu")
    params = cases.with_operands(params, lambda t: t.requires_grad_())
    x64 = x.detach().cpu().double().requires_grad_()
    go64 = go.detach().cpu().double().requires_grad_()
    c64 = [None if c is None else c.cpu().double() for c in cotangents]
    return second_order(lambda x, p: oracle.evaluate(op, x, p, oracle.GRADIENTS), x64, params, go64, c64)


def check_second_order(op, x, params, go, use=None):
    """`use`: which of the first-order gradients enter, None for all."""
    shapes = [x, *(v for v in params.values() if isinstance(v, torch.Tensor))]
    cotangents = [cases.operand_values(t.shape, t.dtype, 30 + k).to(t.device) for k, t in enumerate(shapes)]
    if use is not None:
        cotangents = [c if wanted else None for c, wanted in zip(cotangents, use)]
    leaf, own, _ = tracked(x, params)
    go = go.detach().requires_grad_()
    actual = second_order(lambda x, p: call(op, x, p), leaf, own, go, cotangents)
    expected = oracle_second_order(op, x, params, go, cotangents)
    for got, want, source in zip(actual, expected, [go, *shapes], strict=True):
        assert got.dtype == source.dtype and got.shape == source.shape
        got = got.detach().cpu().double()
        # sums of up to x.numel() products of order 10
        scale = want.abs() + 100.0 * (x.numel() / max(1, got.numel())) ** 0.5
        oracle.report(oracle.within(got, want, scale, source.dtype), got=got, want=want)


def finite_points(op, dtype, chosen, device):
    """Kinks and ordinary values, without neighbours of kinks: there float32 and float64 are on different sides."""
    points = torch.tensor(cases.kinks(op, chosen), dtype=torch.float64).to(dtype)
    x = torch.cat([points, cases.ordinary(dtype)])
    return x[: len(x) // 6 * 6].reshape(-1, 6).to(device)


def test_second_order_at_kinks_and_between(op, dtype, device):
    for chosen in cases.scalar_sets(op):
        x = finite_points(op, dtype, chosen, device)
        params = cases.make_params(op, x.shape, dtype, device, chosen=chosen)
        check_second_order(op, x, params, cases.operand_values(x.shape, dtype, 9).to(device))


@pytest.mark.parametrize("form", cases.OPERAND_FORMS)
def test_second_order_with_every_operand_form(operand_op, device, form):
    shape = (3, 5, 4, 6)
    x = cases.filled(shape, torch.float32).to(device)
    params = cases.make_params(operand_op, shape, torch.float32, device, form)
    check_second_order(operand_op, x, params, cases.operand_values(shape, torch.float32, 9).to(device))


@pytest.mark.parametrize("layout", ["channels_last", "step_all", "expanded_batch", "transposed", "offset_1"])
def test_second_order_in_every_layout(op, device, layout):
    shape = (3, 5, 4, 6)
    change = cases.LAYOUTS[layout]
    x = change(cases.filled(shape, torch.float32).to(device))
    params = cases.make_params(op, shape, torch.float32, device)
    go = cases.operand_values(shape, torch.float32, 9).to(device)
    check_second_order(op, x, params, go)
    check_second_order(op, x, params, change(go))


@pytest.mark.parametrize("use", [(True, False), (False, True)], ids=["grad_x_only", "grad_operand_only"])
def test_second_order_of_one_gradient_alone(operand_op, device, use):
    """The other incoming second-order gradients are undefined."""
    x = cases.filled((4, 6), torch.float32).to(device)
    params = cases.make_params(operand_op, x.shape, torch.float32, device)
    mask = [use[0], *[use[1]] * len(cases.operands(operand_op))]
    check_second_order(operand_op, x, params, cases.operand_values(x.shape, torch.float32, 9).to(device), mask)


def test_double_backward_operator(op, device):
    """Called by itself: the mask selects the outputs, absent cotangents count as zero, strides follow the inputs."""
    shape = (3, 5, 4)
    names = cases.operands(op)
    x = cases.LAYOUTS["channels_last"](cases.filled(shape, torch.float32, op)).to(device)
    params = cases.make_params(op, shape, torch.float32, device)
    extra = {"dim": 1} if names else {}
    go, vx = (cases.operand_values(shape, torch.float32, k).to(device) for k in (9, 10))
    vs = {
        f"grad_grad_{n}": cases.operand_values(params[n].shape, torch.float32, k).to(device)
        for k, n in enumerate(names)
    }
    double_backward = cases.derived(op, "double_backward")

    def run(vx, vs, mask):
        return double_backward(go, x, **params, **extra, grad_grad_x=vx, **vs, output_mask=mask)

    everything = [True] * (2 + len(names))
    full = run(vx, vs, everything)
    expected = oracle_second_order(op, x, params, go, [vx, *vs.values()])
    for got, want in zip(full, expected, strict=True):
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-4)
    assert full[1].stride() == torch.empty_like(x).stride()
    zeros = {k: torch.zeros_like(v) for k, v in vs.items()}
    for got, want in zip(run(vx, dict.fromkeys(vs), everything), run(vx, zeros, everything)):
        assert_same(got, want)
    if names:
        for got, want in zip(run(None, vs, everything), run(torch.zeros_like(vx), vs, everything)):
            assert_same(got, want)
    for k in range(len(everything)):
        mask = [i == k for i in range(len(everything))]
        for i, (got, want) in enumerate(zip(run(vx, vs, mask), full)):
            if i == k:
                assert_same(got, want)
            else:
                assert got is None


@pytest.mark.parametrize("chosen_index", [0, -1])
def test_gradgradcheck(op, device, chosen_index):
    function, leaves = smooth_function(op, cases.scalar_sets(op)[chosen_index], device)
    assert torch.autograd.gradgradcheck(
        function,
        leaves,
        check_batched_grad=True,
        check_fwd_over_rev=True,
    )


def curved(op, x, params):
    """Is the second derivative of the expression other than zero at some element of x?"""
    x = x.detach().double().requires_grad_()
    slope = torch.autograd.grad(oracle.evaluate(op, x, params, oracle.GRADIENTS).sum(), x, create_graph=True)[0]
    if not slope.requires_grad:
        return False
    curvature = torch.autograd.grad(slope.sum(), x, allow_unused=True)[0]
    return curvature is not None and bool((curvature != 0).any())


def test_third_derivative_is_a_clear_error(op):
    """Never a silent zero or a wrong number. Where the function is piecewise linear it may also be the right zero."""
    x = cases.filled((2, 30), torch.float64).requires_grad_()
    go, v = (cases.operand_values(x.shape, torch.float64, k).requires_grad_() for k in (1, 2))
    params = cases.make_params(op, x.shape, torch.float64)
    third = pytest.raises(RuntimeError, match=rf"(?s){op.name}.*third derivative")
    (first,) = torch.autograd.grad(call(op, x, params), x, go, create_graph=True)
    routes = {
        "x, x": torch.autograd.grad(first, x, v, create_graph=True, allow_unused=True)[0],
        "go, x": torch.autograd.grad(
            torch.autograd.grad(first, go, v, create_graph=True)[0].sum(), x, create_graph=True, allow_unused=True
        )[0],
    }
    for route, second in routes.items():
        if curved(op, x, params):
            assert second is not None and second.requires_grad, f"{route}: the graph ends too early"
            with third:
                torch.autograd.grad(second.sum(), x)
        elif second is not None:
            assert (second == 0).all()
            if second.requires_grad:
                with third:
                    torch.autograd.grad(second.sum(), x)


# ---------------------------------------------------------------------------------------------------------------------
# Forward mode


def tangents(x, params):
    t = {"x_tangent": cases.operand_values(x.shape, x.dtype, 20).to(x.device)}
    for k, (name, v) in enumerate(params.items()):
        if isinstance(v, torch.Tensor):
            t[f"{name}_tangent"] = cases.operand_values(v.shape, v.dtype, 21 + k).to(x.device)
    return t


def oracle_jvp(op, x, params, t):
    """Sum of f_x * x_tangent and f_b * b_tangent, from the gradients of the expression (not from its own jvp)."""
    full = cases.with_operands(params, lambda v: oracle.align(v, x, params.get("dim", 1)).expand(x.shape))
    grads = oracle.oracle_gradients(op, x, full, torch.ones(x.shape))
    names = ["x", *(n for n, v in params.items() if isinstance(v, torch.Tensor))]
    total = torch.zeros(x.shape, dtype=torch.float64)
    for name, grad in zip(names, grads, strict=True):
        tangent = t[f"{name}_tangent"]
        if tangent is not None:
            tangent = tangent.cpu().double()
            if name != "x":
                tangent = oracle.align(tangent, x, params.get("dim", 1))
            total = total + grad * tangent
    return total


def test_jvp_at_kinks_and_between(op, dtype, device):
    for chosen in cases.scalar_sets(op):
        x = finite_points(op, dtype, chosen, device)
        params = cases.make_params(op, x.shape, dtype, device, chosen=chosen)
        t = tangents(x, params)
        with fwad.dual_level():
            duals = {
                k: fwad.make_dual(v, t[f"{k}_tangent"]) if isinstance(v, torch.Tensor) else v for k, v in params.items()
            }
            primal, tangent = fwad.unpack_dual(call(op, fwad.make_dual(x, t["x_tangent"]), duals))
        assert tangent is not None, "forward mode was silently dropped"
        assert_same(primal, call(op, x, params))
        assert tangent.dtype == dtype and tangent.stride() == primal.stride()
        want, got = oracle_jvp(op, x, params, t), tangent.cpu().double()
        oracle.report(oracle.within(got, want, want.abs() + 4.0, dtype), got=got, want=want, x=x.cpu())


def test_jvp_of_each_input_alone(op, device):
    shape = (3, 5, 4)
    x = cases.filled(shape, torch.float32).to(device)
    params = cases.make_params(op, shape, torch.float32, device)
    t = tangents(x, params)
    for name in ["x", *cases.operands(op)]:
        only = {k: v if k == f"{name}_tangent" else None for k, v in t.items()}
        with fwad.dual_level():
            own = {**params, "x": x}
            own[name] = fwad.make_dual(own[name], only[f"{name}_tangent"])
            leaf = own.pop("x")
            tangent = fwad.unpack_dual(call(op, leaf, own)).tangent
        torch.testing.assert_close(tangent.cpu().double(), oracle_jvp(op, x, params, only), rtol=1e-5, atol=1e-5)


def test_jvp_operator(op, device):
    """Called by itself, with every subset of the tangents."""
    shape = (3, 5, 4)
    x = cases.LAYOUTS["channels_last"](cases.filled(shape, torch.float32)).to(device)
    params = cases.make_params(op, shape, torch.float32, device)
    extra = {"dim": 1} if cases.operands(op) else {}
    t = tangents(x, params)
    for bits in range(1, 2 ** len(t)):
        some = {k: v if bits >> i & 1 else None for i, (k, v) in enumerate(t.items())}
        out = cases.derived(op, "jvp")(x, **params, **extra, **some)
        assert out.stride() == torch.empty_like(x).stride()
        torch.testing.assert_close(out.cpu().double(), oracle_jvp(op, x, params, some), rtol=1e-5, atol=1e-5)


def test_jvp_selects(op, device):
    """An infinite tangent at an element whose branch is not taken gives 0, as in eager."""
    x = cases.finite_grid(torch.float32, op, cases.some_scalars(op)).to(device)
    params = {**cases.some_scalars(op), **{n: torch.tensor([0.3], device=device) for n in cases.operands(op)}}
    infinite = torch.full_like(x, float("inf"))
    with fwad.dual_level():
        tangent = fwad.unpack_dual(call(op, fwad.make_dual(x, infinite), params)).tangent.cpu()
    slope, computed = oracle.slopes(op, x, params)
    eager = oracle.oracle_gradients(op, x, params, infinite)[0]  # f' * inf where f' is computed, 0 where it is not
    masked = (slope == 0) & (computed == 0) & (eager == 0)
    oracle.report(~masked | (tangent == 0), tangent=tangent, x=x.cpu())


def test_jvp_with_zero_tensor_tangent(op):
    """Autograd hands over tangents that are zero without storage."""
    x = cases.filled((4, 6), torch.float32)
    params = cases.make_params(op, x.shape, torch.float32)
    zero = torch._efficientzerotensor(x.shape)
    _, tangent = torch.func.jvp(lambda t: call(op, t * 1.0, params), (x,), (zero,))
    assert (tangent == 0).all()


def test_direction_that_is_the_operand_itself(operand_op, device):
    """A tangent may be the very tensor that it is the tangent of."""
    x = cases.filled((3, 5, 4), torch.float64).to(device)
    params = cases.make_params(operand_op, x.shape, torch.float64, device)
    names = cases.operands(operand_op)
    same = {f"{name}_tangent": params[name] for name in names}
    copies = {f"{name}_tangent": params[name].clone() for name in names}
    jvp = cases.derived(operand_op, "jvp")
    assert_same(jvp(x, **params, x_tangent=x, **same), jvp(x, **params, x_tangent=x.clone(), **copies))
