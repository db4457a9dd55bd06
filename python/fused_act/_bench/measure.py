"""The clocks, and the sections that they time."""

from __future__ import annotations

import argparse
import gc
import math
import platform
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from .. import functional
from .._build_info import version
from ..demo import DTYPES, device_name, peak_memory, synchronize
from .cases import Case, code_bits, make_cases
from .start import FIRST_CALL, SHAPE, first_calls, import_times

SECTIONS = ("forward", "backward", "training", "overhead", "start")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

# Ways to call an operator: torch.ops.fused_act.NAME.default, torch.ops.fused_act.NAME, fused_act.functional.NAME.
WAYS = ("default", "packet", "functional")
# The calls that are this library's; the others are there to be compared with.
FUSED = ("fused", *WAYS)

# The goals that the project has set itself, for the ratios that have one; those for bandwidth hold on a GPU.
GOALS = {("forward", "value"): 1.03, ("backward", "grad_x"): 1.03, ("backward", "grad_x + operand"): 1.10}
GOAL_MODES = {"no_grad": 1.15, "forward": 1.15, "forward + backward": 1.15}
# And in milliseconds.
GOAL_MS = {"import": 60.0, FIRST_CALL: 3.0}
PROCESSES = 5  # of each figure of what a process pays once

# Written before each call to push the tested data out of the caches; at least this much.
FLUSH_BYTES = 2**28

Call = Callable[[], object]
IndexedCall = Callable[[int], object]  # is given the number of the repeat


# ---- What is measured where --------------------------------------------------------------------------------------


def shape_of(elements: int) -> tuple[int, int, int, int]:
    """(N, 64, H, W) with as many elements, a multiple of 1024: planes of 4 x 4 to 128 x 128, as many as it takes."""
    images = elements // 64
    plane = min(images & -images, 2**14)  # the largest power of two that divides it
    width = 2 ** (plane.bit_length() // 2)
    return images // plane, 64, plane // width, width


def describe(args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """What the figures depend on besides the operators: the head of every report."""
    cuda = device.type == "cuda"
    return {
        "device": device_name(device) if cuda else f"{cpu_name()}, {device_name(device)}",
        "driver": driver_version() if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "fused_act": version,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "shape": list(args.shapes[0]),
        "repeats": args.repeats,
        "calls": args.calls,
        "batches": args.batches,
    }


def cpu_name() -> str:
    found = re.search(r"^model name\s*: *(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def driver_version() -> str | None:
    """NVIDIA's, which torch does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None  # all cards of a machine have the same


def free_memory(device: torch.device) -> float:
    """Bytes that can be allocated, those included that the caching allocator holds and nobody uses."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    found = re.search(r"^MemAvailable: *(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    free = int(found[1]) * 1024 if found else math.inf
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return min(free, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else free


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


# ---- Clocks ------------------------------------------------------------------------------------------------------


class Clock:
    """Times single calls in turns, with the L2 flushed before each: device events on a GPU, the host's clock on a
    CPU."""

    def __init__(self, device: torch.device, repeats: int):
        self.device, self.repeats = device, repeats
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
        # Not the tested data. Writing it leaves the L2 full of lines that the timed kernel has to push out first; the
        # yardstick pays that too.
        self.flush = torch.empty(max(4 * l2_bytes, FLUSH_BYTES), dtype=torch.uint8, device=device)
        if device.type == "cuda":
            self.flush.fill_(0)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self.flush.fill_(1)
            end.record()
            torch.cuda.synchronize(device)
            self.flush_us = start.elapsed_time(end) * 1e3

    def microseconds(self, calls: dict[str, IndexedCall]) -> dict[str, list[float]]:
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
        flushes = self.flushes_before(calls)
        for index in range(self.repeats):
            shuffle(order)
            for name in order:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                for _ in range(flushes):
                    self.flush.fill_(index % 256)
                start.record()
                calls[name](index)
                end.record()
                times[name].append((start, end))
            # Bounds how far the host runs ahead; without it the launch queue fills and blocks between two events.
            torch.cuda.synchronize(self.device)
        return {name: [s.elapsed_time(e) * 1e3 for s, e in pairs] for name, pairs in times.items()}

    def flushes_before(self, calls: dict[str, IndexedCall]) -> int:
        """As many that they run for longer than the host needs to enqueue any of the calls, so no launch gap is timed:
        one for a kernel, a few for eager's chain with its backward. The same number before every call of a row."""
        slowest = 0.0
        for call in calls.values():
            taken = []
            for index in range(3):
                torch.cuda.synchronize(self.device)
                begin = time.perf_counter()
                call(index)
                taken.append((time.perf_counter() - begin) * 1e6)
            slowest = max(slowest, min(taken))
        torch.cuda.synchronize(self.device)
        return 1 + int(1.5 * slowest / self.flush_us)


def per_call_microseconds(
    calls: dict[str, Call], device: torch.device, count: int, repeats: int
) -> dict[str, list[float]]:
    """Wall-clock time per call of ``count`` calls in a row, the device drained at the end; one value per repeat."""

    def timed(call: Call, number: int) -> float:
        begin = time.perf_counter()
        for _ in range(number):
            call()
        synchronize(device)
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


def figures(times: list[float], yardstick: list[float], copies: float) -> dict[str, float]:
    """The ratio of the medians, and the middle 80 % of the ratios of the single repeats."""
    ratios = sorted(a / (b * copies) for a, b in zip(times, yardstick, strict=True))
    return {
        "us": statistics.median(times),
        "yardstick_us": statistics.median(yardstick),
        "ratio": statistics.median(times) / (statistics.median(yardstick) * copies),
        "p10": ratios[len(ratios) // 10],
        "p90": ratios[-1 - len(ratios) // 10],
    }


# ---- Sections ----------------------------------------------------------------------------------------------------


class Run:
    """The sections of one run. Rows and skipped rows collect in ``rows`` and ``skipped``."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        self.cases = make_cases(args.operators, args.activations)
        self.rows: list[dict] = []
        self.skipped: list[dict] = []
        self.compiled: dict[str, Callable] = {}
        if args.compile:
            # Every row is one more function made at one place: Dynamo of 2.11 takes them for recompilations of one, and
            # after eight runs them eagerly with no more than a warning.
            torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
            compiled = partial(torch.compile, dynamic=False, fullgraph=True)
            self.compiled = {case.name: compiled(case.written_out()) for case in self.cases}

    def steps(self, section: str) -> int:
        """How often ``measure`` calls ``advance``."""
        if section == "overhead":
            return len(self.cases)
        if section == "start":
            return 1 + len(self.args.dtypes) * (1 + len(self.cases))
        return len(self.cases) * len(self.args.shapes) * len(self.args.dtypes) * len(self.args.layouts)

    def measure(self, section: str, advance: Callable[[str], None]) -> None:
        """``advance`` is told what comes before each step."""
        if section == "overhead":
            for case in self.cases:
                advance("overhead")
                self.rows += map(rounded, self.overhead(case))
            return
        if section == "start":
            self.rows += map(rounded, self.start(advance))
            return
        clock = Clock(self.device, self.args.repeats)
        for shape in self.args.shapes:
            for dtype in self.args.dtypes:
                for layout in self.args.layouts:
                    self.bandwidth(section, clock, tuple(shape), dtype, layout, advance)

    def bandwidth(
        self,
        section: str,
        clock: Clock,
        shape: tuple[int, ...],
        dtype: str,
        layout: str,
        advance: Callable[[str], None],
    ) -> None:
        """Rows of ``forward``, ``backward`` or ``training`` of one size, dtype and layout."""

        def random_tensor(shape) -> torch.Tensor:
            tensor = torch.randn(shape, device=self.device, dtype=DTYPES[dtype])
            return tensor.to(memory_format=LAYOUTS[layout])

        about = {"section": section, "dtype": dtype, "layout": layout, "shape": list(shape)}
        about["elements"] = math.prod(shape)
        free = free_memory(self.device)
        if self.args.memory is not None:
            free = min(free, self.args.memory * 2**30)
        xs = None
        for case in self.cases:
            advance(f"{section}, {dtype}, {layout}, {shape}")
            needed = case.live_tensors(section) * about["elements"] * DTYPES[dtype].itemsize
            if needed > 0.9 * free:
                reason = f"needs up to {needed / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free"
                self.skipped.append({"operator": case.name, "call": "all"} | about | {"reason": reason})
                continue
            try:
                if xs is None:
                    # Two input sets in turn: no figure then hangs on where one tensor happens to lie in memory.
                    xs = [random_tensor(shape) for _ in range(2)]
                    target = torch.empty_like(xs[0])
                grads = [random_tensor(case.result_shape(shape)) for _ in range(2 if section != "forward" else 0)]
                for row in self.bandwidth_rows(section, case, clock, xs, grads, target, about):
                    self.rows.append(rounded({"section": section, "operator": case.name} | row))
            except torch.OutOfMemoryError as error:
                reason = f"out of memory: {str(error).partition('. ')[0]}"
                self.skipped.append({"operator": case.name, "call": "all"} | about | {"reason": reason})

    def bandwidth_rows(
        self, section: str, case: Case, clock: Clock, xs: list, grads: list, target: torch.Tensor, about: dict
    ) -> list[dict]:
        # Each size, dtype and layout is a compilation of its own, of seconds: only the first size is compiled.
        compiled = self.compiled.get(case.name) if about["shape"] == list(self.args.shapes[0]) else None
        calls = dict(bandwidth_calls(section, case, xs, grads, compiled))
        for what, call in [key for key in calls if key[1] == "torch.compile"]:
            if not self.compiles(case, partial(calls[what, call], 0), about):
                del calls[what, call]
        for name in ("yardstick", "control"):
            calls[name, name] = lambda i: target.copy_(xs[i % 2])
        times = clock.microseconds(calls)
        yardstick = times.pop(("yardstick", "yardstick"))
        rows = []
        for (what, call), taken in times.items():
            itemsize, copied = target.dtype.itemsize, 2 * target.nbytes
            moved = copied
            if call != "control":
                moved = case.bytes_moved(section, about["shape"], itemsize, operand_gradients=what != "grad_x")
            row = {"what": what, "call": call} | about | {"bytes": moved} | figures(taken, yardstick, moved / copied)
            row["GB/s"] = moved / row["us"] / 1e3
            row["fraction"] = 1 / row["ratio"]  # of the bandwidth of the copy
            if self.device.type == "cuda":
                row["limit"] = GOALS.get((section, what)) if call == "fused" else None
                if section == "training" and call != "control":
                    row["peak_bytes"] = peak_memory(partial(calls[what, call], 0), self.device)
            rows.append(row)
        return rows

    def compiles(self, case: Case, call: Call, about: dict) -> bool:
        """Calls it once. What torch.compile cannot do is the end of a row, not of the run."""
        try:
            call()
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            self.skipped.append({"operator": case.name, "call": "torch.compile"} | about | {"reason": reason})
            return False
        return True

    def overhead(self, case: Case) -> Iterator[dict]:
        """Time per call on 64 elements against F.hardswish."""
        args, device, shape = self.args, self.device, (2, 8, 2, 2)
        packet = getattr(torch.ops.fused_act, case.operator.name)
        functions = dict(zip(WAYS, (packet.default, packet, getattr(functional, case.operator.name)), strict=True))
        functions["eager"] = case.written_out()
        x = torch.randn(shape, device=device)
        values = case.parameters(x)
        leaf = x.clone().requires_grad_()
        leaf_values = case.parameters(x, requires_grad=True)
        operand_leaves = [value for value in leaf_values.values() if isinstance(value, torch.Tensor)]
        grad, own_grad = torch.randn_like(x), torch.randn(case.result_shape(shape), device=device)
        about = {"dtype": "float32", "layout": "contiguous", "shape": list(shape), "elements": math.prod(shape)}

        def forward(function: Callable, tensor: torch.Tensor, extra: dict) -> Call:
            return lambda: function(tensor, **extra)

        def both(function: Callable, extra: dict, wanted: list, grad: torch.Tensor) -> Call:
            return lambda: torch.autograd.grad(function(leaf, **extra), wanted, grad)

        if compiled := self.compiled.get(case.name):
            training = both(compiled, leaf_values, [leaf, *operand_leaves], own_grad)
            if self.compiles(case, training, {"section": "overhead"} | about):
                functions["torch.compile"] = compiled

        modes: dict[str, dict[str, Call]] = {
            "no_grad": {way: forward(function, x, values) for way, function in functions.items()},
            "forward": {way: forward(function, leaf, values) for way, function in functions.items()},
            "forward + backward": {
                way: both(function, values, [leaf], own_grad) for way, function in functions.items()
            },
        }
        yardsticks = {
            "no_grad": forward(F.hardswish, x, {}),
            "forward": forward(F.hardswish, leaf, {}),
            "forward + backward": both(F.hardswish, {}, [leaf], grad),
        }
        if operand_leaves:
            mode, wanted = "forward + backward, operand too", [leaf, *operand_leaves]
            modes[mode] = {way: both(function, leaf_values, wanted, own_grad) for way, function in functions.items()}
            yardsticks[mode] = yardsticks["forward + backward"]

        if device.type == "cuda" and tuple(case.result_shape(shape)) == shape:
            mode = "graph of ten"
            yardsticks[mode] = graph_of_ten(F.hardswish, x, {})
            modes[mode] = {WAYS[0]: graph_of_ten(packet.default, x, values)}

        for mode, calls in modes.items():
            calls = calls | {"yardstick": yardsticks[mode], "control": yardsticks[mode]}
            with torch.set_grad_enabled(mode != "no_grad"):
                times = per_call_microseconds(calls, device, args.calls, args.batches)
            yardstick = times.pop("yardstick")
            for call, taken in times.items():
                row = {"section": "overhead", "operator": case.name, "what": mode, "call": call} | about
                yield row | figures(taken, yardstick, 1.0) | {"limit": GOAL_MODES.get(mode) if call in WAYS else None}

    def start(self, advance: Callable[[str], None]) -> Iterator[dict]:
        """What a process pays once, against what PyTorch's import and first call take."""

        def row(operator: str, what: str, dtype: str, taken: list[float], yardstick: list[float]) -> dict:
            about = {"dtype": dtype, "layout": "contiguous", "shape": list(SHAPE), "elements": math.prod(SHAPE)}
            about = {"section": "start", "operator": operator, "what": what, "call": WAYS[1]} | about
            about |= figures(taken, yardstick, 1.0)
            return about | {"lowest_us": min(taken), "highest_us": max(taken), "limit_ms": GOAL_MS.get(what)}

        def skip(operator: str, dtype: str, reason: object) -> None:
            about = {"section": "start", "operator": operator, "call": "all", "dtype": dtype, "layout": "contiguous"}
            about |= {"shape": list(SHAPE), "elements": math.prod(SHAPE), "reason": str(reason)}
            self.skipped.append(about)

        args = self.args
        advance("start, import")
        try:
            import_times()  # the files come into memory
            of_torch, own = zip(*(import_times() for _ in range(PROCESSES)), strict=True)
            yield row("fused_act", "import", args.dtypes[0], list(own), list(of_torch))
        except subprocess.SubprocessError as error:
            skip("fused_act", args.dtypes[0], error)
        advance("start, first calls")
        yardsticks: dict[str, list[float]] = {}
        steps = 2
        try:
            request = {name: getattr(args, name) for name in ("device", "dtypes", "operators", "activations")}
            for operator, dtype, times in first_calls(**request, repeats=PROCESSES):
                if not operator:
                    yardsticks = times
                if reason := times.get("reason") or yardsticks.get("reason"):
                    skip(operator or "F.softplus", dtype, reason)
                elif operator:
                    yield from (row(operator, what, dtype, taken, yardsticks[what]) for what, taken in times.items())
                steps += 1
                if steps <= self.steps("start"):
                    advance("start, first calls")
        except subprocess.SubprocessError as error:
            skip("first calls", args.dtypes[0], error)


def graph_of_ten(function: Callable, x: torch.Tensor, extra: dict) -> Call:
    """The replay of a CUDA graph in which ``function`` is called ten times, each time on what it gave before."""

    def ten() -> torch.Tensor:
        y = x
        for _ in range(10):
            y = function(y, **extra)
        return y

    with torch.no_grad():
        side = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            ten()
        torch.cuda.current_stream(x.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ten()
    return graph.replay


def bandwidth_calls(
    section: str, case: Case, xs: list, grads: list, compiled: Callable | None
) -> Iterator[tuple[tuple[str, str], IndexedCall]]:
    """What to time for one case, as ((what, call), function)."""
    function, eager = getattr(torch.ops.fused_act, case.operator.name).default, case.written_out()
    functions = {"fused": function, "eager": eager}
    if compiled is not None:
        functions["torch.compile"] = compiled

    if section == "forward":
        values = case.parameters(xs[0])

        def forward(function: Callable) -> IndexedCall:
            return lambda i: function(xs[i % 2], **values)

        for call, function in functions.items():
            yield ("value", call), forward(function)
        return

    # All inputs require a gradient.
    leaves = [x.detach().requires_grad_() for x in xs]
    values = case.parameters(xs[0], requires_grad=True)
    operands = [values[name] for name in case.differentiated(operand_gradients=True)[1:]]

    if section == "training":

        def both(function: Callable) -> IndexedCall:
            def call(i: int) -> object:
                leaf = leaves[i % 2]
                return torch.autograd.grad(function(leaf, **values), [leaf, *operands], grads[i % 2])

            return call

        for call, function in functions.items():
            yield ("value + gradients", call), both(function)
        return

    # The operator that backward consists of, called directly. Eager has none: its graph, which is kept; and so where
    # training saves codes. Of an operand as large as x the gradient counts among the bytes.
    backward = getattr(torch.ops.fused_act, f"{case.operator.name}_backward").default
    results = {"eager": [eager(leaf, **values) for leaf in leaves]}
    if code_bits(case):
        results["fused"] = [function(leaf, **values) for leaf in leaves]
    detached = {name: v.detach() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
    masks = {"grad_x": [True] + [p.is_input for p in case.operands]}
    if not all(masks["grad_x"]):
        masks["grad_x + operand"] = [True] * len(masks["grad_x"])

    def fused_backward(mask: list[bool]) -> IndexedCall:
        extra = {"output_mask": mask} if case.operands else {}
        return lambda i: backward(grads[i % 2], xs[i % 2], **detached, **extra)

    def graph_backward(kept: list[torch.Tensor], mask: list[bool]) -> IndexedCall:
        wanted = [operand for operand, asked in zip(operands, mask[1:], strict=True) if asked]
        return lambda i: torch.autograd.grad(kept[i % 2], [leaves[i % 2], *wanted], grads[i % 2], retain_graph=True)

    for what, mask in masks.items():
        for call in ("fused", "eager"):
            kept = results.get(call)
            yield (what, call), fused_backward(mask) if kept is None else graph_backward(kept, mask)


def rounded(row: dict) -> dict:
    """Five digits of each figure: more than any of them holds, and a file of half the size."""
    return {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in row.items()}
