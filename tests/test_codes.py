"""Piecewise linear chains save which derivative an element has, in a bit or two, and neither x nor operands (codes.h).

The gradients must be those that the operator's own backward gives from x, to the last bit. Small tensors have no codes,
so these are larger than those of other tests.
"""

import itertools
import random
import re
import time

import cases
import pytest
import torch
import torch.nn.functional as F
from test_chain import STEPS

import fused_act
from fused_act._program import encode

chain = torch.ops.fused_act.chain
NARROW = (torch.float16, torch.bfloat16, torch.float32)
SHAPE = (4, 8, 30, 21)  # 20160 elements: more than 16384, and no whole number of words of codes

# Name, and what is special: scalars and other parameters, shapes of the operands, bits an element.
CODED = {
    "relu": ({}, {}, 1),
    "relu6": ({}, {}, 1),
    "leaky_relu": ({"negative_slope": 0.1}, {}, 1),
    "hardtanh": ({"min_val": -0.5, "max_val": 2.0}, {}, 1),
    "clamp": ({"min": -0.5, "max": 0.75}, {}, 1),
    "hardsigmoid": ({}, {}, 1),
    "threshold": ({"threshold": 0.5, "value": -1.0}, {}, 1),
    "softshrink": ({"lambd": 0.5}, {}, 1),
    "relu_bias": ({}, {"bias": (8,)}, 1),
    "div_leaky_relu": ({"divisor": 3.0, "negative_slope": 0.1}, {}, 1),
    "min_bias_scale": ({"value": 0.5, "scale": 2.0}, {"bias": (8,)}, 2),
    "bias_act": ({"act": "leaky_relu", "alpha": 0.2}, {"bias": (8,)}, 1),
    "bias_act, relu": ({"act": "relu"}, {"bias": (8,)}, 1),
    "bias_act, clamped": ({"act": "leaky_relu", "alpha": 0.2, "clamp": 0.75}, {"bias": (8,)}, 2),
    "act_add": ({"act": "relu", "alpha": None}, {"residual": SHAPE}, 1),
    "add_act": ({"act": "hardsigmoid", "alpha": None}, {"residual": SHAPE}, 1),
}


def example(shape, dtype, device, seed=0):
    """Random values, and each kink, NaN and the infinities many times."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * 2
    special = torch.tensor([0.0, -0.0, 0.5, -0.5, 0.75, 1.0, 2.0, 3.0, -3.0, 6.0, torch.nan, torch.inf, -torch.inf])
    choice = torch.randint(0, 3 * len(special), x.shape, generator=g)
    x = torch.where(choice < len(special), special[choice.clamp(max=len(special) - 1)], x)
    return x.to(dtype).to(device)


def layouts(x):
    """The same elements in other places."""
    yield "contiguous", x
    if x.dim() == 4:
        yield "channels_last", x.contiguous(memory_format=torch.channels_last)
        yield "transposed", x.transpose(1, 3).contiguous().transpose(1, 3)
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    yield "step", wide[..., ::2]
    flat = x.new_zeros(x.numel() + 1)
    flat[1:] = x.reshape(-1)
    yield "unaligned", flat[1:].view(x.shape)


def saved_by(function):
    """What autograd keeps of it."""
    kept = []

    def keep(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = function()
    return result, kept


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def equal(a, b):
    """To the last bit, but for the sign of zero."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )


def operator(name, suffix=""):
    return getattr(torch.ops.fused_act, name.split(",")[0] + suffix)


def make(name, dtype, device, shape=SHAPE):
    parameters, shapes, bits = CODED[name]
    x = example(shape, dtype, device)
    operands = {n: example(s, dtype, device, 1 + k) for k, (n, s) in enumerate(shapes.items())}
    return x, parameters, operands, bits


def from_x(name, go, x, parameters, operands):
    """The gradients of the operator's backward, which reads x."""
    out = operator(name, "_backward")(go, x.detach(), **parameters, **{n: t.detach() for n, t in operands.items()})
    return out[: 1 + len(operands)] if operands else (out,)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", CODED)
def test_the_same_gradients(name, dtype, device):
    x, parameters, operands, bits = make(name, dtype, device)
    inputs = [t.requires_grad_() for t in (x, *operands.values())]
    function = operator(name)
    y, kept = saved_by(lambda: function(x, **parameters, **operands))
    assert [t.dtype for t in kept] == [torch.int32]
    assert bytes_of(kept) * 8 <= (x.numel() + 32 * 8) * bits
    with torch.no_grad():
        assert equal(y, function(x, **parameters, **operands))
    go = example(SHAPE, dtype, device, 9)
    expected = from_x(name, go, x, parameters, operands)
    for a, b in zip(torch.autograd.grad(y, inputs, go), expected, strict=True):
        assert equal(a, b)


@cases.needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("asked", ["all", "x"])
@pytest.mark.parametrize(
    "name, known",
    [("relu", 1), ("leaky_relu", 0), ("relu_bias", 2), ("bias_act, relu", 1), ("bias_act", 0), ("min_bias_scale", 2),
     ("bias_act, clamped", 1)],
)  # fmt: skip
def test_cuda_kernels_are_told_the_derivatives(name, known, asked, memory_format, dtype):
    """Where those by x are 0 for one code, and those by the bias the same (1) or a number (2)."""
    x, parameters, operands, bits = make(name, dtype, "cuda")
    x = x.contiguous(memory_format=memory_format).requires_grad_()
    inputs = [x, *(t.requires_grad_() for t in operands.values() if asked == "all")]
    y = operator(name)(x, **parameters, **operands)
    with torch.profiler.profile() as profile:
        torch.autograd.grad(y, inputs, torch.ones_like(y))
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if "Decoder" in e.name]
    known = min(known, 1) if asked == "x" else known
    two = ("(false|0)", "(true|1)")[bits - 1]
    assert len(kernels) == 1, kernels
    assert re.search(rf"Decoder<1, {two}, \(fused_act::Derivatives\){known}>", kernels[0]), kernels


@pytest.mark.parametrize("name", ["relu_bias", "min_bias_scale", "bias_act", "bias_act, clamped", "act_add"])
def test_layouts(name, device):
    x, parameters, operands, _ = make(name, torch.bfloat16, device)
    go = example(SHAPE, x.dtype, device, 9)
    function = operator(name)
    for (of_x, lx), (of_go, lgo) in itertools.product(layouts(x), layouts(go)):
        lx = lx.detach().requires_grad_()
        given = {n: t.detach().requires_grad_() for n, t in operands.items()}
        y = function(lx, **parameters, **given)
        got = torch.autograd.grad(y, [lx, *given.values()], lgo)
        for a, b in zip(got, from_x(name, lgo, lx, parameters, given), strict=True):
            if a.shape == x.shape:
                assert equal(a, b), (of_x, of_go)
            else:  # summed in the order of another layout
                torch.testing.assert_close(a, b, equal_nan=True, msg=f"{of_x}, {of_go}")


BROADCASTS = [
    (), (1,), (1, 1, 1), (8, 1, 1), (4, 1, 1, 1), (4, 8, 1, 1), (30, 1), (21,), (4, 1, 30, 1), (1, 8, 1, 21),
    (4, 8, 30, 21),
]  # fmt: skip


@pytest.mark.parametrize("shape", BROADCASTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_for_operands(shape, dtype, device):
    # Multiples of 1/4, whose sums are exact.
    g = torch.Generator().manual_seed(3)
    x, operand, go = (
        torch.randint(-8, 9, s, generator=g).div(4).to(device, t)
        for s, t in ((SHAPE, dtype), (shape, torch.float32), (SHAPE, dtype))
    )
    second = torch.randint(-8, 9, (8, 1, 1), generator=g).div(4).to(device, torch.float16)
    tensors = [t.requires_grad_() for t in (x, operand, second)]
    program, scalars = encode([
        ("Add", ("operand", 0), ()), ("LeakyRelu", None, (0.25,)), ("Add", ("operand", 1), ()), ("Relu", None, ()),
    ])  # fmt: skip
    y, kept = saved_by(lambda: chain(x, [operand, second], program, scalars))
    assert [t.dtype for t in kept] == [torch.int32]
    wide = [t.detach().cpu().double().requires_grad_() for t in tensors]
    aligned = wide[1]
    expected = torch.relu(F.leaky_relu(wide[0] + aligned, 0.25) + wide[2])
    got = torch.autograd.grad(y, tensors, go)
    for a, b, t in zip(got, torch.autograd.grad(expected, wide, go.cpu().double()), tensors, strict=True):
        assert a.shape == t.shape and a.dtype == t.dtype
        torch.testing.assert_close(a.cpu().double(), b, rtol=torch.finfo(t.dtype).eps, atol=0)


ROWS = [
    (2048, 1, 9), (1, 2, 9000), (3, 1, 6001), (2, 3, 4097), (7, 5, 513), (64, 3, 100), (33, 64, 9), (129, 128, 1),
    (1025, 17, 1), (9000, 2, 1), (5, 3, 16384), (2, 2, 40001), (300, 7, 8),
    (300, 7, 31), (17, 1000, 2), (1, 1, 100003), (4, 16500, 1), (8193, 2, 1), (2049, 2, 1), (1025, 2, 1), (1361, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", ["relu_bias", "min_bias_scale"])
def test_sums_of_any_length(name, dtype, rows, device):
    """Of channels whose parts begin and end within vectors, in one block or many: every element once."""
    outer, channels, inner = rows
    g = torch.Generator().manual_seed(5)
    shape = (outer, channels, inner) if inner > 1 else (outer, channels)
    x, go = (torch.randint(-4, 5, shape, generator=g).to(device, dtype).requires_grad_(k == 0) for k in range(2))
    bias = torch.zeros(channels, dtype=torch.float32, device=device, requires_grad=True)
    numbers = {"value": 1.0, "scale": 2.0} if name == "min_bias_scale" else {}
    y, kept = saved_by(lambda: getattr(torch.ops.fused_act, name)(x, bias=bias, **numbers))
    assert (kept[0].dtype == torch.int32) == (x.numel() >= fused_act._C._coded_from)
    wide = x.detach().cpu().double().requires_grad_()
    own = torch.zeros(channels, dtype=torch.float64, requires_grad=True)
    shaped = own.view(-1, *[1] * (len(shape) - 2))
    value = torch.tensor(1.0, dtype=torch.float64)
    expected = (torch.minimum(wide, value) + shaped) * 2 if numbers else torch.relu(wide) + shaped
    got = torch.autograd.grad(y, [x, bias], go)
    for a, b in zip(got, torch.autograd.grad(expected, [wide, own], go.cpu().double()), strict=True):
        assert torch.equal(a.cpu().double(), b)


def test_only_what_is_asked(device):
    x, _, operands, _ = make("relu_bias", torch.float32, device)
    bias, go = operands["bias"], example(SHAPE, x.dtype, device, 9)
    _, kept = saved_by(lambda: torch.ops.fused_act.relu_bias(x, bias.requires_grad_()))
    assert not kept  # the gradient of a bias that is added last reads nothing
    y, kept = saved_by(lambda: torch.ops.fused_act.bias_act(x, bias, act="relu"))
    assert [t.dtype for t in kept] == [torch.int32]
    (got,) = torch.autograd.grad(y, bias, go)
    expected = torch.ops.fused_act.bias_act_backward(go, x, bias.detach(), act="relu")[1]
    assert equal(got, expected)


NOT_CODED = {
    "a derivative of many values": (lambda x, b: torch.ops.fused_act.silu(x), torch.float32),
    "a linear piece": (lambda x, b: torch.ops.fused_act.relu_hardswish(x), torch.float32),
    "the operand's gradient needs x": (
        lambda x, b: chain(x, [b], *encode([("Relu", None, ()), ("MulOperand", ("operand", 0), ())])), torch.float32),
    "NaN as the slope": (lambda x, b: torch.ops.fused_act.leaky_relu(x, torch.nan), torch.float32),
    "float64": (lambda x, b: torch.ops.fused_act.relu(x), torch.float64),
    "a small tensor": (lambda x, b: torch.ops.fused_act.relu(x[:1]), torch.float32),
    "five derivatives": (
        lambda x, b: chain(x, [], *encode([("LeakyRelu", None, (0.5,)), ("LeakyRelu", None, (0.3,)),
                                           ("Shift", None, (1.0,)), ("LeakyRelu", None, (0.7,)),
                                           ("Shift", None, (1.0,)), ("LeakyRelu", None, (0.9,))])), torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("why", NOT_CODED)
def test_what_has_no_codes(why, device):
    function, dtype = NOT_CODED[why]
    x, bias = example(SHAPE, dtype, device).requires_grad_(), example((21,), dtype, device).requires_grad_()
    y, kept = saved_by(lambda: function(x, bias))
    assert any(t.dtype == dtype for t in kept)
    y.backward(torch.ones_like(y))


def test_a_branch_not_taken_gives_zero(device):
    x = torch.tensor([-1.0, 2.0], device=device).repeat(20000).requires_grad_()
    y = torch.ops.fused_act.relu(x)
    (got,) = torch.autograd.grad(y, x, torch.full_like(x, torch.inf))
    assert equal(got, torch.tensor([0.0, torch.inf], device=device).repeat(20000))


def test_twice_with_retain_graph(device):
    x = example(SHAPE, torch.float32, device).requires_grad_()
    y = torch.ops.fused_act.hardsigmoid(x)
    y.sum().backward(retain_graph=True)
    once = x.grad.clone()
    y.sum().backward()
    assert equal(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_x_may_be_overwritten(device):
    x = example(SHAPE, torch.float32, device).requires_grad_()
    z = x * 1
    y = torch.ops.fused_act.relu(z)
    z.zero_()
    (got,) = torch.autograd.grad(y, x, torch.ones_like(x))
    assert equal(got, from_x("relu", torch.ones_like(x), x, {}, {})[0])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", ["leaky_relu", "relu_bias", "min_bias_scale", "bias_act", "act_add"])
def test_second_order(name, dtype, device):
    """The gradient of the gradient, as from what is saved without codes: torch.func has none."""
    x, parameters, operands, _ = make(name, dtype, device)
    tensors = (x.nan_to_num(), *[t.nan_to_num() for t in operands.values()])
    go = example(SHAPE, dtype, device, 9).nan_to_num(0.5, 1.0, -1.0)
    directions = [example(t.shape, dtype, device, 20 + k).nan_to_num(0.5, 1.0, -1.0) for k, t in enumerate(tensors)]
    function = getattr(torch.ops.fused_act, name)

    def first(go, *tensors):
        y = function(tensors[0], **parameters, **dict(zip(operands, tensors[1:])))
        return torch.autograd.grad(y, tensors, go, create_graph=True)

    inputs = [t.detach().requires_grad_() for t in (go, *tensors)]
    gradients = first(*inputs)
    second = torch.autograd.grad(gradients, inputs, directions)
    table = next(op for op in fused_act.ops() if op.name == name)
    given = {p.name: None for p in table.parameters} | parameters | dict(zip(operands, tensors[1:]))
    expected = getattr(torch.ops.fused_act, f"{name}_double_backward")(
        go, tensors[0], **given, **({"dim": 1} if table.operands else {}), grad_grad_x=directions[0],
        **{f"grad_grad_{n}": None for n in table.operands}
        | {f"grad_grad_{n}": v for n, v in zip(operands, directions[1:])},
        output_mask=[True] * (2 + len(table.operands)),
    )  # fmt: skip
    eps = torch.finfo(torch.float32).eps
    assert second[0].dtype == dtype
    torch.testing.assert_close(second[0], expected[0], rtol=torch.finfo(dtype).eps, atol=8 * eps)
    for got, zero in zip(second[1:], expected[1:]):
        assert got.shape == zero.shape and not got.any() and not zero.any()


def test_forward_over_reverse(device):
    x = example(SHAPE, torch.float32, device).requires_grad_()
    y = torch.ops.fused_act.leaky_relu(x, 0.1)
    with torch.autograd.forward_ad.dual_level():
        go, tangent = torch.ones_like(x), example(SHAPE, x.dtype, device, 4)
        dual = torch.autograd.forward_ad.make_dual(go, tangent)
        (g,) = torch.autograd.grad(y, x, dual)
        value = torch.autograd.forward_ad.unpack_dual(g)
    assert equal(value.primal, from_x("leaky_relu", go, x, {"negative_slope": 0.1}, {})[0])
    assert equal(value.tangent, from_x("leaky_relu", tangent, x, {"negative_slope": 0.1}, {})[0])


@pytest.mark.parametrize("listed", [False, True])
def test_a_batch_of_gradients(listed, device):
    x, bias = example(SHAPE, torch.float32, device), example((21,), torch.float32, device)
    x, bias = x.requires_grad_(), bias.requires_grad_()
    if listed:
        y = chain(x, [bias], *encode([("Add", ("operand", 0), ()), ("Relu", None, ())]))
    else:
        y = torch.ops.fused_act.bias_act(x, bias, act="relu", dim=-1)
    go = torch.stack([example(SHAPE, x.dtype, device, k).nan_to_num() for k in range(3)])
    batch = torch.autograd.grad(y, [x, bias], go, is_grads_batched=True, retain_graph=True)
    for k in range(3):
        for got, expected in zip(batch, torch.autograd.grad(y, [x, bias], go[k], retain_graph=True), strict=True):
            assert equal(got[k], expected)


@pytest.mark.parametrize("name", ["relu", "bias_act", "act_add"])
def test_a_batch_of_gradients_with_a_graph(name, device):
    x, parameters, operands, _ = make(name, torch.float32, device)
    tensors = [t.nan_to_num().requires_grad_() for t in (x, *operands.values())]
    y = getattr(torch.ops.fused_act, name)(tensors[0], **parameters, **dict(zip(operands, tensors[1:])))
    go = torch.stack([example(SHAPE, x.dtype, device, k).nan_to_num() for k in range(2)])
    options = dict(retain_graph=True, create_graph=True)
    batch = torch.autograd.grad(y, tensors, go, is_grads_batched=True, **options)
    for k in range(2):
        for got, expected in zip(batch, torch.autograd.grad(y, tensors, go[k], **options), strict=True):
            assert equal(got[k], expected)


def test_chains_that_differ_in_a_scalar_are_remembered(device):
    """What is found out of a chain is kept by its steps and scalars; round numbers must not share a place."""
    x = example(SHAPE, torch.float32, device).requires_grad_()
    operands = [example(SHAPE, torch.float32, device, k) for k in (1, 2)]
    steps = [("Minimum", ("operand", 0), ()), ("Maximum", ("operand", 1), ())]
    programs = [encode([*steps, ("Clamp", None, (-1.0, bound))]) for bound in (1.0, 6.0)]

    def calls(pair):
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            for program in pair:
                chain(x, operands, *program)
            times.append(time.perf_counter() - begin)
        return min(times)

    assert calls(programs) < 5 * calls(programs[:1] * 2) + 1e-3


def test_checkpoint_and_offload(device):
    x = example(SHAPE, torch.float32, device).requires_grad_()
    go = example(SHAPE, torch.float32, device, 9)
    (expected,) = from_x("relu", go, x, {}, {})
    y = torch.utils.checkpoint.checkpoint(torch.ops.fused_act.relu, x, use_reentrant=False)
    assert equal(torch.autograd.grad(y, x, go)[0], expected)
    with torch.autograd.graph.save_on_cpu():
        y = torch.ops.fused_act.relu(x)
    assert equal(torch.autograd.grad(y, x, go)[0], expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_save_codes(dynamic, device, fresh_dynamo):
    saved = []

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph, inputs):
        saved.append([n.target for n in graph.graph.nodes if n.op == "call_function"])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    bias = example((8,), torch.float32, device).requires_grad_()
    compiled = torch.compile(torch.ops.fused_act.bias_act, fullgraph=True, dynamic=dynamic, backend=backend)
    for n in (4, 5):
        x = example((n, *SHAPE[1:]), torch.float32, device).requires_grad_()
        go = torch.ones_like(x)
        got = torch.autograd.grad(compiled(x, bias, act="relu"), [x, bias], go)
        for a, b in zip(got, from_x("bias_act", go, x, {"act": "relu"}, {"bias": bias}), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
    forward, backward = saved[:2]
    assert torch.ops.fused_act._bias_act_coded.default in forward
    assert torch.ops.fused_act._bias_act_coded_backward.default in backward


@pytest.mark.parametrize("dim", [1, -1])
def test_opcheck(dim, device):
    x = example(SHAPE, torch.float32, device).nan_to_num(0.5, 1.0, -1.0)
    bias = example((SHAPE[dim],), torch.float32, device, 1).nan_to_num(0.5, 1.0, -1.0)
    torch.library.opcheck(
        torch.ops.fused_act.bias_act.default, (x.requires_grad_(), bias.requires_grad_()), {"act": "relu", "dim": dim}
    )
    ops = torch.ops.fused_act
    x, bias = x.detach(), bias.detach()
    y, codes = ops._bias_act_coded(x, bias, act="relu", dim=dim)
    torch.library.opcheck(ops._bias_act_coded.default, (x, bias), {"act": "relu", "dim": dim})
    given = (x, bias, "relu", None, None, None, dim, codes)
    torch.library.opcheck(ops._bias_act_coded_backward.default, (y, *given), {"output_mask": [True, True]})
    torch.library.opcheck(ops._bias_act_coded_jvp.default, (*given, y, bias))


def test_transforms_go_without_codes(device):
    x = example(SHAPE, torch.float32, device).nan_to_num()
    got = torch.func.vmap(torch.func.grad(lambda t: torch.ops.fused_act.relu(t).sum()))(x)
    assert equal(got, from_x("relu", torch.ones_like(x), x, {}, {})[0])


def test_wrong_codes_are_refused(device):
    x = example(SHAPE, torch.float32, device)
    y, codes = torch.ops.fused_act._relu_coded(x)
    backward = torch.ops.fused_act._relu_coded_backward
    assert equal(backward(x, x, codes), from_x("relu", x, x, {}, {})[0])
    with pytest.raises(ValueError, match="fused_act.relu: codes has shape"):
        backward(x, x, codes[1:])
    with pytest.raises(TypeError, match="fused_act.relu: codes has dtype int64"):
        backward(x, x, codes.long())
    with pytest.raises(TypeError, match="fused_act.relu: x has dtype float64"):
        torch.ops.fused_act._relu_coded(x.double())
    with pytest.raises(ValueError, match="fused_act.silu: its derivatives take too many values"):
        torch.ops.fused_act._silu_coded(x)


@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 127, 128, 129, 257, 1023, 4097])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_any_number_of_elements(numel, dtype, device):
    x, go = example((numel,), dtype, device), example((numel,), dtype, device, 2)
    bias = torch.full((1,), 0.25, dtype=dtype, device=device)
    for name, parameters in (("relu6", {}), ("min_bias_scale", {"value": 0.5, "bias": bias, "scale": 2.0})):
        y, codes = getattr(torch.ops.fused_act, f"_{name}_coded")(x, **parameters)
        assert equal(y, getattr(torch.ops.fused_act, name)(x, **parameters))
        dim = {"dim": 0} if "bias" in parameters else {}
        got = getattr(torch.ops.fused_act, f"_{name}_coded_backward")(go, x, **parameters, **dim, codes=codes)
        expected = getattr(torch.ops.fused_act, f"{name}_backward")(go, x, **parameters, **dim)
        assert equal(got[0] if dim else got, expected[0] if dim else expected)


TAKES_OPERAND = {name for name, parameters in fused_act._C._steps if "T" in parameters}
# Steps whose derivatives may be of few values, and some others.
LIGHT = [n for n in STEPS if n not in ("Sigmoid", "Tanh", "Silu", "Mish", "Gelu", "Exp", "Log", "PowScalar")]


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed, device):
    """Whatever the steps, the gradients are those from x."""
    rng = random.Random(seed)
    steps, saved = [], []
    for _ in range(rng.randint(1, 7)):
        name = rng.choice(LIGHT)
        source = None
        if name in TAKES_OPERAND:
            source = ("slot", rng.choice(saved)) if saved and rng.random() < 0.5 else ("operand", rng.randrange(3))
        steps.append((name, source, rng.choice(STEPS[name][1])))
        if rng.random() < 0.2:
            slot = rng.randrange(3)
            steps.append(("save", ("slot", slot), ()))
            saved.append(slot)
    program, scalars = encode(steps)
    dtype = rng.choice(NARROW)
    shape = (3, 4, 40, 37)
    x = example(shape, dtype, device, seed).requires_grad_()
    operands = [example(s, dtype, device, seed + 1 + k) for k, s in enumerate([(37,), (4, 1, 1), shape])]
    operands = [t.requires_grad_() for t in operands]
    go = example(shape, dtype, device, seed + 7)
    y, kept = saved_by(lambda: chain(x, operands, program, scalars))
    with torch.no_grad():
        assert equal(y, chain(x, operands, program, scalars)), steps
    if y.requires_grad:
        got = torch.autograd.grad(y, [x, *operands], go, allow_unused=True, materialize_grads=True)
        detached = [t.detach() for t in operands]
        expected = torch.ops.fused_act.chain_backward(go, x.detach(), detached, program, scalars)
        for a, b in zip(got, expected):
            if a.shape == x.shape:
                assert equal(a, b), (steps, [t.dtype for t in kept])
            else:
                torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["relu_bias", "hardsigmoid", "bias_act, clamped"])
def test_a_third_derivative_is_what_autograd_gives(name, device):
    """0, or where the gradient of the gradient is not used, that there is none."""
    x, parameters, operands, _ = make(name, torch.float32, device)
    leaf = x.nan_to_num().requires_grad_()
    go = torch.randn_like(leaf).requires_grad_()
    y = operator(name)(leaf, **parameters, **operands)
    (first,) = torch.autograd.grad(y, leaf, go, create_graph=True)
    (second,) = torch.autograd.grad(first, go, torch.randn_like(go).requires_grad_(), create_graph=True)
    third = torch.autograd.grad(second.sum(), leaf, allow_unused=True, materialize_grads=True)[0]
    assert first.requires_grad and not third.any()


@cases.needs_cuda
@pytest.mark.slow
def test_rows_of_more_than_half_of_what_codes_have_indices_for():
    """Columns that are folded: a row of them ends beyond 2^31."""
    channels = 268_435_457
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free memory")
    x = torch.randn(2, channels, device="cuda", dtype=torch.bfloat16).requires_grad_()
    bias = torch.zeros(channels, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = torch.ops.fused_act.relu_bias(x, bias)
    (of_x, of_bias) = torch.autograd.grad(y, [x, bias], torch.ones_like(y))
    assert torch.equal(of_x, (x > 0).to(x.dtype))
    assert of_bias.shape == bias.shape and (of_bias == 2).all()
    del y, of_x, of_bias
    y = torch.ops.fused_act.bias_act(x, bias, "relu")
    (of_x, of_bias) = torch.autograd.grad(y, [x, bias], torch.ones_like(y))
    assert torch.equal(of_x, (x > 0).to(x.dtype))
    assert torch.equal(of_bias, of_x[0] + of_x[1])


def test_explain_tells_what_is_saved(capsys):
    def block(x, bias, residual):
        return torch.relu(F.leaky_relu(x + bias, 0.1) / 2.0 + residual)

    assert "saves 2 bits an element" in str(fused_act.explain(block))
    assert "saves nothing" in str(fused_act.explain(lambda x, b: (x + b) * 2.0))
    report = str(fused_act.explain(lambda x: torch.relu(x) * torch.sigmoid(torch.relu(x))))
    assert "training saves input_0)" in report, report


STEP_FILE = cases.ROOT / "src" / "kernels" / "steps.h"


@pytest.mark.skipif(not STEP_FILE.exists(), reason="the tests do not lie in a source tree")
def test_steps_of_few_slopes_say_so():
    """Of the activations that have kernels for their forms: few_slopes says which of these are for codes."""
    structs = re.split(r"^struct ", STEP_FILE.read_text(), flags=re.MULTILINE)[1:]
    found = {s.split()[0]: "few_slopes = true" in s for s in structs if re.search("(common|few_slopes) = true", s)}
    found |= {op.steps[0]: found.get(op.steps[0], False) for op in fused_act.ops() if len(op.steps) == 1}
    assert len(found) >= 25 and sum(found.values()) >= 10
    x = example(SHAPE, torch.float32, "cpu").requires_grad_()
    for step, few in found.items():
        program, scalars = encode([(step, None, STEPS[step][1][0])])
        _, kept = saved_by(lambda: chain(x, [], program, scalars))
        assert [t.dtype for t in kept] == [torch.int32 if few else torch.float32], step
