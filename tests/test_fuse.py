"""fused_act.fuse and fused_act.explain: what is fused computes what it did, and what cannot be fused is left alone."""

import copy
import inspect
import io
import json
import math
import pickle
import random
import threading

import cases
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fused_act

DATA = cases.ROOT.parent / "shared" / "kernelbench.json"
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class Operators(TorchDispatchMode):
    """The operators that run, by name."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func).partition(".default")[0])
        return func(*args, **(kwargs or {}))

    @property
    def fused(self):
        return [name for name in self.names if name.startswith("fused_act.")]


def operators(function, *args):
    with torch.no_grad(), Operators() as seen:
        function(*args)
    return seen


def fused_kernels(function, *args):
    return len(operators(function, *args).fused)


def tensors(*shapes, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in shapes]


def close(actual, expected, dtype, scale=1.0):
    assert actual.dtype == dtype and actual.shape == expected.shape
    eps = torch.finfo(dtype).eps * scale
    torch.testing.assert_close(actual.double(), expected.double(), rtol=8 * eps, atol=32 * eps)


def check(function, *args, kernels=None, scale=1.0):
    """Value and all gradients of the fused function against the function in float64; `kernels`: fused ones."""
    fused = fused_act.fuse(function)
    if kernels is not None:
        assert fused_kernels(fused, *args) == kernels
    actual = fused(*args)
    wide = [a.detach().double().requires_grad_() for a in args]
    expected = function(*wide)
    close(actual, expected, args[0].dtype, scale)
    needed = [k for k, a in enumerate(args) if a.requires_grad]
    go = torch.ones_like(actual)
    grads = torch.autograd.grad(actual, [args[k] for k in needed], go)
    wides = torch.autograd.grad(expected, [wide[k] for k in needed], go.double())
    for k, a, b in zip(needed, grads, wides):
        close(a, b, args[k].dtype, scale * max(1.0, b.abs().max().item()))
    return fused


# ---------------------------------------------------------------------------------------------------------------------
# The data


def step(s, x, operands):
    name, form = s["op"], s.get("operand")
    if form in ("channel", "full", "per_row", "outer", "self") or s.get("role") == "param":
        other = operands.pop(0)
    elif form == "scalar_tensor":
        other = torch.tensor(s["value"]) if s["device"] == "cpu" else torch.tensor(s["value"], device=x.device)
    else:
        other = s.get("value")
    if name in ("add", "sub", "mul", "div", "min"):
        return getattr(torch, name)(x, other)
    if name == "clamp":
        return torch.clamp(x, min=s["min"], max=s["max"])
    if s.get("as_written") == "x*sigmoid(x)":
        return x * torch.sigmoid(x)
    if s.get("as_written") == "x/(1+abs(x))":
        return x / (1 + torch.abs(x))
    if s.get("as_written") == "x*clamp((x+3)/6,0,1)":
        return x * torch.clamp((x + 3) / 6, 0, 1)
    if "tanh(sqrt" in s.get("as_written", ""):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "tanh":
        return torch.tanh(x)
    if name == "sigmoid":
        return x.sigmoid()
    arguments = {k: v for k, v in s.items() if k not in ("op", "as_written", "eager_kernels")}
    return getattr(F, name)(x, **arguments)


def runs():
    if not DATA.exists():
        return []
    found = []
    for problem in json.loads(DATA.read_text())["problems"]:
        for n, (run, shape) in enumerate(zip(problem["runs"], problem["tensor_shape_at_run"])):
            run = [s for s in run if s["op"] != "dropout"]  # draws random numbers: no step of a chain
            found.append(
                pytest.param(run, shape, problem["eager_kernels"][n], id=f"{problem['level']}-{problem['id']}-{n}")
            )
    return found


def small(shape):
    """Smaller, with the same broadcasting."""
    return [min(size, 5) for size in shape]


def operand_shapes(run):
    return [
        small(s["shape"])
        for s in run
        if s.get("operand") in ("channel", "full", "per_row", "outer", "self") or s.get("role") == "param"
    ]


class Problem(nn.Module):
    """A run between layers, as the model has it: operands that are parameters are its own."""

    def __init__(self, run, shapes):
        super().__init__()
        self.run = run
        self.operands = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x):
        operands = list(self.operands)
        for s in self.run:
            x = step(s, x, operands)
        return x


ABSENT = "the KernelBench census (kernelbench.json) does not lie beside this source tree"


@pytest.mark.skipif(not DATA.exists(), reason=ABSENT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("run, shape, eager", runs())
def test_run_of_a_problem(run, shape, eager, dtype):
    shapes = operand_shapes(run)

    def function(x, *operands):
        operands = list(operands)
        for s in run:
            x = step(s, x, operands)
        return x

    # *operands has no signature to trace for before a call, which makes this a test of tracing in the call too.
    written_in_one = len(run) == 1 and eager == 1
    check(function, *tensors(small(shape), *shapes, dtype=dtype), kernels=0 if written_in_one else 1, scale=4)


@pytest.mark.skipif(not DATA.exists(), reason=ABSENT)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("run, shape, eager", runs())
def test_run_of_a_problem_in_a_model(run, shape, eager, training):
    model = Problem(run, operand_shapes(run)).train(training)
    fused = fused_act.fuse(model)
    (x,) = tensors(small(shape))
    assert fused_kernels(fused, x) == (0 if len(run) == 1 and eager == 1 else 1)
    assert_same_model(model, fused, x)


# ---------------------------------------------------------------------------------------------------------------------
# Functions

C = math.sqrt(2 / math.pi)
IDIOMS = {
    "silu": (lambda x: x * torch.sigmoid(x), "silu"),
    "silu-turned": (lambda x: x.sigmoid() * x, "silu"),
    "quick_gelu": (lambda x: x * torch.sigmoid(1.702 * x), "quick_gelu"),
    "hardswish-clamp": (lambda x: x * torch.clamp((x + 3) / 6, 0, 1), "chain(HardswishWritten)"),
    "hardswish-relu6": (lambda x: x * F.relu6(x + 3) / 6, "hardswish"),
    "gelu-tanh": (lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x**3))), "gelu_tanh"),
    "gelu-tanh-product": (lambda x: x * 0.5 * (torch.tanh(C * x * (1 + 0.044715 * x * x)) + 1), "gelu_tanh"),
    "gelu-erf": (lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), "gelu"),
    "softsign": (lambda x: x / (1 + abs(x)), "softsign"),
    "mish": (lambda x: torch.tanh(F.softplus(x)) * x, "mish"),
    "relu-hardswish": (lambda x: torch.relu(x) * torch.clamp((torch.relu(x) + 3) / 6, 0, 1), "relu_hardswish"),
    "square": (lambda x: torch.relu(x) ** 2, "relu_squared"),
}


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_becomes_the_operator(name, capsys):
    function, operator = IDIOMS[name]
    for dtype in DTYPES:
        check(function, *tensors((6, 50), dtype=dtype), kernels=1)
    (line,) = fused_act.explain(function).kernels
    assert line.split(": ", 1)[1].startswith(operator + " <-")
    assert operator in capsys.readouterr().out


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 0.7 * (1 + torch.tanh(C * (x + 0.044715 * x**3))),  # another factor
        lambda x: x * torch.sigmoid(1.5 * x),
        lambda x: x * torch.clamp((x + 3) / 6, 0, 2),
        lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3))),  # not sqrt(2 / pi) in float64
        lambda x: x / (2 + abs(x)),
        lambda x: x * F.relu6(x + 3) * 0.25,
    ],
)
def test_what_resembles_an_idiom_is_a_chain(function):
    check(function, *tensors((6, 50), dtype=torch.float64), kernels=1, scale=8)


# Written with comparisons, at whose kinks the branch that is taken is PyTorch's own.
MASKED = {
    "leaky relu": lambda x, y: torch.where(x > 0, x, 0.1 * x) + y,
    "elu": lambda x, y: torch.where(x >= 0, x, torch.exp(x) - 1) * y,
    "two tensors": lambda x, y: torch.where(x > y, x * 2, torch.tanh(y)),
    "the other order": lambda x, y: torch.where(0.5 > x, y, x) * x,
    "number first": lambda x, y: torch.where(x.abs() < 0.5, 0.25, x) * y,
    "method": lambda x, y: (x * 2).where(x <= y, y) * y,
    "masked_fill": lambda x, y: torch.exp(x).masked_fill(x.abs() <= 0.5, -1) + y,
    "masked_fill_": lambda x, y: (x * 2).masked_fill_(x < y, -1) + y,
    "factor": lambda x, y: (x > 0) * x * y,
    "and or not": lambda x, y: torch.where((x > -1) & (x < 1) | ~(y != 0), x, -x) * y,
    "logical": lambda x, y: torch.where(torch.logical_and(x.gt(0), y.le(0)), x, torch.logical_not(x == y) * y) + 1,
    "infinite": lambda x, y: torch.where(x > 0, x.log(), 1 / (x + 10)) * y,  # the branch not taken is NaN or infinite
    "clamp by a tensor": lambda x, y: torch.clamp(x * 2, min=y).relu() + torch.clamp_max(x, y),
}


@pytest.mark.parametrize("name", MASKED)
def test_comparisons(name, device):
    values = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 3.0], dtype=torch.float64)
    x, y = (t.contiguous() for t in torch.meshgrid(values, values + 0.125, indexing="ij"))
    for dtype in DTYPES:
        inputs = [t.to(device, dtype).requires_grad_() for t in (x, y)]
        function = MASKED[name]
        if name != "infinite":
            check(function, *inputs, kernels=1, scale=8)
        fused = fused_act.fuse(function)
        assert operators(fused, *inputs).names == ["fused_act.chain"]
        # Eager's derivative of a branch that is not taken may be 0 times infinity; the library has none.
        expected, actual = function(*inputs), fused(*inputs)
        close(actual, expected.detach().double().to(dtype), dtype, 8)
        grads = (torch.autograd.grad(r, inputs, torch.ones_like(r)) for r in (actual, expected))
        for got, want in zip(*grads):
            torch.testing.assert_close(got[~want.isnan()], want[~want.isnan()], rtol=0.05, atol=0.05)
            assert got.isfinite().all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x > 0,
        lambda x: (x * 2 > 0).to(x.dtype) * 3,
        lambda x: (x > 0) + (x < 1),  # of booleans: at most 1
        lambda x: (x > 0) * 2.5,
        lambda x: torch.where(x > 0, 1.0, 0.0) * 2,  # of the default dtype, whatever x has
        lambda x: (x * 2 + 1) * (x > 0).sum(),
        lambda x: torch.where((x > 0).any(), x * 2 + 1, x),
        lambda x: (x * 2).gt_(0),
        lambda x: torch.clamp(x, torch.zeros_like(x), torch.ones_like(x)),
    ],
)
def test_booleans_that_are_no_masks(function):
    x = torch.randn(5, 7, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(fused_act.fuse(function)(x), function(x), rtol=1e-14, atol=0)


def test_a_mask_is_used_outside_too():
    def function(x):
        mask = x > 0
        return torch.where(mask, x * 2, x - 1) * 3, mask

    x = torch.randn(5, 7)
    for a, b in zip(fused_act.fuse(function)(x), function(x)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("count", [1, 4])
def test_prelu(count, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(count), nn.Hardswish(), nn.Flatten(), nn.Linear(144, 4))
    model = model.append(nn.PReLU(count)).append(nn.Tanh()).to(device)
    fused = fused_act.fuse(model)
    x = torch.randn(2, 3, 8, 8, device=device)
    assert fused_kernels(fused, x) == 2
    assert_same_model(model, fused, x)
    weight = torch.linspace(-1, 1, count, device=device)
    function = fused_act.fuse(lambda x, w: F.prelu(x + 1, w) * 2)
    for shape in [(2, 4), (2, 4, 3), (2, 4, 3, 3)]:
        y = torch.randn(shape, device=device)
        torch.testing.assert_close(function(y, weight), F.prelu(y + 1, weight) * 2)
        assert operators(function, y, weight).fused == ["fused_act.chain"]


SMALL, WIDE = torch.tensor(0.3), torch.tensor(1 + 1e-12, dtype=torch.float64)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0, SMALL, torch.tensor(0.7)) * 2,  # of tensors that x does not promote
        lambda x: (x > 0) * SMALL * 2,
        lambda x: (x > 0) * SMALL + x,
        lambda x: torch.where(x > 0, SMALL, 0.0) * 2,
        lambda x: SMALL.masked_fill(x > 0, 1.0) * 2,
        lambda x: torch.where(WIDE > 1, x, 0.0) * 2,  # compared in float64
        lambda x: torch.where(WIDE == 1, x, 0.0) * 2,
        lambda x: x * (WIDE * 1e30 * 1e30 * 1e-60),  # beyond float32 on the way
        lambda x: torch.where(x > WIDE, x, x * SMALL) * 2,
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_eager_computes_in_another_dtype(function, dtype):
    x, fused = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=dtype), fused_act.fuse(function)
    for _ in range(2):
        actual, expected = fused(x), function(x)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected)


def test_what_is_only_compared_is_not_in_the_graph():
    for function in (
        lambda x, y: torch.where(x > 0, y, 0.0) * 2,
        lambda x, y: (x > 0) * y * 2,
        lambda x, y: y.masked_fill(x > 0, 0.5).tanh(),
    ):
        fused = fused_act.fuse(function)
        x, y = torch.randn(5, requires_grad=True), torch.randn(5)
        for _ in range(2):
            assert operators(fused, x, y).fused
            assert not fused(x, y).requires_grad
            (grad,) = torch.autograd.grad(fused(x, t := y.clone().requires_grad_()).sum(), t)
            torch.testing.assert_close(grad, torch.autograd.grad(function(x, t).sum(), t)[0])
            with pytest.raises(RuntimeError, match="not have been used"):
                torch.autograd.grad(fused(x, t).sum(), x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, m: (x * 1).masked_fill_(m > 0, 2.0) * 2,
        lambda x, m: (x * 1).add_(m) * 2,
        lambda x, m: (x * 1).clamp_(min=m) * 2,
    ],
)
def test_in_place_does_not_enlarge(function):
    fused, x, m = fused_act.fuse(function), torch.ones(3), torch.ones(2, 3)
    torch.testing.assert_close(fused(x, m[0]), function(x, m[0]))
    torch.testing.assert_close(fused(m, x), function(m, x))
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        fused(x, m)


def test_inference_and_nested_tensors():
    fused = fused_act.fuse(lambda x, b: torch.tanh(x + b) * 2)
    with torch.inference_mode():
        x = torch.randn(3, 4)
        assert operators(fused, x, torch.ones(4)).fused
    b = torch.ones(4, requires_grad=True)
    for _ in range(2):
        fused(x, b * 1).sum().backward()
    double = fused_act.fuse(lambda x: torch.relu(x) * 2)
    for _ in range(2):
        nested = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])
        assert torch.equal(double(nested)[1], torch.relu(nested[1]) * 2)


def test_prelu_refuses_what_eager_refuses():
    model = nn.Sequential(nn.Tanh(), nn.PReLU(3), nn.Hardswish())
    fused = fused_act.fuse(model)
    with pytest.raises(RuntimeError, match="Mismatch of parameter numbers"):
        fused(torch.ones(3))
    function = fused_act.fuse(lambda x, w: F.prelu(x, w) * 2)
    for weight in (torch.ones(1, 3), torch.ones(1, 1), torch.ones(4), torch.tensor(1.0, dtype=torch.float64)):
        with pytest.raises(RuntimeError):
            F.prelu(torch.ones(2, 3), weight)
        with pytest.raises(RuntimeError):
            function(torch.ones(2, 3), weight)


def test_prelu_under_autocast():
    function = fused_act.fuse(lambda x, w: F.prelu(x, w) * 2)
    x, w = torch.randn(2, 3), torch.rand(3)
    function(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert function(x, w).dtype == (F.prelu(x, w) * 2).dtype
    assert function(x, w).dtype == torch.float32


def test_second_derivative_of_a_clamp_by_a_tensor_at_a_tie():
    function = fused_act.fuse(lambda x, o: torch.clamp(x, min=o) ** 2)
    x, o = torch.ones(2, dtype=torch.float64).requires_grad_().unbind()
    hessian = torch.func.hessian(lambda x, o: function(x, o).sum(), argnums=(0, 1))(x.detach(), o.detach())
    assert [[h.item() for h in row] for row in hessian] == [[2, 0], [0, 0]]
    along = torch.tensor([0.5, 1.5], dtype=torch.float64).unbind()
    _, tangent = torch.func.jvp(function, (x.detach(), o.detach()), along)
    assert tangent.item() == 1.0


def test_a_hook_for_all_modules_sees_those_of_a_function():
    act, seen = nn.Hardswish(), []
    fused = fused_act.fuse(lambda x: act(x) * torch.sigmoid(x))
    x = torch.randn(4)
    fused(x)
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(m))
    try:
        fused(x)
    finally:
        handle.remove()
    assert seen == [act]
    assert operators(fused, x).fused


def test_explain_lists_what_no_step_computes():
    report = fused_act.explain(lambda x: torch.sin(x * 2 + 1) + torch.floor(x) * torch.addcmul(x, x, x))
    assert {line.split(": ")[1] for line in report.left} >= {"sin", "floor", "addcmul"}
    assert report.pointwise_before == 7 and report.pointwise_after == 5


def test_float64_hardswish_written_with_relu6(device):
    x = torch.linspace(-4, 4, 101, dtype=torch.float64, device=device)
    y = fused_act.fuse(lambda x: x * F.relu6(x + 3) / 6)(x)
    torch.testing.assert_close(y, x * F.relu6(x + 3) / 6, rtol=1e-15, atol=0)


def test_remembered_tensors_are_told_apart():
    """A call like an earlier one takes a short way; others must not."""
    fused = fused_act.fuse(lambda x, y: torch.exp(x * 2 + y))
    x, y = torch.randn(4, 6), torch.randn(6)
    wide = x.double()
    calls = [(x, y), (x, y[:1]), (x, wide), (x[0], x), (wide, wide), (x.to(torch.int32), y), (x.t()[:4, :4], y[:4])]
    for a, b in calls * 3:
        expected = torch.exp(a * 2 + b)
        actual = fused(a, b)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected)
    for n in range(20):  # more shapes than are remembered
        torch.testing.assert_close(fused(x[:, : n % 7], y[: n % 7]), torch.exp(x[:, : n % 7] * 2 + y[: n % 7]))
    with pytest.raises(TypeError):
        fused(x)
    with pytest.raises(TypeError):
        fused(x, y, y)
    torch.testing.assert_close(fused(x, y=y), torch.exp(x * 2 + y))


def test_a_remembered_call_is_seen_by_modes_and_transforms():
    fused = fused_act.fuse(lambda x: torch.tanh(x * 2) + 1)
    x = torch.randn(3, 5)
    y = fused(x)
    assert torch.equal(fused(x), y)
    assert operators(fused, x).fused == ["fused_act.chain"]
    torch.testing.assert_close(torch.func.vmap(fused)(x), y)
    torch.testing.assert_close(torch.func.grad(lambda t: fused(t).sum())(x), 2 - 2 * (y - 1) ** 2)
    torch.testing.assert_close(torch.compile(fused, fullgraph=True, backend="aot_eager")(x), y)
    assert fused(x.to("meta")).is_meta


def test_is_grads_batched(device):
    x, b = torch.randn(3, 4, device=device, requires_grad=True), torch.randn(4, device=device, requires_grad=True)
    fused = fused_act.fuse(lambda x, b: torch.tanh(x + b) * b)
    go = torch.randn(5, 3, 4, device=device)
    batched = torch.autograd.grad(fused(x, b), (x, b), go, is_grads_batched=True)
    single = [torch.autograd.grad(fused(x, b), (x, b), g) for g in go]
    for got, want in zip(batched, zip(*single)):
        torch.testing.assert_close(got, torch.stack(want))

    def function(x):
        return fused(x, b.detach()).sum()

    hessians = [torch.autograd.functional.hessian(function, x.detach(), vectorize=v) for v in (True, False)]
    torch.testing.assert_close(*hessians)
    jacobians = [
        torch.autograd.functional.jacobian(fused, (x.detach(), b.detach()), vectorize=v) for v in (True, False)
    ]
    for got, want in zip(*jacobians):
        torch.testing.assert_close(got, want)


BINARY = {
    "add": lambda x, y: torch.relu(x + y),
    "sub": lambda x, y: torch.relu(y - x),
    "mul": lambda x, y: torch.relu(x * y) * 2,
    "div": lambda x, y: x.tanh() / (y * y + 1),
    "rdiv": lambda x, y: 2 / (x.abs() + y.abs() + 1),
    "rsub": lambda x, y: 1 - torch.rsub(x, y),
    "maximum": lambda x, y: torch.maximum(x, y).exp(),
    "min": lambda x, y: torch.min(x, y) * 3,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3).relu(),
    "residual": lambda x, y: x + torch.tanh(x * y),
    "twice": lambda x, y: (x.relu() + y) * (x.sigmoid() - y),
    "deep": lambda x, y: (x.tanh() * y.tanh() + x.sigmoid() * y.sigmoid()) * (x.relu() - y.relu()),
    "both sides": lambda x, y: (x * 2).tanh() - (y * 3).sigmoid(),
    "own sum": lambda x, y: (x + x) * y,
    "pow": lambda x, y: x**3 + y**2,
    "unary": lambda x, y: (-x).abs().add(1).log().sqrt().add(y.abs()).add(1).rsqrt(),
    "clamps": lambda x, y: torch.clamp(x, min=-0.3).clamp_max(0.9) * y.clip(-1, 1),
    "methods": lambda x, y: x.add(y).mul(2).sub(0.25).div(3).neg(),
}


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 1), (1,), ()], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_two_tensors(name, shape):
    for dtype in DTYPES:
        check(BINARY[name], *tensors((3, 4, 5), shape, dtype=dtype), kernels=1, scale=8)


def test_the_larger_tensor_is_the_input():
    check(lambda x, y: F.gelu(x) + y, *tensors((6, 1), (6, 7)), kernels=1)


def test_an_outer_sum_is_left():
    check(lambda x, y: (x + y).relu(), *tensors((6, 1), (1, 7)), kernels=0)


class WithDecoratedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    @fused_act.fuse
    def forward(self, x, shift=1.0):
        return torch.relu(self.linear(x)) * 2 + shift


def test_decorated_forward():
    """As any other forward: it runs, compiles, is explained, fused again, copied and pickled."""
    model, x = WithDecoratedForward(), torch.randn(3, 6)
    want = torch.relu(model.linear(x)) * 2 + 0.5
    again = fused_act.fuse(nn.Sequential(model))
    for call in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(call(x, 0.5), want)
    torch.testing.assert_close(again(x), want + 0.5)
    assert str(inspect.signature(WithDecoratedForward.forward)) == "(self, x, shift=1.0)"
    assert len(fused_act.explain(model).kernels) == 1 and len(fused_act.explain(model, x, 0.5).kernels) == 1
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x, 0.5), want)


def test_a_class_is_no_model():
    for function in (fused_act.fuse, fused_act.explain):
        with pytest.raises(TypeError, match="but got the class ReLU"):
            function(nn.ReLU)


def test_explain_of_what_would_be_folded():
    """Also of a model that was fused without that."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.SiLU()).eval()
    for given in (model, fused_act.fuse(model)):
        (folded,), (plain,) = (fused_act.explain(given, fold_batchnorm=fold).kernels for fold in (True, False))
        assert "MulOperand" in folded and "MulOperand" not in plain


def test_decorator_keeps_the_signature_and_python_arguments_are_told_apart():
    @fused_act.fuse
    def scaled(x, factor=2.0, *, shift: bool = False):
        """Scales."""
        return torch.relu(x) * factor + (1 if shift else 0)

    (x,) = tensors((4,))
    assert scaled.__name__ == "scaled" and scaled.__doc__ == "Scales."
    for factor in (2.0, 3.0, 2):
        for shift in (False, True):
            expected = torch.relu(x) * factor + int(shift)
            assert torch.equal(scaled(x, factor, shift=shift), expected)
    assert torch.equal(scaled(x=x), torch.relu(x) * 2)


def test_long_chains_are_split():
    def function(x):
        for k in range(30):
            x = torch.tanh(x + k % 3)
        return x

    check(function, *tensors((10,), dtype=torch.float64), kernels=3, scale=8)


def test_many_operands_are_split():
    def function(x, *others):
        for o in others:
            x = torch.tanh(x * o)
        return x

    check(function, *tensors((3, 4), *[(4,)] * 7, dtype=torch.float64), kernels=2, scale=8)


def test_value_used_outside_ends_a_run():
    def function(x):
        y = torch.relu(x) * 2
        return y.tanh() + 1, y.sum()

    x = torch.randn(5)
    fused = fused_act.fuse(function)
    assert fused_kernels(fused, x) == 2
    for a, b in zip(fused(x), function(x)):
        torch.testing.assert_close(a, b)


def test_detached_value_carries_no_gradient():
    def function(x):
        return torch.tanh(x * 0.5 + x.clone().detach()) * x.relu().detach()

    (x,) = tensors((7,))
    fused = fused_act.fuse(function)
    actual, expected = fused(x), function(x)
    torch.testing.assert_close(actual, expected)
    (a,), (b,) = (torch.autograd.grad(y.sum(), x) for y in (actual, expected))
    torch.testing.assert_close(a, b)
    assert fused_kernels(fused, x) == 1


@pytest.mark.parametrize(
    "x, y",
    [
        (torch.randn(4, dtype=torch.bfloat16), torch.randn(4)),
        (torch.randn(4), torch.randn(4, dtype=torch.float64)),
        (torch.arange(4), torch.randn(4)),
        (torch.arange(4), torch.arange(4)),
        (torch.randn(4, dtype=torch.complex64), torch.randn(4)),
        (torch.randn(4), torch.tensor(3)),
        (torch.randn((), dtype=torch.bfloat16), torch.randn(())),
        (torch.randn(4).to_sparse(), torch.randn(4).to_sparse()),
    ],
)
def test_where_eager_promotes_its_own_operations_run(x, y):
    def function(x, y):
        return (x + y) * 2

    fused = fused_act.fuse(function)
    assert fused_kernels(fused, x, y) == 0
    actual, expected = fused(x, y), function(x, y)
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.to_dense(), expected.to_dense())


def test_zero_dimensional_operand_of_another_dtype_does_not_promote():
    x, y = torch.randn(4, dtype=torch.bfloat16), torch.tensor(0.3)
    fused = fused_act.fuse(lambda x, y: (x + y) * 2)
    assert fused_kernels(fused, x, y) == 1 and fused(x, y).dtype == torch.bfloat16


def test_the_device_of_a_result_that_is_fused_away():
    """As models write a bound: the tensor of it is made on the device of the value before."""

    def bounded(x):
        x = x + 0.5
        x = torch.min(x, torch.tensor(0.0, device=x.device))
        return nn.functional.gelu(x) * 2

    (x,) = tensors((3, 5))
    check(bounded, x, kernels=1, scale=4)


@pytest.mark.parametrize("exponent", [9, 12, 64, -3, -4, 2.5])
def test_powers_that_no_step_has_stay(exponent):
    (x,) = tensors((3, 5))
    function = lambda x: (x.abs() + 1) ** exponent * 2 + 1  # noqa: E731
    close(fused_act.fuse(function)(x), function(x.double()), torch.float32, scale=64)


def test_tracing_leaves_other_threads_alone():
    seen, stop = set(), threading.Event()

    def work():
        while not stop.is_set():
            try:
                seen.add(type(torch.zeros(3) + 1))
                torch.is_grad_enabled()
            except Exception as error:
                seen.add(repr(error))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            fused_act.fuse(lambda x, b: torch.tanh(torch.tanh(x * 2 + b) * 2 + b))(torch.ones(3), torch.ones(3))
    finally:
        stop.set()
        thread.join()
    assert seen == {torch.Tensor}


def test_an_instance_with_a_forward_of_its_own_is_called():
    x = torch.randn(2, 3, 6, 6)
    for place in (0, 1):
        model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Hardtanh())
        fused = fused_act.fuse(model)
        fused(x)
        fused[place].forward = lambda z: z * 0 + 5
        assert torch.equal(fused(x), fused[2](fused[1](fused[0](x))))
        again = fused_act.fuse(fused)
        assert torch.equal(again(x), fused(x))


def test_children_that_change_after_fusing_are_seen():
    x = torch.randn(2, 3, 8, 8)

    def eager(model, x):
        for child in model:
            x = eager(child, x) if isinstance(child, nn.Sequential) else child(x)
        return x

    fused = fused_act.fuse(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.LeakyReLU(0.1), nn.Tanh()), nn.Sigmoid()))
    fused(x)
    fused[1][0].negative_slope = 0.5
    torch.testing.assert_close(fused(x), eager(fused, x))
    fused[1][0] = nn.LeakyReLU(0.7)
    torch.testing.assert_close(fused(x), eager(fused, x))
    fused.append(nn.ELU())
    torch.testing.assert_close(fused(x), eager(fused, x))


def test_more_dimensions_than_the_kernels_walk():
    x = torch.randn([2] * 17).permute(*reversed(range(17)))
    other = torch.randn([2 if d % 2 else 1 for d in range(17)])
    function = lambda a, b: (a + b).relu() * 2  # noqa: E731
    assert torch.equal(fused_act.fuse(function)(x, other), function(x, other))


def test_explain_wants_something_to_call():
    with pytest.raises(TypeError, match="fused_act.explain: expected a function or an nn.Module, but got a int"):
        fused_act.explain(3)


def test_zeros_of_either_sign_are_two_arguments():
    fused = fused_act.fuse(lambda x, s: x / s * 1 + 0)
    x = torch.ones(2)
    assert fused(x, 0.0)[0] == torch.inf and fused(x, -0.0)[0] == -torch.inf


# In place ------------------------------------------------------------------------------------------------------------


def reads_before_relu_(a):
    t = a * 1
    u = t * 2
    t.relu_()
    return u + 1


def crelu(a):
    n = torch.neg(t := a * 1)
    p = F.relu(t, inplace=True)
    return torch.cat([p, n.tanh()], 1)


def gate_and_relu_(x):
    h = x @ x.mT
    g = torch.sigmoid(h) * 2
    F.relu_(h)
    return g.tanh() + h.sum()


@pytest.mark.parametrize("function", [reads_before_relu_, crelu, gate_and_relu_])
def test_what_was_read_before_an_overwrite_is_the_value_before(function):
    (x,) = tensors((4, 4))
    check(function, x, scale=8)


def test_random_functions_that_write_in_place():
    draw = random.Random(3)
    unary = ["{} * 2", "{} + 1", "torch.tanh({})", "torch.sigmoid({})", "torch.neg({})"]
    writes = ["{}.relu_()", "{}.mul_(0.5)", "{}.clamp_(-1, 1)", "F.leaky_relu_({}, 0.2)", "{}.add_(1)"]
    for _ in range(150):
        lines, names = ["def function(a, b):", "    v0 = a * 1"], ["v0", "b"]
        for k in range(1, draw.randint(3, 9)):
            if draw.random() < 0.4:
                lines.append("    " + draw.choice(writes).format(draw.choice(names[:1] + names[2:])))
            else:
                value = draw.choice([*unary, "{} + " + draw.choice(names), "{} * " + draw.choice(names)])
                lines.append(f"    v{k} = " + value.format(draw.choice(names)))
                names.append(f"v{k}")
        lines.append("    return " + " + ".join(draw.sample(names, min(3, len(names)))))
        scope = {"torch": torch, "F": F}
        exec("\n".join(lines), scope)
        a, b = (t.detach().double() for t in tensors((3, 4), (3, 4), seed=draw.randrange(99)))
        want = scope["function"](a.clone(), b.clone())
        got = fused_act.fuse(scope["function"])(a.clone(), b.clone())
        torch.testing.assert_close(got, want, msg="\n".join(lines))


def test_in_place_on_memory_of_its_own_is_fused():
    def function(x, w):
        y = F.linear(x, w)
        y += 1
        y.mul_(2)
        return F.leaky_relu_(y, 0.1)

    x, w = tensors((3, 4), (5, 4))
    check(function, x, w, kernels=1, scale=4)


def test_in_place_on_an_argument_still_overwrites_it():
    def function(x):
        return F.relu_(x) * 2 + 1

    fused = fused_act.fuse(function)
    x = torch.tensor([-1.0, 2.0])
    assert fused(x).tolist() == [1.0, 5.0] and x.tolist() == [0.0, 2.0]


def test_in_place_seen_through_a_view_is_kept():
    def function(x, w):
        y = F.linear(x, w)
        view = y.view(-1)
        y.add_(1)
        return view * 2 + y.reshape(-1)

    x, w = tensors((3, 4), (5, 4))
    assert torch.equal(fused_act.fuse(function)(x, w), function(x, w))


def test_no_run_is_moved_over_a_write():
    def function(x, w):
        y = F.linear(x, w)
        a = y * 2
        y.view(-1).add_(1)  # of the same memory
        return a + 1, y

    x, w = torch.randn(3, 4), torch.randn(5, 4)
    for a, b in zip(fused_act.fuse(function)(x, w), function(x, w)):
        assert torch.equal(a, b)


def test_augmented_assignment_is_seen_by_other_names():
    def function(x, w):
        y = F.linear(x, w)
        z = y
        y += 1
        return z * 2 + y

    x, w = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.equal(fused_act.fuse(function)(x, w), function(x, w))


def test_power_with_a_float_exponent():
    check(lambda x: torch.pow(x, 3.0) * 2, *tensors((5,), dtype=torch.float64), kernels=1)


# What cannot be traced -----------------------------------------------------------------------------------------------


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 + 1

    @staticmethod
    def backward(ctx, grad):
        return -grad


def branch(x):
    return x * 2 + 1 if x.sum() > 0 else x - 1


def under_no_grad(x):
    with torch.no_grad():
        y = torch.relu(x) * 2
    return y + x


def asks_grad_mode(x):
    return torch.relu(x) * 2 if torch.is_grad_enabled() else x


def asks_type(x):
    y = torch.relu(x).chunk(1)[0]
    return y * 2 + 1 if isinstance(y, torch.Tensor) else y


def with_custom_backward(x):
    return Reverse.apply(x) * 2 + 1


@pytest.mark.parametrize("function", [branch, under_no_grad, asks_grad_mode, with_custom_backward, asks_type])
def test_untraceable_function_runs_as_it_did(function):
    fused = fused_act.fuse(function)
    (x,) = tensors((5,))
    for value in (x, -x):
        actual, expected = fused(value), function(value)
        assert torch.equal(actual, expected)
        (a,), (b,) = (torch.autograd.grad(y.sum(), x, retain_graph=True) for y in (actual, expected))
        assert torch.equal(a, b)
    assert fused_kernels(fused, x) == 0
    assert fused_act.explain(function).untraced


def test_random_numbers_are_drawn_in_each_call():
    fused = fused_act.fuse(lambda x: (x + torch.rand(3)).relu() * 2)
    x = torch.zeros(3)
    torch.manual_seed(0)
    first = [fused(x), fused(x)]
    torch.manual_seed(0)
    assert torch.equal(first[0], torch.rand(3).relu() * 2) and not torch.equal(first[0], first[1])


def test_shapes_are_those_of_the_call():
    fused = fused_act.fuse(lambda x: torch.relu(x) * (x.shape[-1] ** -0.5) + 1)
    for n in (4, 9):
        x = torch.randn(2, n)
        torch.testing.assert_close(fused(x), torch.relu(x) * n**-0.5 + 1)


def test_errors_name_fuse():
    with pytest.raises(TypeError, match="fused_act.fuse: expected a function or an nn.Module"):
        fused_act.fuse(3)


# ---------------------------------------------------------------------------------------------------------------------
# Modules


def values(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def assert_same_model(model, fused, *args, tolerance=2e-4):
    """Outputs and all gradients of two models with the same parameters."""
    results = []
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for m in (model, fused):
        m.load_state_dict(state)
        torch.manual_seed(0)
        own = [a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args]
        outputs = values(m(*own))
        parameters = [p for p in m.parameters() if p.requires_grad]
        total = sum((o.float() * torch.linspace(0.1, 1, o.numel(), device=o.device).view_as(o)).sum() for o in outputs)
        grads = torch.autograd.grad(total, [*own, *parameters], allow_unused=True)
        results.append(outputs + [g for g in grads])
    for a, b in zip(*results):
        assert (a is None) == (b is None)
        if a is not None:
            scale = max(1.0, a.abs().max().item())
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance * scale)


class Conv(nn.Module):
    def __init__(self, kind=nn.Conv2d, **options):
        super().__init__()
        self.conv = kind(3, 6, 3, **options)
        self.scale = nn.Parameter(torch.rand(6, *[1] * len(self.conv.kernel_size)))
        self.act = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.act(self.conv(x)) * self.scale)


CONVOLUTIONS = [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_bias_of_a_convolution_goes_into_the_run(kind):
    model = Conv(kind).eval()
    fused = fused_act.fuse(model)
    (x,) = tensors((2, 3, *[6] * len(model.conv.kernel_size)))
    seen = operators(fused, x)
    assert seen.fused == ["fused_act.chain"] and not any("add" in name for name in seen.names)
    for training in (False, True):
        assert_same_model(model.train(training), fused.train(training), x)
    assert_same_model(model.eval(), fused.eval(), x[0])  # without a batch


def test_padding_mode_of_a_convolution():
    model = Conv(padding=1, padding_mode="circular").eval()
    assert_same_model(model, fused_act.fuse(model), torch.randn(2, 3, 6, 6))


def test_copy_shares_parameters_and_leaves_the_model():
    model = Conv()
    before = type(model)
    fused = fused_act.fuse(model)
    assert type(model) is before and isinstance(fused, Conv) and type(fused).__name__ == "Conv"
    assert [id(p) for p in model.parameters()] == [id(p) for p in fused.parameters()]
    assert list(model.state_dict()) == list(fused.state_dict())
    fused.load_state_dict(model.state_dict(), strict=True)
    fused.eval()
    assert model.training and not fused.training
    assert fused_act.fuse(model, inplace=True) is model and isinstance(model, before)
    assert fused_kernels(model, torch.randn(2, 3, 6, 6)) == 1


def test_optimizer_made_before_trains_the_fused_model():
    model = Conv().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]
    fused_act.fuse(model)(torch.randn(2, 3, 6, 6)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded])
def test_copies_are_fused(copied):
    fused = fused_act.fuse(Conv().eval())
    other = copied(fused)
    x = torch.randn(2, 3, 6, 6)
    assert fused_kernels(other, x) == 1 and torch.equal(other(x), fused(x))
    with torch.no_grad():
        other.scale.zero_()
    assert not torch.equal(other(x), fused(x)) and isinstance(other, Conv)


@fused_act.fuse
def at_module_level(x):
    return torch.relu(x) * 2


def test_pickle_of_a_function():
    assert pickle.loads(pickle.dumps(fused_act.fuse(branch)))(torch.ones(2)).tolist() == [3, 3]
    assert copy.deepcopy(at_module_level) is at_module_level


def test_modes_are_those_of_the_call():
    class Model(nn.Module):
        def forward(self, x):
            x = F.dropout(torch.relu(x) * 2, 0.5, self.training)
            return x.tanh() * 3 if self.training else x.sigmoid() - 1

    model = Model()
    fused = fused_act.fuse(model)
    for training in (True, False, True):
        assert_same_model(model.train(training), fused.train(training), torch.randn(4, 5))


def test_a_hook_for_all_modules_is_called():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Hardswish())
    fused = fused_act.fuse(model)
    x, called = torch.randn(1, 3, 2, 2), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: called.append(type(m).__name__))
    try:
        fused(x)
    finally:
        handle.remove()
    assert called == ["Conv2d", "ReLU", "Hardswish", "Sequential"]
    assert fused_kernels(fused, x) == 1


def test_hooks_are_called():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Tanh())
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append("before"))
    fused = fused_act.fuse(model)
    x = torch.randn(1, 3, 2, 2)
    fused(x)
    assert calls == ["before"]
    handle = fused[2].register_forward_hook(lambda *_: calls.append("after"))
    fused(x)
    assert calls == ["before", "before", "after"]
    handle.remove()
    fused(x)
    assert calls == ["before", "before", "after", "before"]


def test_a_replaced_child_and_a_changed_attribute_are_seen():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.factor = nn.ReLU(), 2.0

        def forward(self, x):
            return self.act(x) * self.factor

    fused, x = fused_act.fuse(Model()), torch.randn(5)
    fused.act = nn.Hardtanh()
    assert torch.equal(fused(x), F.hardtanh(x) * 2)
    fused.factor = 3.0
    torch.testing.assert_close(fused(x), F.hardtanh(x) * 3)


def test_a_frozen_child_keeps_its_mode():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    model(torch.randn(4, 3, 5, 5))
    fused = fused_act.fuse(model, fold_batchnorm=True)
    for m in (model, fused):
        m.train()[1].eval()
    assert_same_model(model, fused, torch.randn(2, 3, 5, 5))


def test_the_type_of_an_argument_is_that_of_the_call():
    class Layer(nn.Module):
        def forward(self, x):
            if isinstance(x, torch.Tensor):
                x = [x]
            return torch.relu(torch.cat(x, 1)) * 2

    fused, x = fused_act.fuse(Layer()), torch.randn(2, 3)
    assert torch.equal(fused(x), torch.relu(x) * 2)
    assert torch.equal(fused([x, x]), torch.relu(torch.cat([x, x], 1)) * 2)


def test_an_alias_of_the_input_is_overwritten_as_before():
    class Model(nn.Module):
        def forward(self, x):
            identity = x
            x += 1
            return torch.tanh(x * 2) + identity

    x, y = torch.ones(3), torch.ones(3)
    assert torch.equal(fused_act.fuse(Model())(x), Model()(y)) and torch.equal(x, y)


def test_shared_modules_and_weights():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(3, 3, 1)
            self.b, self.act = self.a, nn.ReLU()

        def forward(self, x):
            return self.act(self.b(self.act(self.a(x)) * 2)) * 2

    model = Model()
    fused = fused_act.fuse(model)
    assert fused.a is fused.b and fused_kernels(fused, torch.randn(1, 3, 2, 2)) == 2
    assert_same_model(model, fused, torch.randn(1, 3, 2, 2))


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


def test_an_activation_written_as_a_module_joins_the_run():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Identity(), Swish(), nn.Hardtanh(-0.5, 0.5))
    fused, x = fused_act.fuse(model), torch.randn(1, 3, 2, 2)
    assert fused_kernels(fused, x) == 1
    assert_same_model(model, fused, x)


class DataDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Swish())

    def forward(self, x):
        return self.block(x) if x.sum() > 0 else self.block(-x) * 2


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        return torch.relu(x) * self.calls


def test_untraceable_module_gains_by_its_children():
    model = DataDependent()
    fused = fused_act.fuse(model)
    x = torch.ones(2, 4)
    assert fused_kernels(fused, x) == 1
    for value in (x, -x):
        assert_same_model(model, fused, value)
    assert any(line.startswith("DataDependent") for line in fused_act.explain(model).untraced)


def test_module_with_side_effects_is_left_alone():
    fused = fused_act.fuse(Counter())
    x = torch.ones(2)
    assert [fused(x)[0].item() for _ in range(3)] == [1, 2, 3]
    assert fused.seen == [1, 2, 3]


def test_optional_and_keyword_arguments():
    class Model(nn.Module):
        def forward(self, x, mask=None, *, scale=2.0):
            x = torch.relu(x) * scale
            return x if mask is None else x * mask + 1

    model = Model()
    fused = fused_act.fuse(model)
    x, mask = torch.randn(3), torch.randn(3)
    for args, kwargs in [((x,), {}), ((x, mask), {}), ((x,), {"mask": mask, "scale": 3.0}), ((), {"x": x})]:
        torch.testing.assert_close(fused(*args, **kwargs), model(*args, **kwargs))


def test_batchnorm_is_folded_on_request():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    model(torch.randn(4, 3, 5, 5))
    x = torch.randn(2, 3, 5, 5)
    plain, folded = fused_act.fuse(model), fused_act.fuse(model, fold_batchnorm=True)
    assert fused_kernels(plain.eval(), x) == 0 and fused_kernels(folded.eval(), x) == 1
    assert not any("batch_norm" in name for name in operators(folded, x).names)
    for training in (False, True, False):
        assert_same_model(model.train(training), folded.train(training), x)


def test_a_fused_model_is_folded_on_request():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            return F.silu(self.bn(self.conv(x))) * 2

    model = nn.Sequential(Block(), Block()).eval()
    fused, x = fused_act.fuse(model), torch.randn(2, 3, 5, 5)
    assert not any("scale_and_shift" in line for line in fused_act.explain(fused).kernels)
    folded = fused_act.fuse(fused, fold_batchnorm=True)
    assert not any("batch_norm" in name for name in operators(folded, x).names)
    assert any("batch_norm" in name for name in operators(fused, x).names), "the first one is as it was"
    assert_same_model(model, folded, x)
    kernels = fused_act.explain(folded).kernels
    assert kernels == fused_act.explain(model, fold_batchnorm=True).kernels
    assert len(kernels) == 2 and all("scale_and_shift" in line for line in kernels)
    assert fused_act.explain(fused_act.fuse(folded)).kernels == kernels, "it stays folded"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    fused = fused_act.fuse(Conv().eval())
    (x,) = tensors((2, 3, 6, 6))
    checkpoint(fused, x, use_reentrant=use_reentrant).sum().backward()
    (expected,) = torch.autograd.grad(fused(x).sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_autocast():
    model = Conv().eval()
    fused, x = fused_act.fuse(model), torch.randn(2, 3, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(x), fused(x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_compile():
    torch._dynamo.reset()
    fused, x = fused_act.fuse(Conv().eval()), torch.randn(2, 3, 6, 6)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), fused(x))
    function = fused_act.fuse(lambda x: torch.relu(x) * 2 + x)
    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    fused, x = fused_act.fuse(Conv().eval()), torch.randn(2, 3, 6, 6)
    program = torch.export.export(fused, (x,), strict=strict)
    assert any("fused_act" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), fused(x))


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "fully_shard"])
def test_data_parallel(process_group, wrap):
    """One process: the hooks, buckets and sharded parameters are those of many."""
    (x,) = tensors((2, 3, 6, 6))
    model = Conv().eval()
    fused = fused_act.fuse(copy.deepcopy(model))
    if wrap == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(fused, mesh=init_device_mesh("cpu", (1,)))
    else:
        wrapped = nn.parallel.DistributedDataParallel(fused)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in (wrapped, model)]
    for _ in range(3):
        for m, optimizer in zip((wrapped, model), optimizers):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
    assert len(operators(wrapped, x).fused) == 1
    for a, b in zip(wrapped.parameters(), model.parameters(), strict=True):
        a = a.full_tensor() if hasattr(a, "full_tensor") else a  # a forward leaves the outermost ones whole
        torch.testing.assert_close(a, b)


def test_inputs_keep_their_names():
    class Model(nn.Module):
        def forward(self, x, factor: float = 2.0, *, mask=None):
            return torch.relu(x) * factor if mask is None else x

    fused, x = fused_act.fuse(Model()), torch.randn(4, 3)
    assert [*inspect.signature(fused.forward).parameters] == ["x", "factor", "mask"]
    program = torch.export.export(fused, (x,), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2)}})
    assert torch.equal(program.module()(x[:2]), torch.relu(x[:2]) * 2)
    sequential = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Tanh())
    assert torch.equal(torch.fx.symbolic_trace(fused_act.fuse(sequential))(x), sequential(x))


def test_derivatives_and_transforms():
    fused = fused_act.fuse(lambda x, b: torch.relu(x) * torch.sigmoid(x) + b)
    x, b = tensors((3, 4), (4,), dtype=torch.float64)
    assert torch.autograd.gradcheck(fused, (x, b)) and torch.autograd.gradgradcheck(fused, (x, b))
    x, b = x.detach(), b.detach()
    torch.testing.assert_close(torch.vmap(fused, (0, None))(x, b), fused(x, b))
    torch.testing.assert_close(
        torch.func.grad(lambda t: fused(t, b).sum())(x),
        torch.func.jvp(lambda t: fused(t, b), (x,), (torch.ones_like(x),))[1],
    )


def test_a_model_that_cannot_be_copied_is_fused_in_place():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Tanh())
    model.lock = threading.Lock()
    with pytest.warns(UserWarning, match="fused_act.fuse: the model cannot be copied"):
        assert fused_act.fuse(model) is model
    assert fused_kernels(model, torch.randn(2, 3)) == 1


def test_explain_a_model(capsys):
    report = fused_act.explain(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Linear(4, 4), nn.GELU()))
    assert (report.pointwise_before, report.pointwise_after) == (3, 2)
    assert report.kernels[0].endswith(
        "<- add_bias, relu (2 kernels; training saves 1 bit an element; "
        "in float64 and below 16384 elements convolve, channel_bias)"
    )
    assert report.left == ("Sequential: gelu: one kernel already",)
    printed = capsys.readouterr().out
    assert "3 -> 2" in printed and "bytes per element" in printed and "one kernel already" in printed


# Architectures -------------------------------------------------------------------------------------------------------


class SqueezeExcite(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce, self.expand = nn.Conv2d(c, c // 2, 1), nn.Conv2d(c // 2, c, 1)

    def forward(self, x):
        return x * F.relu6(self.expand(F.relu(self.reduce(self.pool(x)), inplace=True)) + 3) / 6


class MobileBlock(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(c, 2 * c, 1, bias=False), nn.BatchNorm2d(2 * c), nn.Hardswish(inplace=True),
            nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c), Swish(), SqueezeExcite(2 * c),
            nn.Conv2d(2 * c, c, 1),
        )  # fmt: skip

    def forward(self, x):
        y = self.block(x)
        y += x
        return y


class ResidualBlock(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.inc = nn.Sequential(nn.Conv2d(8, c, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(c, c, 1), nn.SiLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(c, 2 * c, 3, padding=1), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.out = nn.Conv2d(2 * c, 8, 1)

    def forward(self, x):
        a = self.inc(x)
        b = torch.relu(self.up(self.down(a)))
        return torch.sigmoid(self.out(torch.cat([a, b], 1)))


class ConvNeXtBlock(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.dw, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c)
        self.up, self.down = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        self.gamma = nn.Parameter(torch.full((c,), 0.1))

    def forward(self, x):
        y = self.dw(x).permute(0, 2, 3, 1)
        y = self.gamma * self.down(F.gelu(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class ViTBlock(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c), nn.LayerNorm(c)
        self.qkv, self.proj = nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.mlp = nn.Sequential(nn.Linear(c, 2 * c), Swish(), nn.Dropout(0.1), nn.Linear(2 * c, c))
        self.g1, self.g2 = nn.Parameter(torch.ones(c)), nn.Parameter(torch.ones(c))

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        a = (q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5)).softmax(-1)
        x = x + self.g1 * self.proj(a @ v)
        return x + self.g2 * self.mlp(self.norm2(x))


ARCHITECTURES = {MobileBlock: 4, ResidualBlock: 1, UNet: 5, ConvNeXtBlock: 0, ViTBlock: 3}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ARCHITECTURES, ids=lambda k: k.__name__)
def test_architecture(kind, training, device):
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind()).train(training).to(device)
    fused = fused_act.fuse(model)
    x = torch.randn(2, 8, 8, 8, device=device)
    if kind is ViTBlock:
        model, fused = model[0], fused[0]
    else:
        assert fused_kernels(fused, x) == 2 * ARCHITECTURES[kind]
    assert_same_model(model, fused, x, tolerance=1e-3)


def torchvision_models():
    """Names and models, small where the class has the arguments for it."""
    try:
        from torchvision import models
    except Exception as error:
        return (pytest.param(None, marks=pytest.mark.skip(reason=f"no torchvision: {type(error).__name__}")),)
    small = {"growth_rate": 4, "block_config": (2, 2), "num_init_features": 8}
    slow = {"efficientnet_b0", "regnet_y_400mf", "vgg", "googlenet"}
    return [
        pytest.param(make, id=name, marks=[pytest.mark.slow] if name in slow else [])
        for name, make in {
            "resnet18": models.resnet18,
            "mobilenet_v3_small": models.mobilenet_v3_small,
            "efficientnet_b0": models.efficientnet_b0,
            "regnet_y_400mf": models.regnet_y_400mf,
            "squeezenet1_1": models.squeezenet1_1,
            "shufflenet_v2_x0_5": models.shufflenet_v2_x0_5,
            "densenet": lambda: models.DenseNet(**small),
            "vgg": lambda: models.VGG(models.vgg.make_layers([8, "M", 16, "M", 512, "M"]), init_weights=False),
            "googlenet": lambda: models.googlenet(init_weights=False, aux_logits=False),
            "vit": lambda: models.VisionTransformer(64, 16, 2, 2, 32, 64),
            "swin": lambda: models.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4]),
            "convnext": lambda: models.ConvNeXt([models.convnext.CNBlockConfig(16, None, 2)]),
        }.items()
    ]


@pytest.mark.parametrize("make", torchvision_models())
def test_torchvision(make, device):
    torch.manual_seed(0)
    model = make().to(device)
    fused = fused_act.fuse(model)
    x = torch.randn(2, 3, 64, 64, device=device)
    for training in (False, True):
        for m in (model, fused):
            m.train(training)
            for layer in m.modules():  # in training, one of few values enlarges any rounding without limit
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.eval()
        with torch.backends.cudnn.flags(allow_tf32=False):
            assert_same_model(model, fused, x, tolerance=1e-3)
    report = fused_act.explain(model.eval())
    assert report.pointwise_after <= report.pointwise_before
    with torch.no_grad():
        assert len(report.kernels) == 0 or fused_kernels(fused.eval(), x) > 0
