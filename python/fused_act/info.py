"""What a bug report needs: `python -m fused_act info`."""

import argparse
import platform
import sys

import torch

from . import _C, _build_info, ops


def info() -> dict[str, str]:
    """The versions that fused_act was built for and those found, the devices, and the SIMD level in use."""
    facts = {
        "fused_act": f"{_build_info.version}, {len(ops())} operators",
        "library": _C.__file__,
        "built for torch": _build_info.torch,
        "found torch": torch.__version__,
        "built for CUDA": _build_info.cuda or "no: this is the CPU-only library",
        "found CUDA": torch.version.cuda or "no: this torch has no CUDA",
        "CUDA architectures": " ".join(_build_info.cuda_architectures) or "none",
        "compilers": "; ".join(_build_info.compilers),
        "CPU": f"{_C.cpu_capability()} kernels, {torch.get_num_threads()} threads"
        + ("" if torch.backends.openmp.is_available() else ", no OpenMP"),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }
    if not torch.cuda.is_available():
        facts["devices"] = "no CUDA device"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        facts[f"device {index}"] = (
            f"{device.name}, compute capability {device.major}.{device.minor}, "
            f"{device.total_memory / 2**30:.0f} GiB, {device.multi_processor_count} multiprocessors"
        )
    return facts


def run(options: argparse.Namespace) -> int:
    facts = info()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0
