"""The architecture, proved: one more line in the list of operators gives a working operator, tested like the others."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import cases
import pytest

LIST = Path("src", "kernels", "operators.h")
NAME = "shift_hardswish_scale"
LINE = (
    f'OPERATOR({NAME}, "Tensor x, Tensor shift, float scale=2, int dim=1", '
    '"y = x + shift; (y * clamp((y + 3) / 6, 0, 1)) * scale", "a test", Add, HardswishWritten, Mul)'
)

pytestmark = pytest.mark.slow


def missing():
    if not (cases.ROOT / LIST).exists():
        return "the tests do not lie in a source tree"
    if not (shutil.which("g++") or shutil.which("c++")):
        return "there is no C++ compiler"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python's headers are not installed"
    try:
        import setuptools  # noqa: F401
    except ImportError:
        return "setuptools is not installed"
    return None


def add_line(file):
    """Inserts LINE before the first operator of the list, in a macro with a backslash at its end."""
    lines = file.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.lstrip().startswith("OPERATOR("))
    lines.insert(first, "  " + LINE + (" \\" if lines[first].rstrip().endswith("\\") else ""))
    file.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the package built from a copy of the sources in which one line is new."""
    if reason := missing():
        pytest.skip(reason)
    tree = tmp_path_factory.mktemp("sixth") / "tree"
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__", "_build_info.py", "*.pyi")
    shutil.copytree(cases.ROOT, tree, ignore=skip, symlinks=True)
    add_line(tree / LIST)
    site = tree.parent / "site"
    # -O3 takes the compiler 1.6 times as long, and every SIMD level as long as the first.
    env = {**os.environ, "FUSED_ACT_CPU_ONLY": "1", "FUSED_ACT_CPU_SIMD": "0", "CXXFLAGS": "-O1"}
    env.pop("PYTHONPATH", None)
    command = [
        sys.executable,
        "setup.py",
        "build",
        "--build-base",
        str(tree.parent / "build"),
        "--build-lib",
        str(site),
    ]
    run = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=1500)
    assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-6000:]}"
    return site


def python(site, *arguments, cwd):
    env = {**os.environ, "PYTHONPATH": str(site), "FUSED_ACT_TEST_OPERATOR": NAME}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=1500)


PROOF = f"""
import fused_act, inspect, torch
NAME = {NAME!r}
names = [op.name for op in fused_act.ops()]
assert NAME in names and len(names) >= 6, names
op = fused_act.ops()[names.index(NAME)]
assert [(p.name, p.kind, p.default) for p in op.parameters] == [("shift", "operand", None), ("scale", "scalar", 2.0)]

def written(x, shift, scale=2.0):
    y = x + shift[:, None]
    return y * torch.clamp((y + 3) / 6, 0, 1) * scale

fused = getattr(torch.ops.fused_act, NAME)
x = torch.linspace(-6, 6, 2 * 3 * 40).reshape(2, 3, 40)
shift = torch.tensor([0.5, -0.25, 0.0])
assert torch.equal(fused(x, shift), written(x, shift)), "forward"
assert torch.equal(fused(x, shift, scale=-0.3), written(x, shift, -0.3)), "forward with a scalar"

x64, shift64 = (x.double() + 0.013).requires_grad_(), shift.double().requires_grad_()
for order in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
    a, b = (order(lambda x, s: f(x, s).pow(2).sum(), (0, 1))(x64[..., ::8], shift64) for f in (fused, written))
    torch.testing.assert_close(a, b)
a, b = (torch.autograd.grad(f(x64, shift64).sum(), (x64, shift64), create_graph=True) for f in (fused, written))
torch.testing.assert_close(a, b)  # backward
a, b = (torch.autograd.grad(sum(g.pow(2).sum() for g in gs), (x64, shift64)) for gs in (a, b))
torch.testing.assert_close(a, b)  # double backward
t = torch.ones_like(x), torch.ones_like(shift)
a, b = (torch.func.jvp(f, (x, shift), t) for f in (fused, written))
torch.testing.assert_close(a, b)  # jvp

y = fused(x.transpose(1, 2).contiguous().transpose(1, 2).to("meta"), shift.to("meta"))
assert y.is_meta and y.shape == x.shape and y.stride() == (120, 1, 3), "meta"
torch.testing.assert_close(torch.vmap(fused, (0, None, None, None))(x, shift, 2.0, 0), written(x, shift))
function = getattr(fused_act._C, NAME)
assert torch.equal(function(x, shift), written(x, shift)) and NAME in function.__doc__, "pybind"
assert callable(getattr(fused_act._C, NAME + "_backward"))
assert list(inspect.signature(getattr(fused_act.functional, NAME)).parameters) == ["x", "shift", "scale", "dim"]
module = getattr(fused_act.nn, op.module)(3, scale=0.5)
assert [n for n, _ in module.named_parameters()] == ["shift"] and "scale=0.5" in repr(module)
torch.testing.assert_close(module(x), written(x, torch.zeros(3), 0.5))
print("proved")
"""


def test_one_line_gives_an_operator(site, tmp_path):
    run = python(site, "-c", PROOF, cwd=tmp_path)
    assert run.returncode == 0 and run.stdout.strip() == "proved", run.stderr


def test_generic_tests_take_it_up_unchanged(site, tmp_path):
    """The suite itself, on the new operator alone; without the test of README's table, which is written by hand."""
    tests = tmp_path / "tests"
    shutil.copytree(Path(__file__).parent, tests, ignore=shutil.ignore_patterns("__pycache__"))
    select = f"{NAME} and not cuda and not readme and not slow and not inductor"
    options = ["-q", "-x", "--import-mode=importlib", "-p", "no:cacheprovider", "-m", "not slow", "-k", select]
    run = python(site, "-m", "pytest", *options, str(tests), cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    assert "passed" in run.stdout
