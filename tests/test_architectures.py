"""The CUDA kernels for every architecture of a release wheel, of which the machine that runs the tests has one or none:
a few kernels of each kind are compiled, and what the compiler says of them is read."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import cases
import pytest
import torch

SOURCES = cases.ROOT / "src"
SETUP = cases.ROOT / "setup.py"
NVCC_PATH = [os.environ.get("CUDA_HOME", "") + "/bin", os.environ["PATH"], "/usr/local/cuda/bin"]
NVCC = shutil.which("nvcc", path=os.pathsep.join(NVCC_PATH))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SOURCES / "kernels").exists(), reason="the tests do not lie in a source tree"),
    pytest.mark.skipif(not NVCC, reason="there is no nvcc"),
]

PROGRAM = """
#include "kernels/operators.h"
#include "kernels/codes.h"
#include "kernels/cuda/kernels.cuh"
namespace fused_act {
#define FLAT(OP, BYTES, MODE, INDEX) \\
  template __global__ void flat_kernel<OP, BYTES, Mode::MODE, INDEX>(const __grid_constant__ Args<OP, Compute<BYTES>>);
#define SEVERAL(OP, BYTES, MODE, I) \\
  template __global__ void several_kernel<OP, BYTES, Mode::MODE, I>(const __grid_constant__ Args<OP, Compute<BYTES>>, \\
                                                                    const Several);
#define SPREAD(OP, BYTES, MODE) \\
  template __global__ void spread_kernel<OP, BYTES, Mode::MODE>(const __grid_constant__ Args<OP, Compute<BYTES>>);
#define ROWS(OP, BYTES) \\
  template __global__ void row_kernel<OP, BYTES, Mode::backward>(const __grid_constant__ Args<OP, Compute<BYTES>>, \\
                                                                 const Rows);
#define COLUMNS(OP, BYTES) \\
  template __global__ void column_kernel<OP, BYTES, Mode::backward>(const __grid_constant__ Args<OP, Compute<BYTES>>, \\
                                                                    const Columns);
using Bias = ops::relu_bias::Compiled;
using One = Decoder<1, false>;
using Told = Decoder<1, false, Derivatives::constant>;
using Two = Decoder<1, true, Derivatives::constant>;
using Curved = Framed<Gelu, false>;
using Exactly = Exact<Chain<Add, Gelu>, Beside::axis>;
using Both = Exact<Chain<MulOperand, Add, Gelu>, Beside::axis, 0b11>;
using Residual = Exact<Chain<Add, Add, Gelu>, Beside::axis>;
using Crowded = Exact<Gated<Chain<Add, Gelu>, Chain<Add>>, Beside::axis, 0b101>;
using Loose = Exact<Chain<Silu, MulOperand>, Beside::x>;
using Pairwise = Exact<Gated<Chain<MinScalar, SiluScaled>, Chain<AbsClamp, AddOne>>, Beside::pairs>;
using Among = Exact<Scaled<Gelu>, Beside::axis>;
using Least = ops::min_bias_scale::Compiled;
using Rectified = Exact<Chain<Add, Add, Relu>, Beside::axis>;
using Steps = ops::relu_leaky_relu_gelu_sigmoid::Compiled;
FLAT(Bias, 2, forward, uint32_t)
FLAT(Bias, 4, forward, uint32_t)
FLAT(Bias, 2, coded, uint32_t)
FLAT(Bias, 4, coded, uint32_t)
FLAT(One, 2, backward, uint32_t)
FLAT(One, 4, backward, uint32_t)
FLAT(Two, 2, backward, uint32_t)
ROWS(One, 4)
ROWS(Told, 4)
COLUMNS(Told, 4)
ROWS(Two, 2)
COLUMNS(Two, 2)
FLAT(Curved, 2, forward, uint32_t)
FLAT(Curved, 4, forward, uint32_t)
FLAT(Exactly, 2, forward, uint32_t)
SEVERAL(ops::gelu::Compiled, 2, forward, int64_t)
SEVERAL(ops::gelu::Compiled, 4, forward, int64_t)
SEVERAL(ops::gelu::Compiled, 2, backward, int64_t)
SEVERAL(Exactly, 2, forward, uint32_t)
SEVERAL(Exactly, 4, forward, uint32_t)
SEVERAL(Exactly, 2, backward, uint32_t)
SEVERAL(Both, 2, forward, uint32_t)
SEVERAL(Both, 2, backward, uint32_t)
SEVERAL(Residual, 2, forward, uint32_t)
SEVERAL(Residual, 2, backward, uint32_t)
SEVERAL(Crowded, 2, forward, uint32_t)
SEVERAL(Crowded, 2, backward, uint32_t)
SPREAD(Loose, 2, forward)
SPREAD(Loose, 2, backward)
SPREAD(Loose, 4, backward)
ROWS(Exactly, 2)
ROWS(Both, 2)
ROWS(Crowded, 2)
COLUMNS(One, 2)
COLUMNS(Exactly, 2)
COLUMNS(Both, 2)
COLUMNS(Both, 4)
COLUMNS(Residual, 2)
COLUMNS(Crowded, 2)
FLAT(Pairwise, 2, backward, uint32_t)
SEVERAL(Among, 2, forward, uint32_t)
SEVERAL(Among, 2, backward, uint32_t)
FLAT(Among, 2, backward, uint32_t)
FLAT(Among, 4, backward, uint32_t)
ROWS(Among, 2)
ROWS(Among, 4)
COLUMNS(Among, 2)
COLUMNS(Among, 4)
SEVERAL(Least, 2, coded, uint32_t)
SEVERAL(Rectified, 2, coded, uint32_t)
SEVERAL(Steps, 2, forward, int64_t)
SEVERAL(Steps, 2, backward, int64_t)
}  // namespace fused_act
"""
KERNELS_IN_PROGRAM = len(re.findall(r"^(?:FLAT|SEVERAL|SPREAD|ROWS|COLUMNS)\(", PROGRAM, re.MULTILINE))


def release_architectures():
    if not SETUP.exists():
        return []
    listed = re.search(r'RELEASE_ARCHITECTURES = "(.+)"', SETUP.read_text())[1]
    return [int(a.removesuffix("+PTX").replace(".", "")) for a in listed.split(";")]


@pytest.mark.parametrize("architecture", release_architectures())
def test_kernels_of_an_architecture(architecture, tmp_path):
    """They compile without warnings and keep nothing in memory for want of registers. Where launch.cuh asks for
    programmatic dependent launch, from compute capability 9.0 on, they wait before all else. From 10.0 on flat tensors
    are read and written 32 bytes at a time."""
    source = tmp_path / "kernels.cu"
    source.write_text(PROGRAM)
    command = [
        NVCC, "-std=c++17", "-O3", "-fmad=false", "--expt-relaxed-constexpr", "-I", SOURCES, f"-arch=sm_{architecture}",
        "-Xptxas", "-v", "-cubin", "--keep", "--keep-dir", tmp_path, "-o", tmp_path / "kernels.cubin", source,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert len(spilled) == KERNELS_IN_PROGRAM and max(spilled) <= 16, done.stderr

    entries = (tmp_path / "kernels.ptx").read_text().split(".entry")[1:]
    assert len(entries) == KERNELS_IN_PROGRAM
    for entry in entries:
        wait = entry.find("griddepcontrol.wait")
        first = min(at for at in (entry.find(what) for what in ("ld.global", "st.global")) if at >= 0)
        assert 0 <= wait < first if architecture >= 90 else wait < 0
        # What takes vectors side by side does it in 32 bytes where an instruction moves as many.
        flat = re.match(r"\s*\S*flat_kernel", entry) and not re.match(r"\s*\S*(Exact|Framed|ModeE4)", entry)
        for access in ("ld", "st"):
            wide = re.search(rf"{access}\.global\.(v8\.[buf]32|v4\.[buf]64)", entry)
            assert bool(wide) == bool(flat and architecture >= 100), entry[:200]


@pytest.mark.skipif(not shutil.which("cmake"), reason="there is no cmake")
@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch has no CUDA")
def test_cmake_compiles_kernels(tmp_path):
    """An object of them: all would take as long as the wheel. Of an inline function that several objects have, the
    linker keeps the first, and that must run on every CPU."""
    configure = ["cmake", "-S", cases.ROOT, "-B", tmp_path, "-G", "Unix Makefiles", "-DFUSED_ACT_CUDA=ON"]
    configure += [f"-DTORCH_ROOT={Path(torch.__file__).parent}", f"-DCMAKE_CUDA_COMPILER={NVCC}"]
    build = ["cmake", "--build", tmp_path, "--target", "decoded_4_0"]
    for command in ([*configure, "-DCMAKE_CUDA_ARCHITECTURES=90-real"], build):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    link = (tmp_path / "CMakeFiles" / "fused_act.dir" / "link.txt").read_text()
    objects = re.findall(r"(\w+)\.dir/", link)
    cpu = [name.startswith("cpu_") for name in objects]
    assert any(cpu) and not all(cpu) and cpu == sorted(cpu), objects
