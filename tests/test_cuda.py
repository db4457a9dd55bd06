"""What exists only on a GPU (CONTRACT, section 4): streams, graphs, devices. Values and gradients on the GPU are in
the other files, whose `device` fixture runs them there too."""

import contextlib
import copy
import math
import re

import cases
import oracle
import pytest
import torch
from cases import call, tracked
from oracle import assert_same
from torch.utils._python_dispatch import TorchDispatchMode

import fused_act
from fused_act import _C, functional
from fused_act._bench.cases import code_bits, make_cases
from fused_act._program import encode

pytestmark = cases.needs_cuda

CUDA = torch.device("cuda")
SHAPE = (64, 32, 33, 17)


def arguments(op, dtype=torch.float32, shape=SHAPE, device=CUDA):
    x = cases.filled(shape, dtype, op).to(device)
    return x, cases.make_params(op, shape, dtype, device), cases.filled(shape, dtype, seed=2).to(device)


def forward_backward(op, x, params, go):
    leaf, own, leaves = tracked(x, params)
    y = call(op, leaf, own)
    return [y.detach(), *torch.autograd.grad(y, leaves, go)]


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class one_kernel_at_a_time(TorchDispatchMode):
    """Waits for the end of each operator that PyTorch's dispatch shows."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        torch.cuda.synchronize()
        result = function(*arguments, **(keywords or {}))
        torch.cuda.synchronize()
        return result


def test_no_synchronisation(op, dtype):
    x, params, go = arguments(op, dtype)
    forward_backward(op, x, params, go)
    with no_synchronisation():
        forward_backward(op, x, params, go)


def test_runs_on_the_current_stream(op):
    """Work queued before on that stream is seen; on any other stream the kernel would read x too early."""
    x, params, go = arguments(op)
    expected = forward_backward(op, x, params, go)
    late_x, late_go = torch.full_like(x, 7.0), torch.full_like(go, 7.0)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # about 30 ms
        late_x.copy_(x)
        late_go.copy_(go)
        actual = forward_backward(op, late_x, params, late_go)
    stream.synchronize()
    for a, b in zip(actual, expected):
        assert_same(a, b)


def test_other_streams_do_not_wait(op):
    """A kernel on a side stream must not queue on the default one."""
    x, params, _ = arguments(op)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first = call(op, x, params)  # leaves memory for the next output in this stream's pool
    torch.cuda.synchronize()
    del first
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        call(op, x, params)
    done = torch.cuda.Event()
    done.record(torch.cuda.default_stream())
    done.synchronize()
    assert not stream.query(), (
        "the default stream waited for the side stream, or the side stream did not run the kernel"
    )
    torch.cuda.synchronize()


def test_two_streams_at_once(op):
    """Reductions on two streams must not share scratch memory."""
    x, params, go = arguments(op)
    inputs = [(x, go), (-x, go * 0.5)]
    expected = [forward_backward(op, a, params, g) for a, g in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(20):
        for k, (a, g) in enumerate(inputs):
            with torch.cuda.stream(streams[k]):
                results[k].append(forward_backward(op, a, params, g))
    torch.cuda.synchronize()
    for got, want in zip(results, expected):
        for run in got:
            for a, b in zip(run, want):
                assert_same(a, b)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "step_all"])
def test_graph_capture_forward(op, dtype, layout):
    x, params, _ = arguments(op, dtype)
    static = cases.LAYOUTS[layout](x)
    warm_up(lambda: call(op, static, params))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(op, static, params)
    for k in range(3):
        static.copy_(cases.filled(SHAPE, dtype, op, seed=10 + k).to(CUDA))
        graph.replay()
        assert_same(y, call(op, static, params))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_graph_capture_forward_and_backward(op, dtype, layout):
    x, params, go = arguments(op, dtype)
    static, static_go = cases.LAYOUTS[layout](x), cases.LAYOUTS[layout](go)
    leaf, own, leaves = tracked(static, params)

    def step():
        y = call(op, leaf, own)
        return [y, *torch.autograd.grad(y, leaves, static_go)]

    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for k in range(3):
        with torch.no_grad():
            static.copy_(cases.filled(SHAPE, dtype, op, seed=10 + k).to(CUDA))
            static_go.copy_(cases.filled(SHAPE, dtype, seed=20 + k).to(CUDA))
        graph.replay()
        for a, b in zip(captured, forward_backward(op, static, params, static_go)):
            assert_same(a, b)


def dependent_kernels(x, bias):
    """Kernels of ours and PyTorch's, each of which needs what one before wrote, or overwrites what it read."""
    ops = torch.ops.fused_act
    y = ops.relu_bias(x, bias)
    z = ops.hardswish(y)
    ops.leaky_relu_(y, 0.5)  # what the kernel before reads
    z = z + y
    ops.hardtanh_(z, -2.0, 2.0)
    go = ops.bias_act(z, bias, "silu")
    x.mul_(0.5)
    leaf, own = x.detach().requires_grad_(), bias.detach().requires_grad_()
    # Rows and columns of partial sums, and what finishes them.
    rows = torch.autograd.grad(ops.bias_act(leaf, own, "mish"), [leaf, own], go)
    columns = torch.autograd.grad(ops.relu_bias(leaf[:, :, 0, 0], own), [leaf, own], go[:, :, 0, 0])
    scaled = ops.scale_shift_act(rows[0], rows[1], columns[1], "tanh")
    ops.relu_(x)
    return [ops.min_bias_scale(scaled, 0.1, columns[1], 3.0), ops.add_act(columns[0], x, "gelu"), y, z, rows[1]]


@pytest.mark.parametrize("how", ["stream", "graph"])
@pytest.mark.parametrize("shape", [(1, 3, 2, 2), (5, 8, 9, 7), (16, 64, 16, 16), (16, 64, 65, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_waits_for_the_one_before(dtype, shape, how):
    """A kernel may be launched while the one before it still runs."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator).to(CUDA, dtype) for _ in range(3)]
    bias = torch.randn(shape[1], generator=generator).to(CUDA, dtype)
    expected = []
    for x in inputs:
        with one_kernel_at_a_time():
            expected.append(dependent_kernels(x.clone(), bias))
        if dtype == torch.float32:
            for a, b in zip(expected[-1][2:], dependent_kernels(x.cpu(), bias.cpu())[2:], strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-3)
    static = inputs[0].clone()
    if how == "stream":

        def run():
            return dependent_kernels(static, bias)

    else:
        warm_up(lambda: dependent_kernels(static, bias))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = dependent_kernels(static, bias)

        def run():
            graph.replay()
            return [t.clone() for t in captured]

    for _ in range(20):
        for x, want in zip(inputs, expected, strict=True):
            static.copy_(x)
            for a, b in zip(run(), want, strict=True):
                assert_same(a, b)


def test_graph_capture_of_double_backward_and_jvp(op):
    x, params, go = arguments(op, shape=(8, 6, 5))
    t = torch.ones_like(x)

    def step():
        leaf = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(call(op, leaf, params), leaf, go.requires_grad_(), create_graph=True)
        second = torch.autograd.grad(first, go, t)[0]
        return second, torch.func.jvp(lambda v: call(op, v, params), (x,), (t,))[1]

    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for a, b in zip(captured, step()):
        assert_same(a.detach(), b.detach())


def test_graph_capture_of_a_fused_model():
    """Inference, and a training step with the optimizer in it."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.Hardswish(), torch.nn.Conv2d(8, 8, 3), torch.nn.SiLU()]
    model = fused_act.fuse(torch.nn.Sequential(*layers)).to(CUDA)
    scaled = fused_act.fuse(lambda y: torch.relu(y * 2 + 1) / 3)
    x = torch.randn(4, 3, 12, 12, device=CUDA)
    twin = copy.deepcopy(model)

    def step(m):
        optimizer = torch.optim.SGD(m.parameters(), 0.01)
        for p in m.parameters():
            p.grad = None
        scaled(m(x)).sum().backward()
        optimizer.step()

    warm_up(lambda: step(model))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model)
    inference = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(inference):
        y = scaled(model(x))
    for _ in range(3):
        step(twin)
    for k in range(2):
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(k)))
        graph.replay()
        step(twin)
        inference.replay()
        with torch.no_grad():
            torch.testing.assert_close(y, scaled(twin(x)))
    for a, b in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(a, b)


def warm_up(function):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def test_allocates_only_results(op):
    """Forward: the output. Backward: the gradients and a little scratch for the sums. No intermediate tensor."""
    x, params, go = arguments(op)
    leaf, own, leaves = tracked(x, params)
    call(op, leaf, own)
    torch.cuda.synchronize()

    def peak(function):  # in requested bytes: blocks of the allocator may be larger
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        kept = function()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, kept

    size = x.numel() * x.element_size()
    used, y = peak(lambda: call(op, leaf, own))
    (case,) = make_cases([op.name], [])
    assert used == size + code_bits(case) * math.ceil(x.numel() / 128) * 16
    used, _ = peak(lambda: torch.autograd.grad(y, leaves, go))
    assert used <= size * 1.05 + 2**16


# ---------------------------------------------------------------------------------------------------------------------
# Devices


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_devices
def test_device_of_the_tensor_is_used_and_restored(op, dtype):
    x, params, go = arguments(op, dtype)
    expected = forward_backward(op, x, params, go)
    other = torch.device("cuda", 1)
    with torch.cuda.device(0):
        moved = cases.with_operands(params, lambda t: t.to(other))
        actual = forward_backward(op, x.to(other), moved, go.to(other))
        assert torch.cuda.current_device() == 0
    for a, b in zip(actual, expected):
        assert a.device == other
        assert_same(a, b)


@two_devices
def test_stream_of_the_other_device(op):
    x, params, go = arguments(op, device=torch.device("cuda", 1))
    expected = forward_backward(op, x, params, go)
    late = torch.full_like(x, 7.0)
    stream = torch.cuda.Stream(device=1)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        y = call(op, late, params)
    with torch.cuda.device(0):
        stream.synchronize()
    assert_same(y, expected[0])


@two_devices
def test_operand_on_another_gpu(operand_op):
    x, params, _ = arguments(operand_op, shape=(3, 5, 4))
    moved = cases.with_operands(params, lambda t: t.to("cuda:1"))
    with pytest.raises(RuntimeError, match=f"fused_act.{operand_op.name}: ") as error:
        call(operand_op, x, moved)
    assert "cuda:0" in str(error.value) and "cuda:1" in str(error.value)
    assert_same(call(operand_op, x, params), call(operand_op, x, params))


def test_operand_on_another_device(operand_op):
    """Both devices are named, and the context stays usable."""
    x, params, go = arguments(operand_op, shape=(3, 5, 4))
    on_cpu = cases.with_operands(params, lambda t: t.cpu())
    for bad_x, bad_params in ((x, on_cpu), (x.cpu(), params)):
        with pytest.raises(RuntimeError, match=f"fused_act.{operand_op.name}: ") as error:
            call(operand_op, bad_x, bad_params)
        assert re.search(r"cuda:\d", str(error.value)) and "cpu" in str(error.value)
    oracle.assert_value(operand_op, call(operand_op, x, params), x, params)
    torch.cuda.synchronize()


def test_incoming_gradient_on_another_device(op):
    x, params, go = arguments(op, shape=(3, 5, 4))
    with pytest.raises(RuntimeError, match=f"fused_act.{op.name}") as error:
        cases.backward(op, go.cpu(), x, params)
    assert re.search(r"cuda:\d", str(error.value)) and "cpu" in str(error.value)


def test_zero_dimensional_cpu_operand(operand_op, dtype):
    """Accepted as a scalar, as in eager; its gradient lies where the operand lies."""
    x, _, go = arguments(operand_op, dtype, (6, 5, 4))
    for operand_dtype in cases.DTYPES:
        params = dict(cases.some_scalars(operand_op))
        params |= {n: torch.tensor(0.3, dtype=operand_dtype) for n in cases.operands(operand_op)}
        oracle.assert_value(operand_op, call(operand_op, x, params), x, params)
        on_gpu = cases.with_operands(params, lambda t: t.cuda())
        actual, expected = forward_backward(operand_op, x, params, go), forward_backward(operand_op, x, on_gpu, go)
        for a, b in zip(actual, expected):
            assert_same(a.cpu(), b.cpu())
        assert all(g.device.type == "cpu" for g in actual[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("act", ["gelu", "relu", "hardswish"])
@pytest.mark.parametrize("op", [op for op in fused_act.ops() if len(cases.operands(op)) > 1], ids=lambda op: op.name)
def test_a_number_on_the_cpu_beside_a_vector_whose_gradient_is_summed(op, act, memory_format, dtype):
    """As a vector of that number is."""
    shape = (4, 16, 12, 12)

    def make(*size):
        return torch.randn(*size, device="cuda").to(dtype)

    x = make(*shape).contiguous(memory_format=memory_format)
    vectors = [p.name for p in op.parameters if p.kind == "operand" and not p.is_input]
    large = {
        p.name: make(*shape).contiguous(memory_format=memory_format)
        for p in op.parameters
        if p.kind == "operand" and p.is_input
    }
    kind = {p.name: act for p in op.parameters if p.kind == "activation"} | {"dim": 1}
    for number in vectors:
        others = {name: make(16) for name in vectors if name != number}
        results = []
        for value in (torch.tensor(0.75), torch.full((16,), 0.75, device="cuda", dtype=dtype)):
            leaves = {n: t.detach().requires_grad_() for n, t in ({"": x} | large | others).items()}
            given = {n: t for n, t in leaves.items() if n} | {number: value} | kind
            y = getattr(torch.ops.fused_act, op.name)(leaves[""], **given)
            results.append([y, *torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y))])
        for a, b in zip(*results, strict=True):
            assert a.shape == b.shape and not (a.shape == x.shape and not a.any())
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_zero_dimensional_x_on_the_cpu_with_a_cuda_operand(operand_op):
    """Eager moves such an x to the GPU; here it is that or an error that names both, never a wrong read."""
    params = dict(cases.some_scalars(operand_op))
    params |= {n: torch.tensor(0.3, device=CUDA) for n in cases.operands(operand_op)}
    x = torch.tensor(0.5)
    try:
        y = call(operand_op, x, params)
    except RuntimeError as error:
        assert str(error).startswith(f"fused_act.{operand_op.name}: ")
        assert "cpu" in str(error) and "cuda" in str(error)
    else:
        assert_same(y.cpu(), call(operand_op, x, cases.with_operands(params, lambda t: t.cpu())))


def test_context_is_usable_after_every_error(op):
    x, params, go = arguments(op, shape=(3, 5, 4))
    for bad in (lambda: call(op, x.long(), params), lambda: call(op, x, {**params, "nonsense": 1})):
        with pytest.raises((TypeError, RuntimeError)):
            bad()
    forward_backward(op, x, params, go)
    torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------------------------
# CPU and GPU


def test_gpu_and_cpu_agree(op, dtype):
    """Not to the bit (a division by a scalar is a multiplication on the GPU, as in eager), but closely."""
    _, params, go = arguments(op, dtype, (8, 6, 5, 7))
    x = cases.filled(go.shape, dtype).to(CUDA)  # no neighbours of kinks, which rounding puts on either side
    on_cpu = forward_backward(op, x.cpu(), cases.with_operands(params, lambda t: t.cpu()), go.cpu())
    # Eager's float64 hardsigmoid on CUDA holds 1/6 in float32, and the operator's value is eager's.
    loose = dtype is torch.float64 and "hardsigmoid" in op.expression
    tolerance = torch.finfo(torch.float32).eps if loose else 8 * torch.finfo(dtype).eps
    for a, b in zip(forward_backward(op, x, params, go), on_cpu):
        torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance * 16)


def test_graph_survives_a_backward_in_another_thread(op):
    """The engine runs backward in its own thread per device; the stream must be the forward's."""
    x, params, go = arguments(op)
    expected = forward_backward(op, x, params, go)
    leaf, own, leaves = tracked(x, params)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = call(op, leaf, own)
    torch.cuda.current_stream().wait_stream(stream)
    for a, b in zip(torch.autograd.grad(y, leaves, go), expected[1:]):
        assert_same(a, b)


def calls_in_odd_layouts(dtype):
    """Tensors that no vector fits, large enough to be worth a copy: (function, x, other tensors)."""
    ops, g = torch.ops.fused_act, torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, device="cuda", generator=g).to(dtype)

    program, scalars = encode([("Add", ("operand", 0), ()), ("Mish", None, ()), ("MulOperand", ("operand", 1), ())])
    bias, shape = random(16), (4, 16, 33, 63)
    odd = {
        "unaligned": random(math.prod(shape) + 1)[1:].view(shape),
        "pitch": random(4, 16, 33, 65)[..., 1:-1],
        "every second": random(4, 16, 33, 126)[..., ::2],
        "expanded": random(1, 16, 33, 63).expand(shape),
        "transposed": random(4, 33, 16, 63).transpose(1, 2),
    }
    for name, t in odd.items():
        yield f"relu_hardswish {name}", ops.relu_hardswish, t, ()
        yield f"bias_act {name}", lambda x, b: ops.bias_act(x, b, "gelu"), t, (bias,)
        yield (
            f"chain {name}",
            lambda x, a, b: ops.chain(x, [a, b], program, scalars),
            t,
            (random(16, 1, 1), random(4, 33, 16, 63).transpose(1, 2)),
        )
        yield f"gated {name}", lambda x, u: ops.gated(x, u, "silu"), t, (random(*shape),)
    yield "halves", ops.silu_and_mul, random(4, 16, 33, 126), ()
    yield "halves with a pitch", ops.silu_and_mul, random(4, 16, 33, 130)[..., :126], ()
    yield "pairs", ops.swiglu_oai, random(4, 16, 33, 126), ()
    broadcast = (random(1, 16, 1, 63), random(4, 1, 33, 1))
    yield "operands", lambda x, a, b: ops.chain(x, [a, b], program, scalars), random(*shape), broadcast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_layouts_do_not_go_element_by_element(dtype):
    """They are copied first; bits are those of dense tensors."""
    for name, function, x, others in calls_in_odd_layouts(dtype):
        leaves = [t.detach().requires_grad_() for t in (x, *others)]
        dense = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in (x, *others)]
        want = function(*dense)
        go = torch.randn_like(want)
        with torch.profiler.profile() as profile:
            y = function(*leaves)
            grads = torch.autograd.grad(y, leaves, go)
            torch.cuda.synchronize()
        kernels = {e.name for e in profile.events() if re.search("fused_act::strided_kernel", e.name)}
        assert not kernels, (name, kernels)
        assert y.stride() == torch.empty_like(x).stride() or x.shape != y.shape, name
        assert_same(y.detach(), want.detach())
        for got, expected, leaf in zip(grads, torch.autograd.grad(want, dense, go), leaves):
            assert got.stride() == torch.empty_like(leaf).stride(), name
            if got.shape == x.shape:
                assert_same(got, expected)
            else:  # summed in another order
                torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("gradient", ["of a sum", "channels_last"])
@pytest.mark.parametrize("name", ["relu_bias", "hardsigmoid", "bias_act"])
def test_gradients_in_another_order_do_not_go_element_by_element(name, gradient):
    x = torch.randn(8, 16, 40, 40, device="cuda", requires_grad=True)
    bias = torch.randn(16, device="cuda", requires_grad=True)
    arguments = {"relu_bias": [bias], "hardsigmoid": [], "bias_act": [bias, "leaky_relu"]}[name]
    function = getattr(torch.ops.fused_act, name)
    leaves = [x, bias] if arguments else [x]
    go = torch.ones((), device="cuda").expand(x.shape)
    if gradient == "channels_last":
        go = torch.randn_like(x).contiguous(memory_format=torch.channels_last)
    want = torch.autograd.grad(function(x, *arguments), leaves, go.contiguous())
    y = function(x, *arguments)
    with torch.profiler.profile() as profile:
        got = torch.autograd.grad(y, leaves, go)
        torch.cuda.synchronize()
    assert not [e.name for e in profile.events() if re.search("fused_act::(strided|reduce)_kernel", e.name)]
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def kernels_of(function):
    """This library's kernels that it runs, without those that end a sum."""
    with torch.profiler.profile() as profile:
        function()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if re.search(r"fused_act::\w+_kernel", e.name)]
    return [name for name in names if "finish_kernel" not in name]


FRAMES = [op for op in fused_act.ops() if op.packing or any(p.kind == "activation" for p in op.parameters)]
FRAME_LAYOUTS = {
    "rows": ((2, 16, 4, 8), torch.contiguous_format),
    "rows that no vector fits": ((8, 3, 5, 7), torch.contiguous_format),
    "channels_last": ((2, 16, 5, 4), torch.channels_last),
}


def frame_arguments(op, shape, dtype, memory_format):
    """All parameters given; then the optional ones left out; then operands of another type, and of one element."""
    g = torch.Generator().manual_seed(len(op.name))

    def make(*size, dtype=dtype):
        return (torch.randn(*size, generator=g) * 3).to("cuda", dtype)

    def full():
        x = make(*shape[:-1], shape[-1] * (2 if op.packing else 1)).contiguous(memory_format=memory_format)
        x[0, 0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
        return x

    for kind in ("all", "none", "mixed"):
        arguments = {}
        for p in op.parameters:
            if p.kind == "operand" and p.is_input:
                arguments[p.name] = full()
            elif p.kind == "operand" and not (p.optional and kind == "none"):
                size = 1 if kind == "mixed" and p.optional else shape[1]
                arguments[p.name] = make(size, dtype=torch.float32 if kind == "mixed" else dtype)
            elif p.kind == "scalar" and p.name != "alpha" and not (p.optional and kind == "none"):
                arguments[p.name] = 1.25
        if any(p.kind == "operand" and not p.is_input for p in op.parameters):
            arguments["dim"] = 1
        yield full(), arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", FRAME_LAYOUTS)
@pytest.mark.parametrize("op", FRAMES, ids=lambda op: op.name)
def test_a_frame_gives_what_its_steps_give(op, layout, dtype):
    """Kernels that are compiled for an activation, and those for any strides, which take one step after the other."""
    shape, memory_format = FRAME_LAYOUTS[layout]
    function = getattr(torch.ops.fused_act, op.name)
    acts = [None]
    if activation := next((p.name for p in op.parameters if p.kind == "activation"), None):
        acts = [a.name for a in fused_act.ops() if a.is_activation]
    for x, arguments in frame_arguments(op, shape, dtype, memory_format):
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=dtype, device="cuda")
        stepped = wide[..., ::2].copy_(x)
        for act in acts:
            kind = {activation: act} if act else {}
            parameters = next(a for a in fused_act.ops() if a.name == act).parameters if act else []
            if parameters and parameters[0].default is None and not parameters[0].optional:
                kind["alpha"] = 0.5
            results = []
            for given in (x, stepped):
                leaves = [t.detach().requires_grad_() for t in (given, *arguments.values()) if torch.is_tensor(t)]
                tensors = iter(leaves)
                leaf = next(tensors)
                own = {k: next(tensors) if torch.is_tensor(v) else v for k, v in arguments.items()}
                with torch.no_grad():
                    y = function(leaf, **own, **kind)
                go = torch.ones_like(y, memory_format=torch.contiguous_format)
                go.view(-1)[::3] = -1.7
                go = go.contiguous(memory_format=memory_format)
                trained = function(leaf, **own, **kind)
                results.append([y, trained, *torch.autograd.grad(trained, leaves, go)])
            for n, (got, want) in enumerate(zip(*results)):
                summed = n > 1 and got.shape != x.shape
                same = {"rtol": 1e-2, "atol": 1e-1} if summed else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(got, want, **same, equal_nan=True, msg=lambda m: f"{act}, result {n}: {m}")


@pytest.mark.parametrize("op", FRAMES, ids=lambda op: op.name)
def test_a_frame_has_its_kernel(op):
    shape = (2, 16, 4, 8)
    function = getattr(torch.ops.fused_act, op.name)
    kind = {p.name: "silu" for p in op.parameters if p.kind == "activation"}
    calls = list(frame_arguments(op, shape, torch.bfloat16, torch.contiguous_format))
    names = kernels_of(lambda: [function(x, **arguments, **kind) for x, arguments in calls])
    assert len(names) == len(calls), names
    for name, (_, arguments) in zip(names, calls):  # silu alone is a line
        alone = not op.packing and not any(map(torch.is_tensor, arguments.values()))
        assert re.search("Chain<fused_act::Silu>" if alone else "Framed|Exact", name), names


FORMS = {
    "bias": lambda x, b, act: torch.ops.fused_act.bias_act(x, b, act),
    "scale and shift": lambda x, b, act: torch.ops.fused_act.scale_shift_act(x, b, b + 1, act),
    "residual before": lambda x, b, act: torch.ops.fused_act.add_act(x, x * 2, act),
    "bias, residual before": lambda x, b, act: torch.ops.fused_act.add_act(x, x * 2, act, bias=b),
    "residual after": lambda x, b, act: torch.ops.fused_act.act_add(x, x * 2, act),
    "bias, residual after": lambda x, b, act: torch.ops.fused_act.act_add(x, x * 2, act, bias=b),
    "gated": lambda x, b, act: torch.ops.fused_act.gated(x, x * 2, act),
    "gated with biases": lambda x, b, act: torch.ops.fused_act.gated(x, x * 2, act, b.detach(), b.detach() * 2, dim=1),
    "halves": lambda x, b, act: getattr(torch.ops.fused_act, act + "_and_mul")(x),
    "pairs": lambda x, b, act: torch.ops.fused_act.swiglu_oai(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["rows", "channels_last"])
@pytest.mark.parametrize("act", ["relu", "silu"])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_has_its_kernels(form, act, layout, dtype):
    """Forward and backward, that of the bias too, are kernels of the form itself, or of codes."""
    shape, memory_format = FRAME_LAYOUTS[layout]
    shape = (*shape[:2], 32, 32)  # large enough for codes
    if form == "halves":
        memory_format = torch.contiguous_format
    x = torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=memory_format).requires_grad_()
    b = torch.randn(shape[1], device="cuda", dtype=dtype, requires_grad=True)

    def train():
        y = FORMS[form](x, b, act)
        y.backward(torch.ones_like(y))

    names = kernels_of(train)
    assert len(names) == 2 and "Exact" in names[0] and re.search("Exact|Decoder", names[1]), names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("act", ["silu", "relu_squared", "gelu"])
@pytest.mark.parametrize("shape", [(16, 64, 126), (512, 64), (4096, 18), (8, 4098)])
def test_halves_that_are_no_whole_vectors_are_not_copied(shape, act, dtype):
    """Forward and backward in one kernel each, with the values of halves that are."""
    op = getattr(torch.ops.fused_act, act + "_and_mul")
    start = torch.randn(*shape[:-1], shape[-1] + 3, device="cuda", dtype=dtype)
    for begin in (0, 1):  # rows with a pitch, too, and one element after a vector's begin
        x = start[..., begin : begin + shape[-1]]
        x = (x if begin else x.contiguous()).detach().requires_grad_()
        go = torch.randn(*shape[:-1], shape[-1] // 2, device="cuda", dtype=dtype)
        with torch.profiler.profile() as profile:
            y = op(x)
            (grad,) = torch.autograd.grad(y, x, go)
            torch.cuda.synchronize()
        names = [e.name for e in profile.events() if re.search("_kernel", e.name)]
        assert len(names) == 2 and all("Exact" in name for name in names), names
        padded = torch.zeros(*shape[:-1], 2, -(-shape[-1] // 32) * 16, device="cuda", dtype=dtype)
        padded[..., : shape[-1] // 2] = x.detach().unflatten(-1, (2, -1))
        whole = padded.flatten(-2).requires_grad_()
        wide = torch.zeros(*shape[:-1], padded.shape[-1], device="cuda", dtype=dtype)
        wide[..., : go.shape[-1]] = go
        (want,) = torch.autograd.grad(op(whole), whole, wide)
        assert_same(y, op(whole.detach())[..., : go.shape[-1]].contiguous())
        assert_same(grad, want.unflatten(-1, (2, -1))[..., : go.shape[-1]].flatten(-2))


# Rows and channels. Tiles of a block have up to 2048 channels, or 1024.
WIDE = [
    (1, 8), (2, 24), (70001, 8), (40000, 24), (4097, 64), (1000, 2048), (300, 2056), (129, 5120), (64, 16384),
    (3, 65536), (1, 400000), (24, 307200), (5, 600000), (2, 100001),
]  # fmt: skip
INTERPRETED = encode([
    ("MulOperand", ("operand", 1), ()), ("AddOne", None, ()), ("Add", ("operand", 0), ()), ("Relu", None, ()),
    ("Add", ("operand", 2), ()),
])  # fmt: skip
WIDE_OPERATORS = {
    "scale and shift": (
        [0, 2, 3],
        lambda x, y, a, b: torch.ops.fused_act.scale_shift_act(x, a, b, "relu", dim=-1),
        lambda x, y, a, b: torch.relu(x * a + b),
    ),
    "bias and residual": (
        [0, 1, 2],
        lambda x, y, a, b: torch.ops.fused_act.add_act(x, y, "relu", bias=a, dim=-1),
        lambda x, y, a, b: torch.relu(x + a + y),
    ),
    "gated": (
        [0, 1, 2, 3],
        lambda x, y, a, b: torch.ops.fused_act.gated(x, y, "relu", a, b, dim=-1),
        lambda x, y, a, b: torch.relu(x + a) * (y + b),
    ),
    "interpreted": (
        [0, 1, 2, 3],
        lambda x, y, a, b: torch.ops.fused_act.chain(x, [y, a, b], *INTERPRETED),
        lambda x, y, a, b: torch.relu(x * a + 1 + y) + b,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows, channels", WIDE)
@pytest.mark.parametrize("name", WIDE_OPERATORS)
def test_sums_over_columns_of_any_width(name, rows, channels, dtype):
    """Few channels and more than one block is as wide as, rows enough for one wave of blocks and too few for it: every
    element once. Multiples of 1/4, whose products and sums are exact."""
    which, op, written = WIDE_OPERATORS[name]
    g = torch.Generator().manual_seed(rows)
    shapes = [(rows, channels)] * 2 + [(channels,)] * 2 + [(rows, channels)]
    values = [torch.randint(-8, 9, shape, generator=g).div(4) for shape in shapes]
    *leaves, go = [v.to("cuda", dtype).requires_grad_() for v in values]
    *wide, wide_go = [v.double().requires_grad_() for v in values]
    got = torch.autograd.grad(op(*leaves), [leaves[k] for k in which], go.detach())
    expected = torch.autograd.grad(written(*wide), [wide[k] for k in which], wide_go.detach())
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.cpu(), b.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows, channels", WIDE)
@pytest.mark.parametrize("residual", [False, True], ids=["bias", "bias and residual"])
def test_sums_over_columns_of_what_no_code_tells(residual, rows, channels, dtype):
    """As above, of silu, whose derivative is 1/2 at 0 and 1 at 64: the argument is one of these."""
    g = torch.Generator().manual_seed(rows)
    bias = torch.randint(0, 2, (channels,), generator=g) * 64
    y = torch.randint(-2, 3, (rows, channels), generator=g) * (64 if residual else 0)
    sums = torch.randint(0, 2, (rows, channels), generator=g) * 64
    go = torch.randint(-8, 9, (rows, channels), generator=g).div(4)
    x, bias, y = [t.to("cuda", dtype).requires_grad_() for t in (sums - bias - y, bias, y)]
    result = (
        functional.add_act(x, y, "silu", bias=bias, dim=-1)
        if residual
        else functional.bias_act(x, bias, "silu", dim=-1)
    )
    got = torch.autograd.grad(result, [x, bias], go.to("cuda", dtype))
    expected = go.double() * torch.where(sums == 0, 0.5, 1.0)
    assert torch.equal(got[0].cpu(), expected.to(dtype))
    assert torch.equal(got[1].cpu(), expected.sum(0).to(dtype))


ADD, SUB, GELU = ("Add", ("operand", 0), ()), ("Sub", ("operand", 0), ()), ("Gelu", None, ())


def chain_along(x, p, dim, *steps):
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.ops.fused_act.chain(x, [p.reshape(shape)], *encode(steps))


# What stands beside x, by name, along which axis; each of a tensor x, one as large and operands of the axis, p and q.
REPEATED = {
    "bias": lambda x, r, p, q, dim: functional.bias_act(x, p, "gelu", dim=dim),
    "a bias in the compute type": lambda x, r, p, q, dim: functional.bias_act(x, p.float(), "silu", dim=dim),
    "one element": lambda x, r, p, q, dim: functional.bias_act(x, p[:1], "gelu"),
    "a number on the CPU": lambda x, r, p, q, dim: functional.scale_shift_act(x, p, torch.tensor(0.5), "gelu", dim=dim),
    "scale and shift": lambda x, r, p, q, dim: functional.scale_shift_act(x, p, q, "mish", dim=dim),
    "residual and bias": lambda x, r, p, q, dim: functional.add_act(x, r, "gelu", bias=p, dim=dim),
    "residual after": lambda x, r, p, q, dim: functional.act_add(x, r, "tanh", bias=p, dim=dim),
    "gate": lambda x, r, p, q, dim: functional.gated(x, r, "gelu", p, q, dim=dim),
    "gate with relu": lambda x, r, p, q, dim: functional.gated(x, r, "relu", p, q, dim=dim),
    "gate of hardswish": lambda x, r, p, q, dim: functional.gated(x, r, "hardswish", p, q, dim=dim),
    "as large as x": lambda x, r, p, q, dim: functional.bias_act(x, r, "silu"),
    "among numbers": lambda x, r, p, q, dim: chain_along(x, p, dim, SUB, GELU, ("Mul", None, (1.7,))),
    "at the end": lambda x, r, p, q, dim: chain_along(x, p, dim, ("Mul", None, (0.5,)), GELU, ADD),
    "codes of two bits": lambda x, r, p, q, dim: functional.min_bias_scale(x, 0.25, p, 2.0, dim=dim),
    "codes, a residual and a bias": lambda x, r, p, q, dim: functional.add_act(x, r, "relu", bias=p, dim=dim),
    "codes, a residual after": lambda x, r, p, q, dim: functional.act_add(x, r, "leaky_relu", bias=p, dim=dim),
    "codes alone": lambda x, r, p, q, dim: functional.softshrink(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape, layout, dim",
    [
        ((9, 40, 360, 330), "contiguous", 1),  # a period of a sample, which 4 does not divide
        ((7, 24, 543, 512), "channels_last", 1),  # of a pixel
        ((9, 40, 363, 330), "contiguous", 1),  # whose planes are no whole vectors
        ((5, 31, 523, 521), "contiguous", 1),  # which is no whole vectors
        ((40, 1050000), "contiguous", 1),
        ((1, 20, 1320, 1600), "contiguous", 1),  # none
        ((700, 300, 200), "pitched", 2),
        ((7, 24, 543, 512), "pitched pixels", 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", REPEATED)
def test_large_tensors_give_what_their_parts_give(name, shape, layout, dim, dtype):
    """A thread takes several vectors of a large tensor, beside which lie the same elements of operands."""

    def make(seed):
        torch.manual_seed(seed)
        wide = (*shape[:-1], shape[-1] + 8) if layout == "pitched" else shape
        t = torch.randn(wide, device="cuda", dtype=dtype)[..., : shape[-1]]
        if layout == "pitched pixels":
            pixels = torch.empty(shape[0], *shape[2:], shape[1] + 8, device="cuda", dtype=dtype)[..., : shape[1]]
            return pixels.permute(0, 3, 1, 2).copy_(t)
        return t.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else t

    x, r = make(0), make(1)
    p, q = torch.randn(2, shape[dim], device="cuda", dtype=dtype)

    def run(x, r):
        x = x.detach().requires_grad_()
        y = REPEATED[name](x, r, p, q, dim)
        return y.detach(), torch.autograd.grad(y, x, y.detach())[0]

    whole = run(x, r)
    assert x.numel() > 2**25
    parts = 1 if shape[0] == 1 else shape[0] // min(shape[0], 9)
    for part in zip(*(t.split(parts) for t in (x, r, *whole))):
        for a, b in zip(run(*part[:2]), part[2:]):
            assert torch.equal(a, b)
    if shape[0] == 1:  # the same as rows of which each has one element of each operand
        rows = [t.flatten(2)[0].double() for t in (x, r, *whole)]
        some = torch.arange(0, rows[0].shape[1], 9973, device="cuda")
        x, r, y, grad = (t[:, some].to(dtype) for t in rows)
        x.requires_grad_()
        of_rows = REPEATED[name](x, r, p, q, 0)
        assert torch.equal(of_rows, y)
        assert torch.equal(torch.autograd.grad(of_rows, x, y)[0], grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("act", ["gelu", "silu", "tanh", "mish", "hardswish", "softplus", "elu", "softsign"])
def test_what_stands_among_numbers_is_not_interpreted(act, memory_format, dtype):
    f = getattr(torch.nn.functional, act)
    x = torch.randn(4, 8, 32, 32, device="cuda", dtype=dtype).contiguous(memory_format=memory_format).requires_grad_()
    b = torch.randn(8, 1, 1, device="cuda", dtype=dtype, requires_grad=True)
    for function in (
        lambda x, b: f(x * 0.5 - 0.25) * 1.7,
        lambda x, b: f((x + b) / 3) + 0.5,
        lambda x, b: f(x - b) * 1.7,
        lambda x, b: f(x * 0.5) * 1.7 + b,
    ):
        fused = fused_act.fuse(function)
        for used in ([x], [x, b]):
            y = fused(x, b)
            names = kernels_of(lambda: torch.autograd.grad(y, used, y.detach(), allow_unused=True))
            assert len(names) == 1 and "Scaled" in names[0], names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("line", [op for op in fused_act.ops() if op.steps], ids=lambda op: op.name)
def test_a_chain_that_is_a_line_has_its_kernels(line, dtype):
    chosen = cases.some_scalars(line) | ({"min_val": -1.0} if line.name == "hardtanh" else {})
    params = cases.make_params(line, (4, 8, 32, 33), dtype, "cuda", chosen=chosen)
    given = [params[p.name] for p in line.parameters if p.kind == "scalar"]
    absent = [oracle.NEUTRAL.get(p.name) for p in line.parameters if p.kind == "scalar"]
    scalars = iter(a if value is None else value for value, a in zip(given, absent))
    operands = [params[name] for name in cases.operands(line)]
    steps, taken = [], 0
    for name in line.steps:
        kinds = dict(_C._steps)[name]
        source = ("operand", taken) if "T" in kinds else None
        taken += source is not None
        steps.append((name, source, tuple(next(scalars) for _ in range(kinds.count("f")))))
    x = cases.filled((4, 8, 32, 33), dtype, line).cuda()
    seen = []
    for function in (
        lambda x, *operands: call(line, x, params | dict(zip(cases.operands(line), operands))),
        lambda x, *operands: torch.ops.fused_act.chain(x, [o.reshape(-1, 1, 1) for o in operands], *encode(steps)),
    ):
        leaves = [t.detach().requires_grad_() for t in (x, *operands)]
        results = []

        def train(function=function, leaves=leaves, results=results):
            y = function(*leaves)
            results.extend([y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))])

        train()
        seen.append((kernels_of(train), results))
    (names, results), (of_chain, results_of_chain) = seen
    assert names == of_chain and not any("Program" in name for name in names)
    for a, b in zip(results, results_of_chain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "silu", "mish", "softplus", "elu", "tanh"])
def test_large_tensors_of_any_length(name, dtype):
    f = getattr(functional, name)
    for numel in (36_000_003, 2**25 + 8, 41_000_000):
        x = torch.randn(numel, device="cuda").to(dtype).requires_grad_()
        y = f(x)
        (grad,) = torch.autograd.grad(y, x, y.detach())
        for start in (0, 8 * 1234567, numel // 8 * 8 - 64):
            part = x.detach()[start : start + 1_000_000].requires_grad_()
            of_part = f(part)
            assert torch.equal(of_part, y[start : start + 1_000_000])
            (grad_of_part,) = torch.autograd.grad(of_part, part, of_part.detach())
            assert torch.equal(grad_of_part, grad[start : start + 1_000_000])


@pytest.mark.slow
def test_a_form_of_more_than_2_31_elements():
    """Its kernels have indices of 32 bits: others take over, forward and backward, the bias's sum included."""
    channels = 64
    rows = 2**31 // channels + 10
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free memory")
    row = torch.randn(1, channels, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(channels, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    results = []
    for n in (1, rows):
        x = row.repeat(n, 1).requires_grad_()
        y = torch.ops.fused_act.bias_act(x, bias, "silu")
        results.append([y[-3:].detach(), *torch.autograd.grad(y, [x, bias], torch.ones_like(row).expand(n, channels))])
    (y, grad, of_bias), (many, grads, of_biases) = results
    assert many.numel() == 3 * channels and torch.equal(many, y.expand(3, -1))
    assert grads.numel() > 2**31 and torch.equal(grads[-3:], grad.expand(3, -1))
    torch.testing.assert_close(of_biases.double(), of_bias.double() * rows, rtol=1e-2, atol=0)
