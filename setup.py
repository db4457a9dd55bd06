"""Builds fused_act._C for the torch that this Python imports.

Environment:
    FUSED_ACT_CPU_ONLY=1    leave the CUDA kernels out, also where they could be built
    FUSED_ACT_CPU_SIMD=0    leave the CPU kernels for AVX2 and AVX-512 out: slow ones, built in a third of the time
    TORCH_CUDA_ARCH_LIST    CUDA architectures; default: those of the release wheels
    MAX_JOBS                compilers that run at a time; default: what cores and free memory allow
    CUDA_HOME               the CUDA toolkit; default: the one that the nvcc on PATH belongs to
    CXXFLAGS                for the C++ compiler, after those that are chosen here
"""

import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup

VERSION = Path("VERSION").read_text().strip()

# An sdist belongs to no torch: it has no local version label, and making one needs no torch.
if "sdist" in sys.argv:
    setup(version=VERSION, install_requires=["torch>=2.11"])
    sys.exit()

try:
    import torch
except ModuleNotFoundError:
    sys.exit("fused_act: torch, which the build takes its headers and flags from, is not installed in this Python.")

RELEASE_ARCHITECTURES = "7.5;8.0;8.6;9.0;10.0;12.0+PTX"
GIB_PER_COMPILER = 2.5  # bindings.cpp with torch's headers, the largest

CPU_SOURCE = "src/kernels/cpu/cpu.cpp"
# CUDA sources that are compiled for each size of an element, and in how many parts.
PARTS = {
    f"src/kernels/cuda/{name.lower()}.cu": int(parts)
    for name, parts in re.findall(r"k(\w+)Parts = (\d+)", Path("src/kernels/cuda/parts.h").read_text())
}
# In rising order, and linked after all else: of an inline function that several objects hold, the linker keeps the
# first, and that one must run on every CPU.
CPU_CAPABILITIES = {"DEFAULT": []}
if platform.machine() in ("x86_64", "AMD64") and os.environ.get("FUSED_ACT_CPU_SIMD") != "0":
    CPU_CAPABILITIES["AVX2"] = ["-mavx2", "-mfma", "-mf16c"]
    CPU_CAPABILITIES["AVX512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]


def find_cuda_home():
    """The folder of the CUDA toolkit, or None.

    torch takes the folder above the nvcc on PATH, which is wrong where that is a link or a wrapper script; nvcc itself
    knows better.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not home and (nvcc := shutil.which("nvcc")):
        dryrun = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
        top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
        home = os.path.realpath(top[1] if top else Path(os.path.realpath(nvcc)).parent.parent)
    home = home or "/usr/local/cuda"
    return home if Path(home, "bin", "nvcc").exists() else None


def default_max_jobs():
    memory = [int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024]
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's, which meminfo does not show
    if limit.exists() and limit.read_text().strip().isdigit():
        memory.append(int(limit.read_text()))
    return max(1, min(len(os.sched_getaffinity(0)), int(min(memory) / 2**30 / GIB_PER_COMPILER)))


def first_line(*command, pattern=".*"):
    return re.search(pattern, subprocess.run(command, capture_output=True, text=True, check=True).stdout)[0]


cpu_only_reason = None
if os.environ.get("FUSED_ACT_CPU_ONLY", "0") not in ("", "0"):
    cpu_only_reason = "FUSED_ACT_CPU_ONLY is set"
elif torch.version.cuda is None:
    cpu_only_reason = f"torch {torch.__version__} has no CUDA"
elif cuda_home := find_cuda_home():
    os.environ["CUDA_HOME"] = cuda_home  # cpp_extension reads it when it is imported
    os.environ["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or RELEASE_ARCHITECTURES
else:
    sys.exit(
        f"fused_act: torch {torch.__version__} is built for CUDA, but there is no nvcc: put that of a CUDA "
        f"{torch.version.cuda} toolkit on PATH or set CUDA_HOME, or set FUSED_ACT_CPU_ONLY=1 to build without CUDA."
    )

os.environ.setdefault("MAX_JOBS", str(default_max_jobs()))

from torch.utils import cpp_extension  # noqa: E402

torch_minor = ".".join(torch.__version__.split(".")[:2])
cuda_label = "cpu" if cpu_only_reason else "cu" + torch.version.cuda.replace(".", "")
version = f"{VERSION}+{cuda_label}torch{torch_minor}"


class BuildExtension(cpp_extension.BuildExtension):
    def run(self):
        if cpu_only_reason:
            print(f"fused_act: building the CPU-only library, because {cpu_only_reason}.", flush=True)
        if not self.inplace:
            self.run_command("build_py")  # the stub generator imports the built package
        super().run()
        package = Path(self.get_ext_fullpath("fused_act._C")).parent
        self.write_build_info(package / "_build_info.py")
        search_path = [str(package.resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
        subprocess.run([sys.executable, "-m", "fused_act._stubgen"], check=True, env=environment)

    def build_extension(self, ext):
        """Lets each source have flags of its own.

        torch's `compile` gives all sources the same flags, but some are compiled several times. So give it one source
        at a time, each in its own folder (its build.ninja and object lie there).
        """
        compile_with_ninja = self.compiler.compile

        def compile_units(sources, output_dir, extra_postargs, **options):
            units = []
            for source in sources:
                if source == CPU_SOURCE:
                    for name, flags in CPU_CAPABILITIES.items():
                        defines = [f"-DCPU_CAPABILITY={name}", f"-DCPU_CAPABILITY_{name}"]
                        units.append((source, f"cpu_{name}", defines + flags))
                elif source in PARTS:
                    for size, part in itertools.product((2, 4), range(PARTS[source])):
                        defines = [f"-DFUSED_ACT_BYTES={size}", f"-DFUSED_ACT_PART={part}"]
                        units.insert(0, (source, f"{Path(source).stem}_{8 * size}_{part}", defines))
                else:
                    units.insert(0, (source, Path(source).name, []))

            def compile_unit(unit):
                source, folder, flags = unit
                # Fresh lists: torch's compile appends to them.
                postargs = {compiler: given + flags for compiler, given in extra_postargs.items()}
                folder = os.path.join(output_dir, folder)
                return compile_with_ninja([source], output_dir=folder, extra_postargs=postargs, **options)

            # Without ninja, torch's compile changes the compiler object itself for each source.
            jobs = int(os.environ["MAX_JOBS"]) if self.use_ninja else 1
            with ThreadPoolExecutor(max(1, jobs)) as pool:
                return [file for objects in pool.map(compile_unit, units) for file in objects]

        self.compiler.compile = compile_units
        super().build_extension(ext)

    def write_build_info(self, path):
        compilers = [first_line(cpp_extension.get_cxx_compiler(), "--version")]
        architectures = []
        if not cpu_only_reason:
            compilers.append("nvcc " + nvcc_version)
            architectures = re.split("[; ]+", os.environ["TORCH_CUDA_ARCH_LIST"])
        path.write_text(
            "# Written by setup.py: what the library beside this file was built for.\n"
            f"version = {version!r}\n"
            f"torch = {torch.__version__!r}\n"
            f"cuda = {None if cpu_only_reason else torch.version.cuda!r}\n"
            f"cuda_architectures = {tuple(architectures)!r}\n"
            f"compilers = {tuple(compilers)!r}\n"
        )


cxx_flags = ["-g0", "-ffp-contract=off", "-fvisibility=hidden", *os.environ.get("CXXFLAGS", "").split()]
# What torch's at::vec and GCC's own AVX-512 headers would say thousands of times; torch is built with these too.
quiet_flags = ["-Wno-unknown-pragmas", "-Wno-psabi", "-Wno-maybe-uninitialized"]
sources = ["src/bindings.cpp", "src/autograd.cpp", "src/kernels/analysis.cpp", CPU_SOURCE]
macros = [("FUSED_ACT_X86_SIMD", None)] if "AVX2" in CPU_CAPABILITIES else []
nvcc_flags = []
if cpu_only_reason:
    make_extension = cpp_extension.CppExtension
else:
    make_extension = cpp_extension.CUDAExtension
    sources += sorted(map(str, Path("src/kernels/cuda").glob("*.cu")))
    macros.append(("FUSED_ACT_WITH_CUDA", None))
    nvcc_version = first_line(os.path.join(cuda_home, "bin", "nvcc"), "--version", pattern=r"(?<=, V)[\d.]+")
    # -compress-all: a third of the size; --compress-mode=size gains 6 % more, but nvcc knows it only since 12.8.
    # Kernels are optimised by default. -O3 would be for what launches them, too: twice as much code, in twice the time.
    nvcc_flags = ["-fmad=false", "-Xfatbin=-compress-all", "-Xcompiler=" + ",".join(["-O2", *cxx_flags])]

setup(
    version=version,
    # The C++ interface of torch changes with every minor version.
    install_requires=[f"torch=={torch_minor}.*"],
    ext_modules=[
        make_extension(
            "fused_act._C",
            sources,
            include_dirs=[os.path.abspath("src")],
            define_macros=macros,
            # -fopenmp is for the compiler only. Not linked, the calls bind to the OpenMP runtime that torch has loaded:
            # one thread pool, and torch.set_num_threads rules it.
            extra_compile_args={"cxx": ["-O3", *cxx_flags, *quiet_flags, "-fopenmp"], "nvcc": nvcc_flags},
            extra_link_args=["-s"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
