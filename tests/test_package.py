"""The installed package: every operator of the table has everything, and the package says what it is."""

import ast
import dataclasses
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch
from oracle import assert_same

import fused_act
from fused_act import operators

PACKAGE = Path(fused_act.__file__).resolve().parent
SOURCES = cases.ROOT / "python" / "fused_act"  # empty where the tests do not lie in a source tree
SUFFIXES = ("_backward", "_jvp", "_double_backward")


def dispatcher_names(op):
    return [op.name, *(op.name + s for s in SUFFIXES)]


# ---------------------------------------------------------------------------------------------------------------------
# The table


def test_the_five_seed_operators_are_listed():
    names = [op.name for op in fused_act.ops()]
    assert {"relu_hardswish", "hardsigmoid", "relu_bias", "div_leaky_relu", "min_bias_scale"} <= set(names)
    assert len(names) == len(set(names))


def test_table_is_frozen_data(op):
    assert isinstance(fused_act.ops(), tuple)
    assert dataclasses.is_dataclass(op)
    with pytest.raises(dataclasses.FrozenInstanceError):
        op.name = "other"
    for p in op.parameters:
        assert p.kind in ("scalar", "operand")
    assert isinstance(hash(op), int)


def test_schema_of_the_table_is_the_dispatchers(op):
    schema = getattr(torch.ops.fused_act, op.name).default._schema
    assert torch._C.parse_schema(re.sub(r"^(fused_act::)?", "fused_act::", op.schema)) == schema
    names = [a.name for a in schema.arguments]
    assert names == ["x", *(p.name for p in op.parameters)] + (["dim"] if cases.operands(op) else [])
    for p, argument in zip(op.parameters, schema.arguments[1:]):
        assert str(argument.type) == ("Tensor" if p.kind == "operand" else "float")
        assert argument.default_value == p.default


def test_expression_runs_and_states_its_gradient(op):
    import oracle

    x = cases.filled((3, 5), torch.float64, op)
    y = oracle.evaluate(op, x, cases.make_params(op, x.shape, torch.float64))
    assert y.shape == x.shape and y.dtype == x.dtype
    assert isinstance(op.gradient, str) and op.gradient.strip()


@pytest.mark.parametrize(
    "name, schema",
    [
        ("relu_hardswish", "(Tensor x) -> Tensor"),
        ("hardsigmoid", "(Tensor x) -> Tensor"),
        ("relu_bias", "(Tensor x, Tensor bias, int dim=1) -> Tensor"),
        ("div_leaky_relu", "(Tensor x, float divisor, float negative_slope=0.01) -> Tensor"),
        ("min_bias_scale", "(Tensor x, float value, Tensor bias, float scale, int dim=1) -> Tensor"),
    ],
)
def test_schemas_of_the_seed_operators(name, schema):
    assert torch._C.parse_schema(f"fused_act::{name}{schema}") == getattr(torch.ops.fused_act, name).default._schema


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is missing for any operator


def test_dispatcher_operators_and_kernels(op):
    assert sorted(n.removeprefix("fused_act::").split(".")[0] for n in op.derived) == sorted(dispatcher_names(op)[1:])
    keys = ["CPU", "Meta", "Autograd"] + (["CUDA"] if cases.cuda_built() else [])
    for name in dispatcher_names(op):
        missing = [k for k in keys if not has_kernel(name, k)]
        assert not missing, f"fused_act::{name} has no kernel for {missing}"


def has_kernel(name, key):
    if key == "Autograd":  # registered for the alias or for each device
        return cases.has_kernel(name, key) or cases.has_kernel(name, "AutogradCPU")
    return cases.has_kernel(name, key)


def test_documented_table_is_that_of_the_library():
    file = cases.ROOT / "docs" / "operators.md"
    if not file.exists():
        pytest.skip("the tests do not lie in a source tree")
    assert file.read_text() == operators.markdown(), "python -m fused_act operators > docs/operators.md"


def test_every_backend_of_the_build_has_the_same_operators():
    for key in ("CPU", "CUDA", "Meta"):
        have = {op.name for op in fused_act.ops() if cases.has_kernel(op.name, key)}
        assert have in (set(), {op.name for op in fused_act.ops()}), f"{key} lacks some operators"


def test_pybind_functions_with_docstrings(op):
    for name in dispatcher_names(op):
        function = getattr(fused_act._C, name)
        assert callable(function)
        doc = function.__doc__
        assert doc and name in doc and "x: torch.Tensor" in doc or "Tensor" in doc, doc
    assert op.expression.split(";")[-1].strip() in getattr(fused_act._C, op.name).__doc__


def test_pybind_functions_compute_the_same(op):
    names = cases.operands(op)
    x = cases.filled((3, 5, 4), torch.float32, op).requires_grad_()
    params = cases.make_params(op, x.shape, torch.float32)
    y = getattr(fused_act._C, op.name)(x, **params)
    assert_same(y, cases.call(op, x, params))
    assert y.requires_grad, "gradients flow through the plain function too"
    go = torch.ones_like(y)
    grads = getattr(fused_act._C, op.name + "_backward")(go, x.detach(), **params)
    for got, want in zip(grads if names else [grads], cases.backward(op, go, x.detach(), params), strict=True):
        assert_same(got, want)
    # positional, in the order of the schema, as written in the issue: NAME_backward(grad_output, x, ...)
    values = [params[p.name] for p in op.parameters if p.name in params]
    if len(values) == len(op.parameters):
        assert_same(getattr(fused_act._C, op.name)(x, *values), y)


def test_functional(op):
    function = getattr(fused_act.functional, op.name)
    assert inspect.isfunction(function) and function.__name__ == op.name
    signature = inspect.signature(function)
    expected = ["x", *(p.name for p in op.parameters)] + (["dim"] if cases.operands(op) else [])
    assert list(signature.parameters) == expected
    for p in op.parameters:
        default = signature.parameters[p.name].default
        assert default == p.default if p.default is not None else default is inspect.Parameter.empty
    if cases.operands(op):
        assert signature.parameters["dim"].default == 1
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())
    assert signature.return_annotation is not inspect.Signature.empty
    doc = inspect.getdoc(function)
    assert doc and op.expression.split(";")[-1].strip() in doc
    assert all(p.name in doc for p in op.parameters)
    x = cases.filled((3, 5, 4), torch.float32, op)
    params = cases.make_params(op, x.shape, torch.float32)
    assert_same(function(x, **params), cases.call(op, x, params))


def test_module_exists(op):
    cls = getattr(fused_act.nn, op.module)
    assert issubclass(cls, torch.nn.Module) and cls.__doc__
    assert re.fullmatch(r"[A-Z]\w*", op.module)


def test_modules_have_distinct_names():
    names = [op.module for op in fused_act.ops()]
    assert len(names) == len(set(names))


def test_public_names(op):
    """Star imports and completion list the operator."""
    assert op.name in dir(fused_act.functional) and op.module in dir(fused_act.nn)
    for module, name in ((fused_act.functional, op.name), (fused_act.nn, op.module)):
        assert name in getattr(module, "__all__", [name])


def test_vmap_rules(op):
    """A rule, not the fall-back loop (which warns)."""
    import warnings

    x = cases.filled((2, 3, 5), torch.float32, op)
    params = cases.make_params(op, (3, 5), torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.vmap(lambda t: cases.call(op, t, params))(x)


def test_readme_has_a_row(op):
    readme = cases.ROOT / "README.md"
    if not readme.exists():
        pytest.skip("the tests do not lie in a source tree with a README.md")
    rows = [line for line in readme.read_text().splitlines() if line.startswith("|") and f"`{op.name}" in line]
    assert rows, f"README.md has no table row for {op.name}"


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_typing_files():
    assert (PACKAGE / "py.typed").exists()
    assert (PACKAGE / "_C.pyi").exists()


def test_type_stub(op):
    """Every function of the library, with annotations that Python can parse."""
    tree = ast.parse((PACKAGE / "_C.pyi").read_text())
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for name in dispatcher_names(op):
        assert name in functions, f"_C.pyi lacks {name}"
        arguments = functions[name].args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        assert all(a.annotation is not None for a in every) and functions[name].returns is not None
    stubbed = [a.arg for a in functions[op.name].args.posonlyargs + functions[op.name].args.args]
    assert stubbed[: 1 + len(op.parameters)] == ["x", *(p.name for p in op.parameters)]


def test_one_shared_library():
    libraries = sorted(p.name for p in PACKAGE.rglob("*.so*"))
    assert len(libraries) == 1 and libraries[0].startswith("_C."), libraries
    siblings = [p.name for p in PACKAGE.parent.glob("fused_act*.libs")]
    assert not siblings, "libtorch or libcudart is copied into the wheel"


def distribution():
    for found in importlib.metadata.distributions(path=[str(PACKAGE.parent)]):
        if found.metadata["Name"].replace("-", "_") == "fused_act":
            return found
    pytest.skip("fused_act is not installed from a wheel here")


def test_wheel_metadata():
    found = distribution()
    version = found.version
    label = r"cpu" if not cases.cuda_built() else "cu" + torch.version.cuda.replace(".", "")
    minor = ".".join(torch.__version__.split(".")[:2])
    assert re.fullmatch(rf"\d+\.\d+\.\d+\S*\+{label}torch{re.escape(minor)}", version), version
    assert version.split("+")[0] == fused_act.__version__.split("+")[0]
    requires = [r for r in found.requires or [] if re.match(r"torch\b", r)]
    assert [re.sub(r"[\s()]", "", r) for r in requires] == [f"torch=={minor}.*"]
    extras = found.metadata.get_all("Provides-Extra") or []
    assert {"bench", "demo"} <= set(extras)
    assert found.metadata["Summary"] and found.metadata["Requires-Python"]


def test_wheel_contents():
    files = [str(f) for f in distribution().files or []]
    inside = [f for f in files if f.startswith("fused_act/")]
    assert any(re.fullmatch(r"fused_act/_C\..*\.so", f) for f in inside)
    assert {"fused_act/py.typed", "fused_act/_C.pyi", "fused_act/_build_info.py"} <= set(inside)
    modules = {f"fused_act/{f.relative_to(SOURCES)}" for f in SOURCES.rglob("*.py")}
    assert modules <= set(inside), f"not in the wheel: {modules - set(inside)}"
    foreign = [f for f in files if re.search(r"\.(cpp|cu|cuh|h|o)$", f) or f.split("/")[0] in ("tests", "src")]
    assert not foreign, foreign
    assert any("licen" in f.lower() for f in files), "the licence text is missing"


# ---------------------------------------------------------------------------------------------------------------------
# Command line and import


def python(*arguments, env=None):
    """A fresh interpreter outside the source tree, with this one's search path."""
    path = os.pathsep.join(p for p in [str(PACKAGE.parent), *sys.path] if p)
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_info_command():
    run = python("-m", "fused_act", "info")
    assert run.returncode == 0, run.stderr
    assert torch.__version__ in run.stdout and fused_act.__version__ in run.stdout
    for word in ("CUDA", "torch", "Python"):
        assert word in run.stdout
    assert re.search(r"(?i)avx2|avx-?512|default|scalar", run.stdout), "the SIMD level is missing"


def test_command_line_help_and_unknown_command():
    assert python("-m", "fused_act", "--help").returncode == 0
    run = python("-m", "fused_act", "nonsense")
    assert run.returncode == 2 and "Traceback" not in run.stderr


MISMATCH = """
import torch, torch.version
torch.__version__ = torch.version.__version__ = {found!r}
import sys
try:
    import fused_act
except ImportError as error:
    assert "fused_act._C" not in sys.modules, "the library was loaded before the check"
    print(error)
else:
    print("imported")
"""


@pytest.mark.parametrize("found", ["2.99.0", "1.13.1+cu117"])
def test_another_torch_is_one_import_error(found):
    """It names both versions and the command that mends it, before the library is loaded."""
    run = python("-c", MISMATCH.format(found=found))
    assert run.returncode == 0, run.stderr
    assert found in run.stdout
    assert torch.__version__.split("+")[0] in run.stdout or ".".join(torch.__version__.split(".")[:2]) in run.stdout
    assert "pip install" in run.stdout
    assert run.stdout.strip() != "imported"


@pytest.mark.parametrize("patch", [".99", ".0"])
def test_another_patch_release_of_torch_is_accepted(patch):
    run = python("-c", MISMATCH.format(found=".".join(torch.__version__.split(".")[:2]) + patch))
    assert run.stdout.strip() == "imported", run.stdout + run.stderr


LIBRARY_ALONE = """
import sys, torch
torch.ops.load_library({library!r})
assert "fused_act" not in sys.modules
x = torch.tensor([[-1.0, 4.0]], requires_grad=True)
y = torch.ops.fused_act.relu_hardswish(x)
y.sum().backward()
assert y.tolist() == [[0.0, 4.0]] and x.grad.tolist() == [[0.0, 1.0]], (y, x.grad)
assert torch.ops.fused_act.relu_bias(x.detach().to("meta"), torch.zeros(2, device="meta")).shape == (1, 2)
print("ok")
"""


def test_library_registers_by_itself():
    """Loaded without Python's package, as a C++ program does: kernels, autograd and meta are there."""
    (library,) = PACKAGE.glob("_C.*so")
    run = python("-c", LIBRARY_ALONE.format(library=str(library)))
    assert run.returncode == 0 and run.stdout.strip() == "ok", run.stderr


def test_import_is_quiet_and_quick():
    """No output, no CUDA initialisation, and little beyond the import of torch."""
    script = (
        "import torch, time; t = time.perf_counter(); import fused_act; "
        "print(time.perf_counter() - t); assert not torch.cuda.is_initialized(); import sys; "
        "assert 'fused_act._fuse' not in sys.modules and {*fused_act.__all__} <= {*dir(fused_act)}; "
        "from fused_act import *; assert fuse is fused_act.fuse and explain is fused_act.explain"
    )
    run = python("-W", "error", "-c", script)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert float(run.stdout) < 3.0


def test_reload_and_replacement():
    """What somebody has put in the place of a name that is imported when it is asked for, stays."""
    script = (
        "import importlib, torch, fused_act; fused_act.fuse = print; "
        "assert fused_act.explain and fused_act.fuse is print; importlib.reload(fused_act); "
        "y = torch.vmap(torch.ops.fused_act.relu)(torch.tensor([[-1.0], [2.0]])); assert y.tolist() == [[0.0], [2.0]]"
    )
    run = python("-W", "error", "-c", script)
    assert run.returncode == 0, run.stderr


def test_one_openmp_runtime():
    """The library brings no thread pool of its own."""
    script = "import fused_act; print(open('/proc/self/maps').read())"
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc")
    run = python("-c", script)
    runtimes = {
        line.split()[-1] for line in run.stdout.splitlines() if re.search(r"lib(gomp|iomp5|omp)[-.\w]*\.so", line)
    }
    assert len(runtimes) <= 1, runtimes


# ---------------------------------------------------------------------------------------------------------------------
# The map from CONTRACT.md to the tests


COVERAGE = Path(__file__).with_name("COVERAGE.md")


def test_tests_named_in_coverage_exist():
    defined = set()
    for file in COVERAGE.parent.glob("test_*.py"):
        defined |= {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}
    named = set(re.findall(r"`(test_\w+)`", COVERAGE.read_text()))
    files = {f.stem for f in COVERAGE.parent.glob("test_*.py")}
    assert named and not named - defined - files, (
        f"COVERAGE.md names tests that do not exist: {named - defined - files}"
    )


def test_every_rule_of_the_contract_is_mapped():
    contract = cases.ROOT.parent / "shared" / "CONTRACT.md"
    if not contract.exists():
        pytest.skip("CONTRACT.md does not lie beside this source tree")
    rules = {
        line.split("|")[1].strip()
        for line in contract.read_text().splitlines()
        if line.startswith("| ") and not line.startswith(("| ---", "| rule"))
    }
    mapped = {line.split("|")[1].strip() for line in COVERAGE.read_text().splitlines() if line.startswith("| ")}
    assert not rules - mapped, f"COVERAGE.md lacks {rules - mapped}"
