"""``python -m fused_act demo``: the operators at work, checked and timed against eager PyTorch.

Two parts:

1. The five seed models (a convolution with seeded weights, then a chain of pointwise operations; one of them is a
   chain alone) run with eager operators and with the fused one: values, gradients, time, peak memory.
2. A small convolutional net learns the handwritten digits that scikit-learn ships, once with eager and once with
   fused operators, from the same initial weights and in the same data order. The plot holds both curves.

Needs the extras: ``pip install fused_act[demo]``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from . import functional as fused
from . import nn as fused_nn

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
HALF = (torch.bfloat16, torch.float16)

# The scalars of the seed models.
DIVISOR, SLOPE, VALUE, SCALE = 2.0, 0.01, 0.5, 2.0
BATCH = 64  # digits per training step

Chain = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class SeedModel:
    """A chain in both spellings, and the convolution before it (``channels`` in and out, kernel 3) or none."""

    operator: str
    channels: tuple[int, int] | None
    eager: Chain
    fused: Chain
    has_bias: bool = False

    def input_shape(self, batch: int) -> tuple[int, ...]:
        return (batch, 393216) if self.channels is None else (batch, self.channels[0], 128, 128)

    def output_numel(self, batch: int) -> int:
        return batch * 393216 if self.channels is None else batch * self.channels[1] * 126 * 126

    def full_batch(self) -> int:
        return 4096 if self.channels is None else 128

    def cpu_batch(self, dtype: torch.dtype, quick: bool) -> int:
        """Chosen for two cores and no fast half-precision convolution: about ten seconds a model at most."""
        if self.channels is None:
            return 8 if quick else 32
        return 1 if quick or dtype in HALF else 2 if dtype == torch.float64 else 4


def _relu_hardswish(x: torch.Tensor) -> torch.Tensor:
    r = torch.relu(x)
    return r * torch.clamp((r + 3) / 6, 0, 1)


# Written as the seed models write them. The bias is always passed and used only where there is one.
SEED_MODELS = (
    SeedModel(
        "relu_hardswish",
        (8, 64),
        eager=lambda x, bias: _relu_hardswish(x),
        fused=lambda x, bias: fused.relu_hardswish(x),
    ),
    SeedModel(
        "hardsigmoid",
        None,
        eager=lambda x, bias: F.hardsigmoid(x),
        fused=lambda x, bias: fused.hardsigmoid(x),
    ),
    SeedModel(
        "relu_bias",
        (64, 128),
        eager=lambda x, bias: torch.relu(x) + bias,
        fused=lambda x, bias: fused.relu_bias(x, bias),
        has_bias=True,
    ),
    SeedModel(
        "div_leaky_relu",
        (8, 64),
        eager=lambda x, bias: F.leaky_relu(x / DIVISOR, SLOPE),
        fused=lambda x, bias: fused.div_leaky_relu(x, DIVISOR, SLOPE),
    ),
    SeedModel(
        "min_bias_scale",
        (64, 128),
        eager=lambda x, bias: (torch.min(x, torch.tensor(VALUE)) + bias) * SCALE,
        fused=lambda x, bias: fused.min_bias_scale(x, VALUE, bias, SCALE),
        has_bias=True,
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``python -m fused_act demo``."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if it works")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--output", type=Path, default=Path("fused_act_demo.png"), metavar="PNG", help="the plot")
    parser.add_argument("--seed", type=int, default=0, help="of weights, inputs and data order")
    parser.add_argument("--epochs", type=int, default=None, help="of the training (default 12, quick: 6)")
    parser.add_argument("--quick", action="store_true", help="small batches, short measurements, few epochs")


def run(args: argparse.Namespace) -> int:
    """Runs the demo. Returns 0 if every check passed, 1 if one failed, 2 if it could not run."""
    try:
        import matplotlib  # noqa: F401  (checked now, so that nothing fails after a minute of work)
        import sklearn  # noqa: F401
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError as error:
        print(f"The demo needs {error.name}, which is not installed: pip install 'fused_act[demo]'")
        return 2

    console = Console(highlight=False)
    epochs = args.epochs if args.epochs is not None else (6 if args.quick else 12)
    try:
        if epochs < 1:
            raise ValueError(f"--epochs must be at least 1, not {epochs}")
        if args.output.suffix.lower() != ".png":
            raise ValueError(f"--output must end in .png, not {str(args.output)!r}")
        args.output.parent.mkdir(parents=True, exist_ok=True)
        device, remark = pick_device(args.device)
    except (OSError, ValueError, RuntimeError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    dtype = DTYPES[args.dtype]
    console.print(f"[bold]fused_act demo[/bold]: {args.dtype} on {device_name(device)}, torch {torch.__version__}")
    if remark:
        console.print(remark)

    columns = (TextColumn("{task.description:42}"), BarColumn(bar_width=22), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        results = run_seed_models(device, dtype, args.seed, args.quick, progress)
        training = train_digits(device, dtype, args.seed, epochs, progress)

    print_results(console, results, device, dtype)
    plot(training, args.output, f"{args.dtype} on {device_name(device)}, torch {torch.__version__}")
    print_training(console, training, args.output)

    failures = [f"{result.name}: {text}" for result in results for text in result.failures] + training.failures
    for text in failures:
        console.print(f"FAILED  {text}", style="bold red", markup=False)
    if not failures:
        console.print("All checks passed.", style="bold green")
    return 1 if failures else 0


def pick_device(choice: str) -> tuple[torch.device, str]:
    """The device, and a remark where ``auto`` passes over a GPU that PyTorch sees."""
    built_with_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("fused_act::relu_hardswish", "CUDA")
    if choice == "cpu":
        return torch.device("cpu"), ""
    if torch.cuda.is_available() and built_with_cuda:
        return torch.device("cuda", torch.cuda.current_device()), ""
    if torch.cuda.is_available():
        reason = "this fused_act was built without CUDA"
    else:
        reason = "PyTorch finds no usable CUDA device"
    if choice == "cuda":
        raise RuntimeError(f"--device cuda: {reason}")
    return torch.device("cpu"), f"Running on the CPU: {reason}."


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"


# ---- Part 1: the seed models -----------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """``chain(conv(x), bias)``. The eager and the fused model share one convolution and one bias."""

    def __init__(self, conv: torch.nn.Module, chain: Chain, bias: torch.nn.Parameter):
        super().__init__()
        self.conv, self.chain, self.bias = conv, chain, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(self.conv(x), self.bias)


@dataclass
class Pair:
    """A figure for the eager and the fused spelling: milliseconds or bytes."""

    eager: float
    fused: float


STEPS = ("values", "gradients", "time and memory")


@dataclass
class Result:
    name: str
    batch: int
    full_batch: int
    doing: str = ""
    failures: list[str] = field(default_factory=list)
    values: str = ""
    chain_gradient: str = ""
    gradients: dict[str, float] = field(default_factory=dict)  # relative difference to eager
    # Keys: ("model" or "chain alone", "forward" or "both" or "memory").
    figures: dict[tuple[str, str], Pair] = field(default_factory=dict)


def run_seed_models(
    device: torch.device, dtype: torch.dtype, seed: int, quick: bool, progress: Progress
) -> list[Result]:
    task = progress.add_task("seed models", total=3 * len(SEED_MODELS))
    results = []
    for index, spec in enumerate(SEED_MODELS):
        torch.manual_seed(seed + index)
        for result in run_seed_model(spec, device, dtype, quick):  # once before each step, the last time when done
            progress.update(task, description=f"{spec.operator}: {result.doing}")
            if result.doing != STEPS[0]:
                progress.advance(task)
        results.append(result)
    progress.update(task, description="seed models")
    return results


def run_seed_model(spec: SeedModel, device: torch.device, dtype: torch.dtype, quick: bool) -> Iterator[Result]:
    """Checks and times one model. Yields the result at the start of each of ``STEPS`` and at the end."""
    result = Result(spec.operator, choose_batch(spec, device, dtype, quick), spec.full_batch())
    conv: torch.nn.Module = torch.nn.Identity() if spec.channels is None else torch.nn.Conv2d(*spec.channels, 3)
    bias = torch.nn.Parameter(torch.randn(spec.channels[1], 1, 1) if spec.channels else torch.zeros(()))
    eager_model = Model(conv, spec.eager, bias).to(device, dtype)
    fused_model = Model(conv, spec.fused, bias).to(device, dtype)
    x = torch.randn(spec.input_shape(result.batch), device=device, dtype=dtype, requires_grad=True)
    inputs = {"input": x} | {f"conv {name}": parameter for name, parameter in conv.named_parameters()}
    if spec.has_bias:
        inputs["bias"] = bias

    # TF32 and a free choice of algorithm would make two runs of the *convolution* differ.
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        result.doing = STEPS[0]
        yield result
        z = conv(x).detach()
        grad_output = torch.randn_like(z)
        check_values(spec, result, z, bias)
        result.doing = STEPS[1]
        yield result
        check_chain_gradient(spec, result, z, grad_output, bias)
        check_model_gradients(result, eager_model, fused_model, x, grad_output, inputs)

    result.doing = STEPS[2]
    yield result
    seconds = 0.3 if quick else 1.0
    measure(result, "model", (eager_model, fused_model), x, list(inputs.values()), grad_output, seconds)
    if spec.channels is not None:
        z.requires_grad_()
        chains = (lambda t: spec.eager(t, bias)), (lambda t: spec.fused(t, bias))
        measure(result, "chain alone", chains, z, [z, bias] if spec.has_bias else [z], grad_output, seconds)
    result.doing = "done"
    yield result


def measure(
    result: Result,
    what: str,
    functions: tuple[Callable, Callable],
    x: torch.Tensor,
    wanted: list[torch.Tensor],
    grad_output: torch.Tensor,
    seconds: float,
) -> None:
    """Time of forward, time and peak memory of forward and backward; of eager and fused."""

    def forward(function: Callable) -> torch.Tensor:
        with torch.no_grad():
            return function(x)

    def both(function: Callable) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(function(x), wanted, grad_output)

    for key, run_once in (("forward", forward), ("both", both)):
        calls = [partial(run_once, function) for function in functions]
        result.figures[what, key] = Pair(*median_ms(calls, x.device, seconds))
    memory = [peak_memory(partial(both, function), x.device) for function in functions]
    result.figures[what, "memory"] = Pair(*memory)


def choose_batch(spec: SeedModel, device: torch.device, dtype: torch.dtype, quick: bool) -> int:
    """The full batch on a GPU whose free memory holds it, else halved until it fits; small on a CPU."""
    if device.type == "cpu":
        return spec.cpu_batch(dtype, quick)
    # Tensors of the output's size alive at once, at most: what eager keeps for backward, the checks, workspaces.
    tensors = 6 if spec.channels is None else 12
    batch = spec.full_batch() // (8 if quick else 1)
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    while tensors * spec.output_numel(batch) * dtype.itemsize > 0.85 * free:
        if batch == 1:
            raise RuntimeError(f"{spec.operator}: not even a batch of 1 fits in {free / 2**30:.1f} GiB of free memory")
        batch //= 2
    return batch


def chunks(*tensors: torch.Tensor, numel: int = 2**23) -> Iterator[tuple[torch.Tensor, ...]]:
    """Slices along the batch, small enough that float64 copies of them cost little memory."""
    step = max(1, numel // (tensors[0].numel() // tensors[0].shape[0]))
    yield from zip(*(tensor.split(step) for tensor in tensors), strict=True)


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Steps between representable numbers from a to b; 0 for -0.0 and 0.0 and for two NaN."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    lowest = torch.iinfo(integer).min

    def ordered(t: torch.Tensor) -> torch.Tensor:
        bits = t.contiguous().view(integer).to(torch.int64)
        return torch.where(bits < 0, lowest - bits, bits)

    distance = (ordered(a) - ordered(b)).abs()
    distance[a.isnan() & b.isnan()] = 0
    return distance


def check_values(spec: SeedModel, result: Result, z: torch.Tensor, bias: torch.Tensor) -> None:
    """The chain on one convolution output: bit-identical to eager in float32 and float64; in half precision at most
    1 ulp from the float64 value rounded once (eager itself rounds after each step and is further off)."""
    worst, eager_worst = 0, 0
    with torch.no_grad():
        output = spec.fused(z, bias)
        for part, out in chunks(z, output):
            eager = spec.eager(part, bias)
            if z.dtype in HALF:
                exact = spec.eager(part.double(), bias.double()).to(z.dtype)
                worst = max(worst, int(ulp_distance(out, exact).max()))
                eager_worst = max(eager_worst, int(ulp_distance(eager, exact).max()))
            else:
                worst = max(worst, int(ulp_distance(out, eager).max()))
    if z.dtype in HALF:
        result.values = f"{worst} ulp (eager {eager_worst})"
        if worst > 1:
            result.failures.append(f"values are {worst} ulp from the float64 value rounded once, allowed is 1")
    else:
        result.values = "bit-identical" if worst == 0 else f"{worst} ulp from eager"
        if worst > 0:
            result.failures.append(f"values differ from eager by up to {worst} ulp")


def check_chain_gradient(
    spec: SeedModel, result: Result, z: torch.Tensor, grad_output: torch.Tensor, bias: torch.Tensor
) -> None:
    """Gradients of the chain against float64 autograd: within 4 eps of the compute type * |go| * max(1, |f'|) before
    the one rounding. The bias gradient, a sum over some thousand to some million terms, gets 64 eps of their sum."""
    compute_eps = torch.finfo(torch.float64 if z.dtype == torch.float64 else torch.float32).eps
    # Half an ulp is at most eps / 2; numbers below the normal range are a fixed step apart.
    rounding = torch.finfo(z.dtype).eps / 2 if z.dtype in HALF else 0.0
    smallest = torch.finfo(z.dtype).smallest_normal * torch.finfo(z.dtype).eps

    leaf = z.detach().requires_grad_()
    wanted = [leaf, bias] if spec.has_bias else [leaf]
    grad_z, *grad_bias = torch.autograd.grad(spec.fused(leaf, bias), wanted, grad_output)

    bias64 = bias.detach().double().requires_grad_()
    bias_sum = torch.zeros_like(bias64)
    bias_magnitude = torch.zeros_like(bias64)
    worst = 0.0  # of |error| / |allowed|
    for part, go, got in chunks(z, grad_output, grad_z):
        part64, go64 = part.double().requires_grad_(), go.double()
        # One bias per element gives the derivative at each, of which only the sum is wanted in the end.
        expanded = bias64.detach().expand(part64.shape).requires_grad_()
        leaves = [part64, expanded] if spec.has_bias else [part64]
        slope, *bias_slope = torch.autograd.grad(spec.eager(part64, expanded), leaves, torch.ones_like(part64))
        exact = go64 * slope
        allowed = 4 * compute_eps * go64.abs() * slope.abs().clamp(min=1) + rounding * exact.abs() + smallest
        worst = max(worst, float(((got.double() - exact).abs() / allowed).nan_to_num(nan=math.inf).max()))
        if spec.has_bias:
            terms = go64 * bias_slope[0]
            bias_sum += terms.sum_to_size(bias64.shape)
            bias_magnitude += terms.abs().sum_to_size(bias64.shape)
    texts = [f"{worst:.2f}"]
    if worst > 1:
        result.failures.append(f"the chain's input gradient is off by {worst:.3g} times what is allowed")
    if spec.has_bias:
        allowed = 64 * compute_eps * bias_magnitude + rounding * bias_sum.abs() + smallest
        worst = float(((grad_bias[0].double() - bias_sum).abs() / allowed).nan_to_num(nan=math.inf).max())
        texts.append(f"{worst:.2f}")
        if worst > 1:
            result.failures.append(f"the bias gradient is off by {worst:.3g} times what is allowed")
    result.chain_gradient = " / ".join(texts)


def tolerance(dtype: torch.dtype) -> float:
    """Allowed relative difference of whole models to eager. In half precision it is eager's own roundings, one per
    step of the chain, that make the difference."""
    return torch.finfo(dtype).eps * (4 if dtype in HALF else 100)


def check_model_gradients(
    result: Result, eager: Model, fused_: Model, x: torch.Tensor, grad_output: torch.Tensor, inputs: dict
) -> None:
    wanted = list(inputs.values())
    expected = torch.autograd.grad(eager(x), wanted, grad_output)
    got = torch.autograd.grad(fused_(x), wanted, grad_output)
    for name, a, b in zip(inputs, got, expected, strict=True):
        parts = list(chunks(a, b))
        error = sum(float((p.double() - q.double()).square().sum()) for p, q in parts)
        norm = sum(float(q.double().square().sum()) for _, q in parts)
        result.gradients[name] = difference = math.sqrt(error / norm)
        if not difference <= tolerance(x.dtype):
            allowed = tolerance(x.dtype)
            result.failures.append(f"gradient of {name} differs from eager by {difference:.2e}, allowed {allowed:.2e}")


def median_ms(functions: list[Callable[[], object]], device: torch.device, seconds: float) -> list[float]:
    """Median milliseconds of each function, called in turns for about ``seconds`` in all. A first round warms up; it is
    also what the number of rounds is estimated from, so where one takes longer than ``seconds`` it stays at one."""
    for _ in range(2 if device.type == "cuda" else 1):
        synchronize(device)
        begin = time.perf_counter()
        for function in functions:
            function()
        synchronize(device)
    rounds = int(min(50, max(1, seconds / (time.perf_counter() - begin))))

    if device.type == "cpu":
        times: list[list[float]] = [[] for _ in functions]
        for _ in range(rounds):
            for function, taken in zip(functions, times, strict=True):
                begin = time.perf_counter()
                function()
                taken.append((time.perf_counter() - begin) * 1e3)
        return [statistics.median(taken) for taken in times]

    pairs = []
    for _ in range(rounds):
        for function in functions:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            pairs.append((start, end))
    synchronize(device)
    taken = [start.elapsed_time(end) for start, end in pairs]
    return [statistics.median(taken[index :: len(functions)]) for index in range(len(functions))]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(function: Callable[[], object], device: torch.device) -> float:
    """Bytes that ``function`` had allocated at its worst moment, on top of what was there before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    # The CPU allocator keeps no peak; the profiler's trace holds each allocation and release in order. On a machine
    # without a GPU the profiler's own log says at each start that it found none: not an error here.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as folder:
        trace = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(trace)
        with open(trace, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def print_results(console: Console, results: list[Result], device: torch.device, dtype: torch.dtype) -> None:
    reduced = [f"{r.name} {r.batch} instead of {r.full_batch}" for r in results if r.batch != r.full_batch]
    if reduced:
        why = "a CPU" if device.type == "cpu" else "--quick or this GPU's free memory"
        console.print(f"\nBatches are reduced for {why}: {', '.join(reduced)}.", style="yellow")

    names = ("input", "conv weight", "conv bias", "bias")
    headers = ("\nvalues", "chain's\ngradients", "\ninput", "conv\nweight", "conv\nbias", "\nbias")
    table = new_table("Correctness", "\nseed model", *headers)
    for r in results:
        gradients = (small(r.gradients[name]) if name in r.gradients else "-" for name in names)
        table.add_row(r.name, r.values, r.chain_gradient, *gradients, style="red" if r.failures else None)
    console.print(table)
    oracle = "the float64 value rounded once" if dtype in HALF else "eager"
    console.print(
        f"Values: the chain against {oracle}, on one convolution output. Chain's gradients: error against float64"
        " autograd as a share of what is allowed (of the input / of the bias), fails above 1. Then the gradients of"
        f" the whole model: relative difference to eager, allowed {tolerance(dtype):.0e}.",
        style="dim",
    )

    table = new_table(
        "Time (ms) and peak memory (MiB)",
        "\n\nseed model",
        *("\nforward\neager", "\n\nfused", "\n\nratio"),
        *("forward +\nbackward\neager", "\n\nfused", "\n\nratio"),
        *("\nmemory\neager", "\n\nfused"),
    )
    for r in results:
        for what in dict.fromkeys(key[0] for key in r.figures):
            cells = []
            for key in ("forward", "both"):
                pair = r.figures[what, key]
                cells += [number(pair.eager), number(pair.fused), f"{pair.eager / pair.fused:.2f}x"]
            memory = r.figures[what, "memory"]
            cells += [f"{memory.eager / 2**20:,.0f}", f"{memory.fused / 2**20:,.0f}"]
            table.add_row(r.name if what == "model" else f"  {what}", *cells)
    console.print(table)
    console.print(
        "Medians, eager and fused in turns; ratio: eager / fused. First line of a model: with its convolution."
        " Memory: allocated by forward and backward, without inputs and weights.",
        style="dim",
    )


def new_table(title: str, first: str, *others: str) -> Table:
    """A plain table, readable in 80 columns: text left in the first column, figures right in the others."""
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for header in others:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def small(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"


def number(milliseconds: float) -> str:
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"


# ---- Part 2: training on handwritten digits --------------------------------------------------------------------


class WrittenOut(torch.nn.Module):
    """An eager chain as a module, with a bias named and shaped as in the fused module, so that weights load."""

    def __init__(self, function: Chain, num_features: int | None = None):
        super().__init__()
        self.function = function
        self.bias = None if num_features is None else torch.nn.Parameter(torch.zeros(num_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, None if self.bias is None else self.bias.view(-1, 1, 1))


def digits_net(fused_operators: bool) -> torch.nn.Sequential:
    """A net for 8 x 8 images with all five operators in it, fused or written out."""
    if fused_operators:
        first = fused_nn.ReLUBias(8)
        second = fused_nn.ReLUHardswish()
        third = fused_nn.MinBiasScale(32, VALUE, SCALE)
        fourth = fused_nn.DivLeakyReLU(DIVISOR, SLOPE)
        fifth = fused_nn.Hardsigmoid()
    else:
        eager = {spec.operator: spec.eager for spec in SEED_MODELS}
        first = WrittenOut(eager["relu_bias"], 8)
        second = WrittenOut(eager["relu_hardswish"])
        third = WrittenOut(eager["min_bias_scale"], 32)
        fourth = WrittenOut(eager["div_leaky_relu"])
        fifth = WrittenOut(eager["hardsigmoid"])
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        first,
        torch.nn.Conv2d(8, 16, 3, padding=1),
        second,
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        third,
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 64),
        fourth,
        torch.nn.Linear(64, 32),
        fifth,
        torch.nn.Linear(32, 10),
    )


@dataclass
class Curve:
    losses: list[float]  # one per step
    accuracies: list[float]  # on the held-out digits, one per epoch
    seconds: float


@dataclass
class Training:
    eager: Curve
    fused: Curve
    steps_per_epoch: int
    held_out: int
    failures: list[str]


def train_digits(device: torch.device, dtype: torch.dtype, seed: int, epochs: int, progress: Progress) -> Training:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div_(16).unsqueeze(1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held_out = len(images) // 5
    # Half types train as they do in practice: float32 weights, autocast around the net. A fused operator then gets a
    # half-precision x and a float32 bias.
    weights = torch.float32 if dtype in HALF else dtype
    images, labels = images[order].to(device, weights), labels[order].to(device)
    data = images[held_out:], labels[held_out:], images[:held_out], labels[:held_out]

    torch.manual_seed(seed)
    nets = {name: digits_net(name == "fused").to(device, weights) for name in ("eager", "fused")}
    nets["fused"].load_state_dict(nets["eager"].state_dict())
    curves = {}
    task = progress.add_task("training", total=2 * epochs)
    for name, net in nets.items():
        progress.update(task, description=f"training on digits, {name}")
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            curves[name] = train(net, data, dtype, seed, epochs, lambda: progress.advance(task))
    progress.update(task, description="training on digits")

    eager, fused_ = curves["eager"], curves["fused"]
    failures = []
    first = abs(fused_.losses[0] / eager.losses[0] - 1)
    if not first <= tolerance(dtype):
        failures.append(f"training: the first loss differs from eager by {first:.2e}")
    if not all(math.isfinite(loss) for loss in eager.losses + fused_.losses):
        failures.append("training: a loss is not finite")
    # Rounding differences grow as training goes on, so the ends agree in quality, not in bits.
    if abs(fused_.accuracies[-1] - eager.accuracies[-1]) > (0.05 if dtype in HALF else 0.03):
        failures.append(f"training: accuracy {fused_.accuracies[-1]:.1%}, eager {eager.accuracies[-1]:.1%}")
    return Training(eager, fused_, math.ceil((len(images) - held_out) / BATCH), held_out, failures)


def train(
    net: torch.nn.Module,
    data: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    seed: int,
    epochs: int,
    advance: Callable[[], None],
) -> Curve:
    images, labels, test_images, test_labels = data
    device = images.device
    autocast = torch.autocast(device.type, dtype=dtype if dtype in HALF else None, enabled=dtype in HALF)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=dtype == torch.float16)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    # The rate falls to zero, so that the accuracy at the end does not depend on the last few steps.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    generator = torch.Generator().manual_seed(seed)  # the same data order for both nets
    losses, accuracies = [], []
    with autocast:  # the first call pays for library start-up, which is not what is timed
        net(images[:BATCH]).sum().backward()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(epochs):
        for batch in torch.randperm(len(images), generator=generator).to(device).split(BATCH):
            with autocast:
                loss = F.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        schedule.step()
        with torch.no_grad(), autocast:
            accuracies.append((net(test_images).argmax(1) == test_labels).double().mean())
        advance()
    synchronize(device)
    seconds = time.perf_counter() - begin
    return Curve(torch.stack(losses).tolist(), torch.stack(accuracies).tolist(), seconds)


def plot(training: Training, path: Path, subtitle: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(10, 4.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display, whatever backend the user has set
    figure.suptitle(f"Handwritten digits, eager and fused operators\n{subtitle}", fontsize=11)
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    # Eager wide and pale, fused thin and dark on top: where they agree one sees both.
    styles = {
        "eager": {"color": "#f5a623", "linewidth": 5, "alpha": 0.6},
        "fused": {"color": "#1f3a93", "linewidth": 1.3},
    }
    epochs = range(1, len(training.eager.accuracies) + 1)
    for name, curve in (("eager", training.eager), ("fused", training.fused)):
        steps = [(index + 1) / training.steps_per_epoch for index in range(len(curve.losses))]
        label = f"{name}, last epoch {statistics.mean(curve.losses[-training.steps_per_epoch :]):.4f}"
        loss_axes.plot(steps, curve.losses, label=label, **styles[name])
        label = f"{name}, final {curve.accuracies[-1]:.1%}"
        accuracy_axes.plot(epochs, curve.accuracies, label=label, marker="o", markersize=4, **styles[name])
    loss_axes.set(yscale="log", xlabel="epoch", ylabel="loss", title="Training loss, each step")
    title = f"Accuracy on {training.held_out} held-out digits"
    accuracy_axes.set(xlabel="epoch", ylabel="accuracy", title=title)
    accuracy_axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (loss_axes, accuracy_axes):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def print_training(console: Console, training: Training, path: Path) -> None:
    columns = ("first loss", "last epoch's loss", f"accuracy on {training.held_out} held out", "seconds")
    table = new_table("Training on handwritten digits", "operators", *columns)
    for name, curve in (("eager", training.eager), ("fused", training.fused)):
        last = statistics.mean(curve.losses[-training.steps_per_epoch :])
        accuracy = f"{curve.accuracies[-1]:.2%}"
        table.add_row(name, f"{curve.losses[0]:.6f}", f"{last:.6f}", accuracy, f"{curve.seconds:.1f}")
    console.print(table)
    console.print(f"\nPlot of both runs: {path.resolve()}", soft_wrap=True, markup=False)
