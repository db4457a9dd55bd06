"""What a process pays once: the import of fused_act, and the first call of an operator. Each in a process of its own.

First calls are made by forks of a process in which ``serve`` runs: it has imported torch and fused_act and touches no
device itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from ..demo import DTYPES, pick_device, synchronize
from .cases import Case, make_cases

# Large enough that training saves codes where it can.
SHAPE = (4, 64, 8, 8)
TIMEOUT = 120  # seconds for a first call
FIRST_CALL, FIRST_STEP = WHATS = ("first call", "first training step")

_IMPORT = """
import time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
import fused_act
print(middle - begin, time.perf_counter() - middle)
"""


def environment() -> dict[str, str]:
    """In which a new Python imports this fused_act."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def import_times() -> tuple[float, float]:
    """Microseconds of ``import torch`` and then of ``import fused_act``, in a new process."""
    done = subprocess.run([sys.executable, "-c", _IMPORT], env=environment(), stdout=subprocess.PIPE, text=True)
    if done.returncode:  # whose stderr the user has seen
        raise subprocess.SubprocessError(f"the process that imports ended with {done.returncode}")
    of_torch, own = (float(seconds) * 1e6 for seconds in done.stdout.split())
    return of_torch, own


def first_calls(**request: object) -> Iterator[tuple[str, str, dict]]:
    """(operator, dtype, times) for ``F.softplus``, whose operator is "", and then for each case. ``times`` has for each
    of WHATS the microseconds of ``repeats`` processes, or the reason why there are none under "reason". ``request`` is
    what serve reads: device, dtypes, operators, activations, repeats."""
    with subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve()"],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdin.write(json.dumps(request))
        process.stdin.close()
        for line in process.stdout:
            yield tuple(json.loads(line))
    if process.returncode:
        raise subprocess.SubprocessError(f"the process that forks them ended with {process.returncode}")


def time_first(case: Case | None, what: str, device_type: str, dtype: str) -> float:
    """Microseconds of this process's first call of the case, or of ``F.softplus``: another library's kernel that
    nothing has loaded yet. What any first call on a device pays has been paid by ``F.hardswish``."""
    device, _ = pick_device(device_type)
    x = torch.randn(SHAPE, device=device, dtype=DTYPES[dtype])
    leaf = x.clone().requires_grad_()
    torch.autograd.grad(F.hardswish(leaf), leaf, x)
    values = case.parameters(x, requires_grad=what == FIRST_STEP) if case else {}
    grad = torch.randn(case.result_shape(SHAPE) if case else SHAPE, device=device, dtype=x.dtype)
    wanted = [leaf, *(value for value in values.values() if isinstance(value, torch.Tensor))]
    synchronize(device)
    begin = time.perf_counter()
    function = getattr(torch.ops.fused_act, case.operator.name) if case else F.softplus
    if what == FIRST_CALL:
        with torch.no_grad():
            function(x, **values)
    else:
        torch.autograd.grad(function(leaf, **values), wanted, grad)
    synchronize(device)
    return (time.perf_counter() - begin) * 1e6


def _in_a_process(*arguments: object) -> float | str:
    """What time_first gives in a forked process, or its error."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def target() -> None:
        try:
            send.send(time_first(*arguments))
        except Exception as error:
            send.send(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")

    process = context.Process(target=target)
    process.start()
    send.close()
    try:
        return receive.recv() if receive.poll(TIMEOUT) else f"no first call within {TIMEOUT} s"
    except EOFError:
        return "the process ended before its first call had"
    finally:
        process.kill()  # it has sent what it had
        process.join()


def serve() -> None:
    """Reads from stdin what to call, as JSON, and prints a line of JSON for each."""
    request = json.load(sys.stdin)
    cases = [None, *make_cases(request["operators"], request["activations"])]
    for dtype in request["dtypes"]:
        for case in cases:
            times: dict[str, object] = {}
            for what in WHATS:
                taken = [_in_a_process(case, what, request["device"], dtype) for _ in range(request["repeats"])]
                if reasons := [result for result in taken if isinstance(result, str)]:
                    times = {"reason": reasons[0]}
                    break
                times[what] = taken
            print(json.dumps([case.name if case else "", dtype, times]), flush=True)
