"""Tensors (CONTRACT, section 3): any strides for every argument, the strides of results, sizes, meta kernels."""

import os

import cases
import oracle
import pytest
import torch
from cases import LAYOUTS, SHAPES, call, derived, tracked
from oracle import assert_same
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_act
from fused_act import _C


def as_tuple(result):
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def contiguous(params):
    return cases.with_operands(params, lambda t: t.contiguous())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_x(op, dtype, device, layout):
    """Values as for the contiguous tensor; the output and the gradient have the strides of empty_like(x)."""
    for k, shape in enumerate(SHAPES if dtype == torch.float32 else SHAPES[::3]):
        x = LAYOUTS[layout](cases.filled(shape, dtype, op, seed=k).to(device))
        params = cases.make_params(op, shape, dtype, device)
        go = cases.filled(shape, dtype, seed=k + 1).to(device)
        y = call(op, x, params)
        expected = torch.empty_like(x)
        assert y.stride() == expected.stride(), (shape, y.stride(), expected.stride())
        assert_same(y, call(op, x.contiguous(), params))
        leaf, own, leaves = tracked(x, params)
        grads = torch.autograd.grad(call(op, leaf, own), leaves, go)
        dense, own, leaves = tracked(x.contiguous(), params)
        wanted = torch.autograd.grad(call(op, dense, own), leaves, go)
        assert grads[0].stride() == expected.stride(), (shape, grads[0].stride(), expected.stride())
        assert_same(grads[0], wanted[0])
        # an operand's gradient is a sum, whose order may follow the layout
        for a, b in zip(grads[1:], wanted[1:]):
            assert a.stride() == torch.empty_like(b).stride()
            size = 4 * go.double().abs().sum().item()
            eps = torch.finfo(oracle.COMPUTE[dtype]).eps
            torch.testing.assert_close(a, b, atol=4 * size * eps, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_incoming_gradient(op, device, layout):
    """Against every layout of x: the two need not agree."""
    for shape in ((3, 5, 4, 7), (2, 8, 4, 8), (2, 3, 4, 2, 5), (9, 16), (23,), (1, 6, 1, 1), (), (0, 3, 4)):
        go = LAYOUTS[layout](cases.filled(shape, torch.float32, seed=1).to(device))
        params = cases.make_params(op, shape, torch.float32, device)
        for x_layout in LAYOUTS:
            x = LAYOUTS[x_layout](cases.filled(shape, torch.float32, op).to(device))
            grads = cases.backward(op, go, x, params)
            wanted = cases.backward(op, go.contiguous(), x, params)
            assert grads[0].stride() == torch.empty_like(x).stride(), (shape, x_layout)
            assert_same(grads[0], wanted[0])
            for a, b in zip(grads[1:], wanted[1:]):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_an_operand(operand_op, dtype, device, layout):
    for shape in ((3, 5, 4, 7), (2, 8, 4, 8), (9, 16)):
        for form in ("channel", "full", "inner_dims", "row_and_channel"):
            params = cases.make_params(operand_op, shape, dtype, device, form)
            strided = cases.with_operands(params, LAYOUTS[layout])
            for x_layout in ("contiguous", "channels_last", "step_all", "transposed", "expanded_batch"):
                x = LAYOUTS[x_layout](cases.filled(shape, dtype, operand_op).to(device))
                y = call(operand_op, x, strided)
                assert y.stride() == torch.empty_like(x).stride()
                assert_same(y, call(operand_op, x, contiguous(strided)))


@pytest.mark.parametrize("form", cases.OPERAND_FORMS)
def test_every_form_of_an_operand(operand_op, dtype, device, form):
    for shape in ((3, 5, 4, 7), (2, 8, 4, 8), (9, 16), (4, 6, 5), (2, 3, 4, 2, 5), (2, 3, 2, 2, 3, 2)):
        if cases.OPERAND_FORMS[form](shape) is None:
            continue
        params = cases.make_params(operand_op, shape, dtype, device, form)
        for x_layout in ("contiguous", "channels_last", "step_all"):
            x = LAYOUTS[x_layout](cases.filled(shape, dtype, operand_op).to(device))
            y = call(operand_op, x, params)
            assert y.stride() == torch.empty_like(x).stride()
            oracle.assert_value(operand_op, y, x, params)


def test_operand_as_a_scalar_tensor_for_any_shape(operand_op, dtype, device):
    """Zero-dimensional and one-element operands go with every x, a zero-dimensional one included."""
    for shape in SHAPES:
        for form in ("zero_dim", "one_element"):
            if form == "one_element" and shape == ():
                continue  # would enlarge x from () to (1,)
            x = cases.filled(shape, dtype, operand_op).to(device)
            params = dict(cases.some_scalars(operand_op))
            for name in cases.operands(operand_op):
                params[name] = torch.full(cases.OPERAND_FORMS[form](shape), 0.3, dtype=dtype, device=device)
            if len(shape) == 1 and form == "one_element":
                params["dim"] = 0
            y = call(operand_op, x, params)
            assert y.shape == x.shape
            oracle.assert_value(operand_op, y, x, params)


def test_bias_of_a_matrix_lies_along_the_last_dim(operand_op):
    x = cases.filled((4, 4), torch.float32, operand_op)  # square: only the right axis gives the right values
    params = cases.make_params(operand_op, x.shape, torch.float32)
    rows = {**params, **{n: params[n].expand(4, 4) for n in cases.operands(operand_op)}}
    assert_same(call(operand_op, x, params), call(operand_op, x, rows))
    assert_same(call(operand_op, x, params), call(operand_op, x, {**params, "dim": -1}))


def test_negative_bit_views(op, dtype):
    """The imaginary part of a conjugate is a real tensor whose sign is flipped lazily."""
    if dtype == torch.bfloat16:
        pytest.skip("PyTorch has no complex type of bfloat16 parts")
    values = cases.filled((4, 6), dtype, op)
    x = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert x.is_neg()
    params = cases.make_params(op, x.shape, dtype)
    assert_same(call(op, x, params), call(op, values, params))


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def test_zero_elements(op, dtype, device):
    """The right shape, and a zero gradient for the operand."""
    for shape in ((0, 3, 4), (3, 5, 0), (0,), (0, 3), (2, 3, 0, 4)):
        x = torch.empty(shape, dtype=dtype, device=device)
        params = cases.make_params(op, shape, dtype, device)
        leaf, own, leaves = tracked(x, params)
        y = call(op, leaf, own)
        assert y.shape == shape and y.dtype == dtype
        grad_x, *grads = torch.autograd.grad(y, leaves, torch.empty_like(y))
        assert grad_x.shape == shape
        for grad, operand in zip(grads, leaves[1:]):
            assert grad.shape == operand.shape and grad.dtype == operand.dtype and (grad == 0).all()


def test_operand_with_zero_elements(operand_op, device):
    """Zero channels are a size like any other."""
    x = torch.empty((3, 0, 4), device=device)
    params = cases.make_params(operand_op, x.shape, torch.float32, device)
    leaf, own, leaves = tracked(x, params)
    for grad, tensor in zip(torch.autograd.grad(call(operand_op, leaf, own), leaves, torch.empty_like(x)), leaves):
        assert grad.shape == tensor.shape


def free_memory(device):
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_more_than_2_31_elements(op, device):
    """An expanded x on the CPU, so that only the output needs memory; the far end must be right."""
    n, channels = 2**31 + 5 * 48, 48
    rows = n // channels
    bytes_needed = 2 * n * (5 if device.type == "cuda" else 1)
    simplest = [next((o for o in fused_act.ops() if bool(cases.operands(o)) == k), None) for k in (False, True)]
    if device.type == "cpu" and op not in simplest:
        pytest.skip("on the CPU one operator with an operand and one without are enough: 8 s each")
    if free_memory(device) < bytes_needed * 1.1:
        pytest.skip(f"needs {bytes_needed / 2**30:.0f} GiB of free memory")
    row = cases.filled((1, channels), torch.float16, op).to(device)
    params = cases.make_params(op, row.shape, torch.float16, device)
    expected = call(op, row, params)
    y = call(op, row.expand(rows, channels), params)
    assert y.numel() > 2**31
    for k in (0, 1, 2**31 // channels - 1, 2**31 // channels, rows - 1):
        assert_same(y[k : k + 1], expected)
    if device.type == "cpu":
        return
    del y
    x = row.repeat(rows, 1)
    assert_same(call(op, x, params)[-3:], expected.expand(3, channels))
    leaf, own, leaves = tracked(x, params)
    small_leaf, small_own, small_leaves = tracked(row, params)
    go = torch.full_like(row, 2.0**-20)
    grad_x, *grads = torch.autograd.grad(call(op, leaf, own), leaves, go.expand(rows, channels))
    small_x, *small = torch.autograd.grad(call(op, small_leaf, small_own), small_leaves, go)
    assert_same(grad_x[-3:], small_x.expand(3, channels))
    assert len(grads) == len(small)
    # One row's gradient for go = 1, which float16 holds to 5e-4; that for go = 2**-20 would be subnormal.
    _, *per_row = torch.autograd.grad(call(op, small_leaf, small_own), small_leaves, torch.ones_like(go))
    for grad, one in zip(grads, per_row, strict=True):
        torch.testing.assert_close(grad.double(), one.double() * (rows * 2.0**-20), rtol=2e-3, atol=1e-6)


def test_strides_beyond_2_31(op, device):
    """Few elements, far apart: offsets in elements and in bytes exceed 32 bits."""
    step = 2**31 + 64
    if free_memory(device) < (2 * step + 200) * 2 * 1.1:
        pytest.skip("needs 9 GiB of free memory")
    far = torch.empty(2 * step + 128, dtype=torch.float16, device=device)  # pages that nobody touches cost nothing
    x = torch.as_strided(far, (3, 100), (step, 1))
    x.copy_(cases.filled((3, 100), torch.float16, op))
    params = cases.make_params(op, x.shape, torch.float16, device)
    assert_same(call(op, x, params), call(op, x.contiguous(), params))
    x = torch.as_strided(far, (100, 3), (1, step))
    params = cases.make_params(op, x.shape, torch.float16, device)
    assert_same(call(op, x, params), call(op, x.contiguous(), params))


# ---------------------------------------------------------------------------------------------------------------------
# Aliasing


def test_never_returns_its_input_or_a_view(op, dtype, device):
    for shape in ((4, 6), (1, 1), (4, 6, 5)):
        x = torch.full(shape, 0.25, dtype=dtype, device=device)
        params = cases.make_params(op, shape, dtype, device)
        params = cases.with_operands(params, torch.zeros_like)
        results = [call(op, x, params)]
        go = torch.ones_like(x)
        results += cases.backward(op, go, x, params)
        storages = {t.untyped_storage().data_ptr() for t in (x, go, *params.values()) if isinstance(t, torch.Tensor)}
        for y in results:
            assert y._base is None and y.untyped_storage().data_ptr() not in storages
        assert len({y.untyped_storage().data_ptr() for y in results}) == len(results)


def test_inputs_are_left_alone(op, dtype, device):
    x = cases.filled((33, 7, 5), dtype, op).to(device)
    params = cases.make_params(op, x.shape, dtype, device)
    go = cases.filled(x.shape, dtype, seed=3).to(device)
    tensors = [x, go, *(v for v in params.values() if isinstance(v, torch.Tensor))]
    before = [t.clone() for t in tensors]
    call(op, x, params)
    cases.backward(op, go, x, params)
    for t, b in zip(tensors, before):
        assert_same(t, b)


# ---------------------------------------------------------------------------------------------------------------------
# Meta and fake kernels


def on_meta(t):
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def all_calls(op, dim):
    """Every dispatcher operator of `op`, as pairs of a name and a function of x, go and the parameters."""
    names = cases.operands(op)
    extra = {"dim": dim} if names else {}

    def jvp(x, go, p):
        tangents = {f"{n}_tangent": torch.zeros_like(p[n]) for n in names}
        return derived(op, "jvp")(x, **{**p, **extra}, x_tangent=go, **tangents)

    def double_backward(x, go, p):
        cotangents = {f"grad_grad_{n}": torch.zeros_like(p[n]) for n in names}
        mask = [True] * (2 + len(names))
        return derived(op, "double_backward")(go, x, **{**p, **extra}, grad_grad_x=go, **cotangents, output_mask=mask)

    yield op.name, lambda x, go, p: call(op, x, p)
    yield "backward", lambda x, go, p: cases.backward(op, go, x, p)
    yield "jvp", jvp
    yield "double_backward", double_backward


def metadata(result):
    return [None if t is None else (t.shape, t.stride(), t.dtype) for t in as_tuple(result)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_kernels_give_the_real_strides(op, device, layout):
    for shape in SHAPES:
        for operand_dtype in (torch.float32, torch.bfloat16):
            x = LAYOUTS[layout](cases.filled(shape, torch.float32).to(device))
            go = cases.filled(shape, torch.float32, seed=1).to(device)
            params = cases.make_params(op, shape, operand_dtype, device)
            meta = cases.with_operands(params, on_meta)
            for name, function in all_calls(op, params.get("dim", 1)):
                real, fake = function(x, go, params), function(on_meta(x), on_meta(go), meta)
                assert all(t is None or t.is_meta for t in as_tuple(fake)), name
                assert metadata(real) == metadata(fake), (name, shape)


@pytest.mark.parametrize("name", ["silu_and_mul", "swiglu_oai"])
@pytest.mark.parametrize(
    "sizes, strides",
    [((17, 2), (1, 17)), ((4, 3, 5, 2), (1, 20, 4, 60)), ((2, 1, 2), (1, 2, 2)), ((1, 1, 1, 2), (5, 5, 5, 2)),
     ((2, 4, 3, 6), (144, 6, 48, 2))],
)  # fmt: skip
def test_meta_strides_of_halves_of_one_element(name, sizes, strides, device):
    x = torch.randn(300, device=device).as_strided(sizes, strides)
    operator = getattr(torch.ops.fused_act, name)
    real = operator(x)
    assert metadata(operator(on_meta(x))) == metadata(real)
    with FakeTensorMode() as mode:
        assert metadata(operator(mode.from_tensor(x))) == metadata(real)


@pytest.mark.parametrize(
    "layout", ["contiguous", "channels_last", "transposed", "step_all", "expanded_channel", "windows"]
)
def test_fake_tensors_have_the_real_strides(op, device, layout):
    """FakeTensor also gets the device right, and takes symbolic sizes in test_compile."""
    shape = (3, 5, 4, 7)
    x = LAYOUTS[layout](cases.filled(shape, torch.float32).to(device))
    go = cases.filled(shape, torch.float32, seed=1).to(device)
    params = cases.make_params(op, shape, torch.float32, device)
    for name, function in all_calls(op, params.get("dim", 1)):
        real = function(x, go, params)
        with FakeTensorMode() as mode:
            fake = function(*map(mode.from_tensor, (x, go)), cases.with_operands(params, mode.from_tensor))
        assert metadata(real) == metadata(fake), name
        assert all(t.device.type == device.type for t in as_tuple(fake))


def test_meta_gradients(op):
    """Autograd runs on meta tensors, as when sizes of a model are worked out without memory."""
    x = torch.empty((3, 5, 4), device="meta", requires_grad=True)
    params = cases.with_operands(cases.make_params(op, x.shape, torch.float32), on_meta)
    _, own, leaves = tracked(x, params)
    for grad, leaf in zip(torch.autograd.grad(call(op, leaves[0], own).sum(), leaves), leaves):
        assert grad.is_meta and grad.shape == leaf.shape


def test_more_dimensions_than_the_kernels_walk(op, device):
    """20 dimensions of 2, the incoming gradient in an order of its own: it is copied first."""
    shape = [2] * 20
    x = cases.filled(shape, torch.float32, op).to(device).requires_grad_()
    params = {**cases.some_scalars(op), **{n: torch.ones(1, device=device) for n in cases.operands(op)}}
    order = [*range(0, 20, 2), *range(1, 20, 2)]
    go = cases.filled(shape, torch.float32, seed=3).to(device).permute(order)
    y = call(op, x, params)
    (grad,) = torch.autograd.grad(y, x, go, retain_graph=True)
    assert_same(grad, torch.autograd.grad(y, x, go.contiguous())[0])


def test_meta_strides_of_operand_gradients(operand_op):
    x = torch.ones(2, 1)
    for operand in (torch.randn(3)[::3], torch.randn(30).as_strided((1, 1), (9, 7)), torch.randn(2, 3)[:, ::3]):
        params = {**cases.some_scalars(operand_op), **{n: operand for n in cases.operands(operand_op)}}
        real = cases.backward(operand_op, x, x, params)
        meta = cases.backward(
            operand_op,
            x.to("meta"),
            x.to("meta"),
            cases.with_operands(params, lambda t: t.to("meta").as_strided(t.shape, t.stride())),
        )
        assert [t.stride() for t in meta] == [t.stride() for t in real]


@pytest.mark.parametrize("go_layout", ["contiguous", "channels_last", "expanded_all"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "step_channel"])
@pytest.mark.parametrize("name", ["bias_act", "chain"])
def test_gradient_has_the_strides_of_an_x_that_is_not_read(name, layout, go_layout, device):
    """An addition or a negation saves nothing of x but how it lies."""
    x = cases.LAYOUTS[layout](torch.randn(2, 3, 4, 5, device=device)).requires_grad_()
    go = cases.LAYOUTS[go_layout](torch.randn(2, 3, 4, 5, device=device))
    neg = [step for step, _ in _C._steps].index("Neg")
    ops = torch.ops.fused_act
    y = ops.chain(x, [], [1, neg, -1], []) if name == "chain" else ops.bias_act(x, torch.ones(3, device=device))
    (gx,) = torch.autograd.grad(y, x, go)
    assert gx.stride() == torch.empty_like(x).stride()
    assert_same(gx, -go if name == "chain" else go)
