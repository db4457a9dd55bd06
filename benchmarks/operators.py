"""Times every operator of the table: bandwidth against a copy of the same bytes, and overhead per call.

    python benchmarks/operators.py --output results.json             # everything but torch.compile
    python benchmarks/operators.py --only overhead --device cpu
    python benchmarks/operators.py --only forward --compile          # columns for eager and torch.compile

README.md beside this file says how each figure is measured.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import fused_act

SECTIONS = ("forward", "backward", "overhead", "training")
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

# Ways to call an operator: torch.ops.fused_act.NAME.default, torch.ops.fused_act.NAME, fused_act.functional.NAME.
WAYS = ("default", "packet", "functional")

YARDSTICKS = {
    "forward": "a copy of the same bytes",
    "backward": "copies of the bytes that it needs",
    "training": "copies of the bytes that it needs (forward and backward through autograd)",
    "overhead": "F.hardswish, 64 elements, wall clock per call",
}
# The goals that the project has set itself, for the ratios that have one; those for bandwidth hold on a GPU.
GOALS = {("forward", "fused"): 1.03, ("backward", "grad_x"): 1.03, ("backward", "grad_x + operand"): 1.10}
GOAL_MODES = {"no_grad": 1.15, "forward": 1.15, "forward + backward": 1.15}

Call = Callable[[], object]


# ---- From the table of operators to arguments --------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One operator, with an activation where it takes one by name."""

    operator: fused_act.Operator
    activation: str | None = None

    @property
    def name(self) -> str:
        return f"{self.operator.name}({self.activation})" if self.activation else self.operator.name

    @property
    def operands(self) -> list:
        return [p for p in self.operator.parameters if p.kind == "operand"]

    def full_tensors(self) -> tuple[int, int]:
        """How many tensors as large as the result are inputs, and how large the result is beside x, as 1 / n."""
        packed = bool(self.operator.packing)
        return 1 + packed + sum(p.is_input for p in self.operands), 1 + packed

    def copies(self, section: str) -> float:
        """Copies of x that move as many bytes. Backward reads grad_output and the inputs and writes their gradients."""
        inputs, parts = self.full_tensors()
        forward, backward = inputs + 1, 1 + 2 * inputs
        moved = {"forward": forward, "backward": backward, "training": forward + backward}[section]
        return moved / (2 * parts)

    def result_shape(self, x: torch.Tensor) -> list[int]:
        return [*x.shape[:-1], x.shape[-1] // self.full_tensors()[1]]

    def parameters(self, x: torch.Tensor, requires_grad: bool = False) -> dict[str, object]:
        """An operand is a random vector along dim 1, or as large as x; a scalar is its default, or 0.5 where it has
        none (0.5 puts a bound inside the range of random data)."""
        values: dict[str, object] = {}
        for p in self.operator.parameters:
            if p.kind == "activation":
                values[p.name] = self.activation
            elif p.kind == "scalar":
                values[p.name] = (
                    0.5 if p.default is None and (not p.optional or p.name in ("min", "max")) else p.default
                )
            else:
                size = x.shape if p.is_input else (x.shape[1],)
                operand = torch.randn(size, device=x.device, dtype=x.dtype)
                if p.is_input:
                    operand = operand.to(memory_format=memory_format_of(x))
                values[p.name] = operand.requires_grad_(requires_grad)
        if self.operands:
            values["dim"] = 1
        return values

    def written_out(self) -> Callable[..., torch.Tensor]:
        """The table's expression as one function of plain PyTorch, of x and :meth:`parameters`."""
        operator, namespace = self.operator, {"torch": torch, "F": F, "relu": torch.relu, "clamp": torch.clamp}
        text = operator.expression
        if self.activation:  # in its defaults: without alpha, gain and clamp
            text = re.sub(r"^torch\.clamp\((.*) \* gain, -clamp, clamp\)$", r"\1", text)
            text = text.replace("activation(act, ", "act_fn(").replace(", alpha)", ")")
            inner = next(o for o in fused_act.ops() if o.name == self.activation)
            defaults = {p.name: 0.0 if p.default is None else p.default for p in inner.parameters}
            exec(function_source("act_fn", inner.input, inner.expression, defaults, []), namespace)
        names = list(self.parameters(torch.empty(1, 2, 2, 2)))
        aligned = [p.name for p in self.operands if not p.is_input]
        exec(function_source("written", operator.input, text, dict.fromkeys(names), aligned), namespace)
        return namespace["written"]


def function_source(name: str, x: str, expression: str, parameters: dict[str, object], aligned: list[str]) -> str:
    """``def name(x, parameters...)``; one-dimensional operands are laid along dim 1."""
    *statements, last = ast.parse(expression).body
    lines = [f"def {name}({', '.join([x, *(f'{n}={v!r}' for n, v in parameters.items())])}, **others):"]
    lines += [f"    {n} = {n}.reshape((1, -1) + (1,) * ({x}.dim() - 2))" for n in aligned]
    lines += [f"    {ast.unparse(statement)}" for statement in statements]
    return "\n".join([*lines, f"    return {ast.unparse(last)}"])


def memory_format_of(x: torch.Tensor) -> torch.memory_format:
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


def make_cases(names: list[str], activations: list[str]) -> list[Case]:
    cases = []
    for operator in fused_act.ops():
        if operator.name in names:
            named = any(p.kind == "activation" for p in operator.parameters)
            cases += [Case(operator, activation) for activation in (activations if named else [None])]
    return cases


# ---- Clocks ------------------------------------------------------------------------------------------------------


class Clock:
    """Times single calls in turns, with the L2 flushed before each: device events on a GPU, the host's clock on a
    CPU."""

    def __init__(self, device: torch.device, repeats: int):
        self.device, self.repeats = device, repeats
        if device.type == "cuda":
            self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        else:
            self.l2_bytes = 2**26
        # Not the tested data. Writing it leaves the L2 full of lines that the timed kernel has to push out first; the
        # yardstick pays that too.
        self.flush = torch.empty(max(4 * self.l2_bytes, 2**28), dtype=torch.uint8, device=device)

    def microseconds(self, calls: dict[str, Callable[[int], object]]) -> dict[str, list[float]]:
        """Times of each call, in microseconds, one per repeat. A call is given the number of the repeat (to choose
        its input set by). The order of the calls is drawn anew in each repeat."""
        for index in range(3):
            for call in calls.values():
                call(index)
        order, shuffle = list(calls), random.Random(0).shuffle
        times: dict[str, list] = {name: [] for name in calls}
        if self.device.type == "cpu":
            for index in range(self.repeats):
                shuffle(order)
                for name in order:
                    self.flush.fill_(index % 256)
                    begin = time.perf_counter()
                    result = calls[name](index)
                    times[name].append((time.perf_counter() - begin) * 1e6)
                    del result
            return times
        torch.cuda.synchronize(self.device)
        for index in range(self.repeats):
            shuffle(order)
            for name in order:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                # The flush runs for longer than the host needs to enqueue what follows, so no launch gap is timed.
                self.flush.fill_(index % 256)
                start.record()
                calls[name](index)
                end.record()
                times[name].append((start, end))
            # Bounds how far the host runs ahead; without it the launch queue fills and blocks between two events.
            torch.cuda.synchronize(self.device)
        return {name: [s.elapsed_time(e) * 1e3 for s, e in pairs] for name, pairs in times.items()}


def per_call_microseconds(
    calls: dict[str, Call], device: torch.device, count: int, repeats: int
) -> dict[str, list[float]]:
    """Wall-clock time per call of ``count`` calls in a row, the device drained at the end; one value per repeat."""

    def timed(call: Call, number: int) -> float:
        begin = time.perf_counter()
        for _ in range(number):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) * 1e6 / number

    for call in calls.values():
        timed(call, max(20, count // 10))
    order, shuffle = list(calls), random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()  # a collection inside one batch of calls would count against whatever it hits
    try:
        for _ in range(repeats):
            shuffle(order)
            for name in order:
                times[name].append(timed(calls[name], count))
    finally:
        gc.enable()
    return times


# ---- Sections ----------------------------------------------------------------------------------------------------


def run_bandwidth(section: str, args: argparse.Namespace, device: torch.device, cases: list[Case]) -> list[dict]:
    """Sections ``forward``, ``backward`` and ``training``: one row per case, dtype and layout."""
    clock = Clock(device, args.repeats)
    goals = GOALS if device.type == "cuda" else {}
    # Every row is one more function made at one place: Dynamo of 2.11 takes them for recompilations of one, and after
    # eight runs them eagerly with no more than a warning.
    torch._dynamo.config.recompile_limit = 10_000
    compiled = {}
    if args.compile:
        compiled = {c.name: torch.compile(c.written_out(), dynamic=False, fullgraph=True) for c in cases}
    rows = []
    for dtype_name in args.dtypes:
        dtype = DTYPES[dtype_name]
        for layout in args.layouts:

            def random_tensor(shape) -> torch.Tensor:
                return torch.randn(shape, device=device, dtype=dtype).to(memory_format=LAYOUTS[layout])

            # Two input sets in turn: no figure then hangs on where one tensor happens to lie in memory.
            xs = [random_tensor(args.shape) for _ in range(2)]
            target = torch.empty_like(xs[0])
            for case in cases:
                grads = [random_tensor(case.result_shape(xs[0])) for _ in range(2 if section != "forward" else 0)]
                calls = bandwidth_calls(section, case, xs, grads, compiled.get(case.name))
                for name in ("yardstick", "control"):
                    calls[name] = lambda i: target.copy_(xs[i % 2])
                times = clock.microseconds(calls)
                for name in [name for name in calls if name != "yardstick"]:
                    passes = 1.0 if name == "control" else case.copies(section)
                    measured = row(times[name], times["yardstick"], passes)
                    call = name if name in ("control", "eager", "torch.compile") else "fused"
                    rows.append(
                        {"section": section, "operator": case.name, "what": name, "call": call}
                        | {"dtype": dtype_name, "layout": layout, "shape": list(args.shape)}
                        | measured
                        | {"GB/s": 2 * target.nbytes * passes / measured["us"] / 1e3}
                        | {"limit": goals.get((section, name))}
                    )
    return rows


def bandwidth_calls(section: str, case: Case, xs: list, grads: list, compiled) -> dict[str, Callable[[int], object]]:
    """What to time for one case."""
    function = getattr(torch.ops.fused_act, case.operator.name).default
    if section == "forward":
        values = case.parameters(xs[0])
        calls = {"fused": lambda i: function(xs[i % 2], **values)}
        if compiled is not None:
            eager = case.written_out()
            calls["eager"] = lambda i: eager(xs[i % 2], **values)
            calls["torch.compile"] = lambda i: compiled(xs[i % 2], **values)
        return calls

    if section == "backward":
        backward = getattr(torch.ops.fused_act, f"{case.operator.name}_backward").default
        values = case.parameters(xs[0])
        if not case.operands:
            return {"grad_x": lambda i: backward(grads[i % 2], xs[i % 2], **values)}
        # Of an operand as large as x the gradient counts among the bytes.
        least = [True] + [bool(p.is_input) for p in case.operands]
        calls = {"grad_x": lambda i: backward(grads[i % 2], xs[i % 2], **values, output_mask=least)}
        if not all(least):
            every = [True] * len(least)
            calls["grad_x + operand"] = lambda i: backward(grads[i % 2], xs[i % 2], **values, output_mask=every)
        return calls

    # Through autograd, all inputs requiring a gradient.
    leaves = [x.detach().requires_grad_() for x in xs]
    values = case.parameters(xs[0], requires_grad=True)
    wanted = [value for value in values.values() if isinstance(value, torch.Tensor)]

    def both(function: Callable) -> Callable[[int], object]:
        def call(i: int) -> object:
            leaf = leaves[i % 2]
            return torch.autograd.grad(function(leaf, **values), [leaf, *wanted], grads[i % 2])

        return call

    calls = {"fused": both(function)}
    if compiled is not None:
        calls["eager"] = both(case.written_out())
        calls["torch.compile"] = both(compiled)
    return calls


def run_overhead(args: argparse.Namespace, device: torch.device, cases: list[Case]) -> list[dict]:
    """Section ``overhead``: time per call on 64 elements against F.hardswish, called in three ways."""
    rows = []
    shape = (2, 8, 2, 2)
    for case in cases:
        packet = getattr(torch.ops.fused_act, case.operator.name)
        functional = getattr(fused_act.functional, case.operator.name)
        ways = dict(zip(WAYS, (packet.default, packet, functional), strict=True))
        x = torch.randn(shape, device=device)
        values = case.parameters(x)
        leaf = x.clone().requires_grad_()
        leaf_values = case.parameters(x, requires_grad=True)
        operand_leaves = [value for value in leaf_values.values() if isinstance(value, torch.Tensor)]
        grad, own_grad = torch.randn_like(x), torch.randn(case.result_shape(x), device=device)

        def forward(function: Callable, tensor: torch.Tensor, extra: dict) -> Call:
            return lambda: function(tensor, **extra)

        def both(function: Callable, extra: dict, wanted: list, grad: torch.Tensor) -> Call:
            return lambda: torch.autograd.grad(function(leaf, **extra), wanted, grad)

        modes: dict[str, dict[str, Call]] = {
            "no_grad": {way: forward(function, x, values) for way, function in ways.items()},
            "forward": {way: forward(function, leaf, values) for way, function in ways.items()},
            "forward + backward": {way: both(function, values, [leaf], own_grad) for way, function in ways.items()},
        }
        yardsticks = {
            "no_grad": forward(F.hardswish, x, {}),
            "forward": forward(F.hardswish, leaf, {}),
            "forward + backward": both(F.hardswish, {}, [leaf], grad),
        }
        if operand_leaves:
            mode = "forward + backward, operand too"
            wanted = [leaf, *operand_leaves]
            modes[mode] = {way: both(function, leaf_values, wanted, own_grad) for way, function in ways.items()}
            yardsticks[mode] = yardsticks["forward + backward"]

        for mode, calls in modes.items():
            yardstick = yardsticks[mode]
            calls = calls | {"yardstick": yardstick, "control": yardstick}
            with torch.set_grad_enabled(mode != "no_grad"):
                times = per_call_microseconds(calls, device, args.calls, args.batches)
            for way in [*WAYS, "control"]:
                rows.append(
                    {"section": "overhead", "operator": case.name, "what": mode, "call": way}
                    | row(times[way], times["yardstick"], 1.0)
                    | {"limit": None if way == "control" else GOAL_MODES.get(mode)}
                )
    return rows


def row(times: list[float], yardstick: list[float], copies: float) -> dict:
    """The ratio of the medians, and the middle 80 % of the ratios of the single repeats."""
    ratios = sorted(a / (b * copies) for a, b in zip(times, yardstick, strict=True))
    return {
        "ratio": statistics.median(times) / (statistics.median(yardstick) * copies),
        "p10": ratios[len(ratios) // 10],
        "p90": ratios[-1 - len(ratios) // 10],
        "us": statistics.median(times),
        "yardstick_us": statistics.median(yardstick),
    }


# ---- Output ------------------------------------------------------------------------------------------------------


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """With rich where it is installed, else tab-separated."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}")
        print("\n".join("\t".join(cells) for cells in [header, *rows]))
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index == 0 or name in RIGHT else "left", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    console = Console(highlight=False)
    console.width = max(console.width, 120)  # piped output counts as 80 columns, which would cut figures off
    console.print()
    console.print(table)


RIGHT = {"default", "packet", "functional", "goal", "p10-p90", "us", "copy us", "hardswish us", "GB/s"}


def report(section: str, rows: list[dict]) -> None:
    title = f"{section}: ratio to {YARDSTICKS[section]}"
    shown = [r for r in rows if r["call"] != "control"]
    if section == "overhead":
        header = [*WAYS, "goal", "operator", "what", "us", "hardswish us"]
        lines = []
        for first, *others in zip(*([r for r in shown if r["call"] == way] for way in WAYS), strict=True):
            ratios = [f"{r['ratio']:.3f}" for r in (first, *others)]
            figures = [f"{first['us']:.2f}", f"{first['yardstick_us']:.2f}"]
            lines.append([*ratios, goal(first), first["operator"], first["what"], *figures])
    else:
        header = ["ratio", "goal", "p10-p90", "operator", "what", "dtype", "layout", "us", "copy us", "GB/s"]
        lines = []
        for r in shown:
            names = [r["operator"], r["what"] if r["call"] == "fused" else r["call"], r["dtype"], r["layout"]]
            figures = [f"{r['us']:.1f}", f"{r['yardstick_us']:.1f}", f"{r['GB/s']:.0f}"]
            lines.append([f"{r['ratio']:.3f}", goal(r), f"{r['p10']:.2f}-{r['p90']:.2f}", *names, *figures])
    print_table(title, header, lines)
    control = [r["ratio"] for r in rows if r["call"] == "control"]
    print(f"The yardstick against itself, in the same turns: {min(control):.3f} to {max(control):.3f}.")


def goal(r: dict) -> str:
    return "" if r["limit"] is None else f"{r['limit']:.2f}" + (" over" if r["ratio"] > r["limit"] else "")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [operator.name for operator in fused_act.ops()]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=["forward", "backward", "overhead"])
    parser.add_argument("--operators", nargs="+", choices=names, default=names)
    activations = [operator.name for operator in fused_act.ops() if operator.is_activation]
    help = "for operators that take one by name"
    parser.add_argument("--activations", nargs="+", choices=activations, default=["relu", "silu", "gelu"], help=help)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16", "float16"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    shape_help = "default 128 64 126 126; on a CPU 8 64 126 126"
    parser.add_argument("--shape", nargs=4, type=int, metavar=("N", "C", "H", "W"), help=shape_help)
    parser.add_argument("--compile", action="store_true", help="time eager and torch.compile too (forward, training)")
    parser.add_argument("--repeats", type=int, help="of each bandwidth figure; default 100, on a CPU 15")
    parser.add_argument("--calls", type=int, default=300, help="calls per batch in the overhead section")
    parser.add_argument("--batches", type=int, default=15, help="batches in the overhead section")
    parser.add_argument("--output", type=Path, help="write all figures to this JSON file")
    args = parser.parse_args(argv)
    cuda = args.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device; --device cpu times the CPU")
    args.shape = args.shape or ((128 if cuda else 8), 64, 126, 126)
    args.repeats = args.repeats or (100 if cuda else 15)
    if args.output and not args.output.parent.is_dir():
        parser.error(f"--output: no folder {args.output.parent}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    torch.manual_seed(0)
    cases = make_cases(args.operators, args.activations)
    about = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "fused_act": fused_act.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "repeats": args.repeats,
        "calls": args.calls,
        "batches": args.batches,
    }
    print(", ".join(f"{key} {value}" for key, value in about.items() if value is not None))
    rows = []
    for section in dict.fromkeys(args.only):
        begin = time.perf_counter()
        if section == "overhead":
            measured = run_overhead(args, device, cases)
        else:
            measured = run_bandwidth(section, args, device, cases)
        report(section, measured)
        print(f"({section}: {time.perf_counter() - begin:.0f} s)", flush=True)
        rows += measured
    if args.output:
        args.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
        print(f"figures: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
