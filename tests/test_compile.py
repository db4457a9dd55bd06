"""torch.compile, torch.export, AOTInductor and opcheck (CONTRACT, section 4)."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch
from cases import LAYOUTS, call, derived, tracked
from conftest import DEEP_OPS
from oracle import assert_same
from torch._dynamo.testing import CompileCounterWithBackend

import fused_act

SIZES = (4, 7, 2, 16, 9, 33, 5, 12)


def inductor_reason(device):
    if device.type == "cpu":
        return None if shutil.which("g++") or shutil.which("c++") else "Inductor needs a C++ compiler"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Inductor needs Triton on a GPU"
    if not (shutil.which("gcc") or shutil.which("cc")):
        return "Triton needs a C compiler"
    return None


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request, device, fresh_dynamo):
    """Inductor itself spends about ten seconds of a CPU on its first compilation and two on each later one."""
    if request.param == "inductor" and (reason := inductor_reason(device)):
        pytest.skip(reason)
    return request.param


def functional(op):
    return getattr(fused_act.functional, op.name)


def step(function, x, params, go):
    """Value and gradients."""
    leaf, own, leaves = tracked(x, params)
    y = function(leaf, own)
    return y, torch.autograd.grad(y, leaves, go)


# An operator between other pointwise ones, so that the compiler has something of its own to generate around it.
def around(op, x, params):
    return functional(op)(x * 1.5, **params) + 0.25


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_two_compilations_for_eight_sizes(op, device, backend, layout):
    """fullgraph, forward and backward, dynamic batch; values, dtypes and strides as without compiling."""
    counter = CompileCounterWithBackend(backend)
    function = torch.compile(lambda x, p: around(op, x, p), backend=counter, fullgraph=True)
    params = cases.make_params(op, (1, 6, 4, 5), torch.float32, device)
    for n in SIZES:
        shape = (n, 6, 4, 5)
        x = LAYOUTS[layout](cases.filled(shape, torch.float32, op, seed=n).to(device))
        go = cases.filled(shape, torch.float32, seed=n + 1).to(device)
        y, grads = step(function, x, params, go)
        expected_y, expected_grads = step(lambda x, p: around(op, x, p), x, params, go)
        assert y.stride() == expected_y.stride()
        torch.testing.assert_close(y, expected_y)
        for a, b in zip(grads, expected_grads):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2, f"{counter.frame_count} compilations for {len(SIZES)} sizes"


def test_one_compilation_when_marked_dynamic(op, device, fresh_dynamo):
    """One compilation serves all sizes."""
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda x, p: around(op, x, p), backend=counter, fullgraph=True)
    params = cases.make_params(op, (1, 6, 4), torch.float32, device)
    for n in SIZES:
        x = cases.filled((n, 6, 4), torch.float32, op, seed=n).to(device)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same(function(x, params), around(op, x, params))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "layout", ["contiguous", "channels_last", "transposed", "step_all", "expanded_channel", "windows"]
)
def test_strides_out_of_a_compiled_function(op, device, layout, fresh_dynamo):
    """The operator is the last thing in the graph: what comes out has the strides of the eager call."""
    for shape in ((3, 5, 4, 7), (9, 16)):
        torch._dynamo.reset()
        x = LAYOUTS[layout](cases.filled(shape, torch.float32, op).to(device))
        params = cases.make_params(op, shape, torch.float32, device)
        go = cases.filled(shape, torch.float32, seed=3).to(device)
        function = torch.compile(lambda x, p: functional(op)(x, **p), backend="aot_eager", fullgraph=True)
        y, grads = step(function, x, params, go)
        want_y, want_grads = step(lambda x, p: functional(op)(x, **p), x, params, go)
        assert y.stride() == want_y.stride() and grads[0].stride() == want_grads[0].stride()
        assert_same(y, want_y)
        assert_same(grads[0], want_grads[0])


class EveryOperator(torch.nn.Module):
    """All modules of the table, each after a convolution, so that one compilation covers them."""

    def __init__(self, channels=4):
        super().__init__()
        self.convolution = torch.nn.Conv2d(channels, channels, 3, padding=1)
        self.activations = torch.nn.ModuleList()
        for op in DEEP_OPS:
            arguments = dict(cases.some_scalars(op))
            if cases.operands(op):
                arguments["num_features"] = channels
            self.activations.append(getattr(fused_act.nn, op.module)(**arguments))
        with torch.no_grad():
            for k, p in enumerate(self.parameters()):
                p.copy_(cases.operand_values(p.shape, p.dtype, k) * 0.3)

    def forward(self, x):
        return tuple(activation(self.convolution(x)) for activation in self.activations)


@pytest.mark.parametrize("dtype", cases.HALVES + (torch.float32,), ids=str)
def test_compiled_model_with_every_operator(device, backend, dtype):
    model = EveryOperator().to(device=device, dtype=dtype)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = cases.operand_values((3, 4, 6, 5), dtype).to(device)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = x.to(memory_format=memory_format)
        expected, actual = model(x), compiled(x)
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        for a, b in zip(actual, expected, strict=True):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, **tolerance)
        parameters = list(model.parameters())
        a, b = (torch.autograd.grad(sum(y.float().sum() for y in out), parameters) for out in (actual, expected))
        for got, want in zip(a, b):
            torch.testing.assert_close(got, want, **{k: 4 * v for k, v in tolerance.items()})


def test_compiled_torch_func(op, fresh_dynamo):
    """torch.func.grad inside a compiled function."""
    x = cases.filled((4, 6), torch.float32, op)
    params = cases.make_params(op, x.shape, torch.float32)

    def gradient(x):
        return torch.func.grad(lambda t: functional(op)(t, **params).sum())(x)

    assert_same(torch.compile(gradient, backend="aot_eager", fullgraph=True)(x), gradient(x))


# ---------------------------------------------------------------------------------------------------------------------
# Export


def exported(op, device, layout="contiguous"):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            arguments = dict(cases.some_scalars(op))
            if cases.operands(op):
                arguments["num_features"] = 6
            self.activation = getattr(fused_act.nn, op.module)(**arguments)

        def forward(self, x):
            return self.activation(x * 2.0)

    model = Model().to(device).eval()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(cases.operand_values(p.shape, p.dtype, k))
    x = LAYOUTS[layout](cases.filled((3, 6, 4), torch.float32, op).to(device))
    return model, torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def test_export_round_trip(op, device):
    """Dynamic batch, saved, loaded, run at other sizes; the operator is one node of the graph."""
    model, program = exported(op, device)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    targets = [str(n.target) for n in loaded.graph.nodes if n.op == "call_function"]
    assert f"fused_act.{op.name}.default" in targets
    for n in (1, 3, 8, 33):
        x = cases.filled((n, 6, 4), torch.float32, op, seed=n).to(device)
        assert_same(loaded.module()(x), model(x))


def test_export_decompositions_leave_the_operator(op):
    program = exported(op, torch.device("cpu"))[1].run_decompositions()
    assert f"fused_act.{op.name}.default" in [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


AOT_SCRIPT = """
import sys; sys.path[:0] = {path!r}
import torch, cases, test_compile
device, folder, which = sys.argv[1:]
plain = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.ReLU())
model = (plain if which == "plain" else test_compile.EveryOperator()).to(device).eval()
x = cases.operand_values((3, 4, 6, 5), torch.float32).to(device)
with torch.no_grad():
    program = torch.export.export(model, (x,), dynamic_shapes=({{0: torch.export.Dim("batch", min=1, max=64)}},))
    path = torch._inductor.aoti_compile_and_package(program, package_path=f"{{folder}}/{{which}}.pt2")
    run = torch._inductor.aoti_load_package(path)
    for n in (3, 8):
        x = cases.operand_values((n, 4, 6, 5), torch.float32).to(device)
        torch.testing.assert_close(run(x), model(x))
"""


@pytest.mark.slow
def test_aot_inductor(device, tmp_path):
    """Ahead of time, all operators in one package. In a process of its own: where AOTInductor does not work, loading a
    package ends the process; a model of PyTorch's own operators tells the two apart."""
    if reason := inductor_reason(device):
        pytest.skip(reason)
    if device.type == "cuda" and not shutil.which("g++"):
        pytest.skip("AOTInductor needs a C++ compiler")

    def run(which):
        script = AOT_SCRIPT.format(path=[str(Path(__file__).parent), *(p for p in sys.path if p)])
        command = [sys.executable, "-c", script, device.type, str(tmp_path), which]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    result = run("every operator")
    if result.returncode != 0 and run("plain").returncode != 0:
        pytest.skip("AOTInductor fails here for a model of PyTorch's own operators too")
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------------------------------------------------------------
# opcheck


def require(params, needed):
    return cases.with_operands(params, lambda t: t.detach().requires_grad_(needed))


@pytest.mark.parametrize(
    "layout", ["contiguous", "channels_last", "step_all", "transposed", "expanded_channel", "offset_1"]
)
def test_opcheck_forward(op, device, layout):
    for dtype, shape in ((torch.float32, (3, 5, 4, 2)), (torch.bfloat16, (4, 6))):
        x = LAYOUTS[layout](cases.filled(shape, dtype).to(device))
        params = cases.make_params(op, shape, dtype, device)
        torch.library.opcheck(
            getattr(torch.ops.fused_act, op.name).default, (x.requires_grad_(),), require(params, True)
        )


@pytest.mark.parametrize("form", ["zero_dim", "full", "channel_trailing_ones", "per_row"])
def test_opcheck_operand_forms(operand_op, device, form):
    x = cases.filled((3, 5, 4), torch.float32).to(device).requires_grad_()
    params = cases.make_params(operand_op, x.shape, torch.float32, device, form)
    torch.library.opcheck(getattr(torch.ops.fused_act, operand_op.name).default, (x,), require(params, True))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "step_all"])
def test_opcheck_derived(op, device, layout):
    """backward is differentiable once more; jvp and double_backward end the chain."""
    shape = (3, 5, 4)
    names = cases.operands(op)
    x, go, v = (LAYOUTS[layout](cases.filled(shape, torch.float32, seed=k).to(device)) for k in range(3))
    params = {"dim": 1, **cases.make_params(op, shape, torch.float32, device)} if names else cases.some_scalars(op)
    mask = {"output_mask": [True] * (1 + len(names))} if names else {}
    vs = {n: torch.ones_like(params[n]) for n in names}
    leaf, own = x.detach().requires_grad_(), require(params, True)
    torch.library.opcheck(derived(op, "backward").default, (go.detach().requires_grad_(), leaf), {**own, **mask})
    torch.library.opcheck(derived(op, "backward").default, (go, x), {**params, **mask})
    torch.library.opcheck(
        derived(op, "jvp").default, (x,), {**params, "x_tangent": v, **{f"{n}_tangent": t for n, t in vs.items()}}
    )
    torch.library.opcheck(
        derived(op, "double_backward").default,
        (go, x),
        {
            **params,
            "grad_grad_x": v,
            **{f"grad_grad_{n}": t for n, t in vs.items()},
            "output_mask": [True] * (2 + len(names)),
        },
    )


def test_opcheck_sizes(op, device):
    for shape in ((0, 3), (1, 1), (1,), (), (2, 3, 2, 2, 3, 2)):
        x = cases.filled(shape, torch.float32).to(device).requires_grad_()
        params = cases.make_params(op, shape, torch.float32, device)
        torch.library.opcheck(
            getattr(torch.ops.fused_act, op.name).default,
            (x,),
            require(params, True),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


def test_call_is_not_composite(op):
    """A compiler must see the operator, not a decomposition."""
    for key in ("CompositeImplicitAutograd", "CompositeExplicitAutograd"):
        assert not cases.has_kernel(op.name, key)
    x = cases.filled((3, 5), torch.float32, op)
    from torch.fx.experimental.proxy_tensor import make_fx

    params = cases.make_params(op, x.shape, torch.float32)
    graph = make_fx(lambda t: call(op, t, params))(x)
    assert f"fused_act.{op.name}.default" in [str(n.target) for n in graph.graph.nodes]
