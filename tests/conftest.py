"""Fixtures shared by all tests: the operator (one per row of the table), the dtype and the device."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # oracle.py and cases.py, whatever the import mode

import cases

import fused_act

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # test_fuzz.py says that it skips
    pass
else:
    # max_examples is that of all tests together, of which each takes its part (test_fuzz.py). CI has the same examples
    # every time. No deadlines: the first example of a kind takes longer.
    common = dict(deadline=None, print_blob=True, database=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("ci", max_examples=200, derandomize=True, **common)
    settings.register_profile("nightly", max_examples=10_000, derandomize=False, **common)
    settings.load_profile(os.environ.get("FUSED_ACT_FUZZ") or "ci")

DTYPE_IDS = {dtype: str(dtype).removeprefix("torch.") for dtype in cases.DTYPES}


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than about ten seconds (deselect with -m 'not slow')")


def pytest_collection_modifyitems(items):
    """What is slow comes first, so that no process is left with it alone; before all else the slowest,
    test_sixth_operator.py, whose two tests share a build."""
    items.sort(key=lambda item: (not item.get_closest_marker("slow"), "test_sixth_operator" not in item.nodeid))


def dtype_params(dtypes):
    return [pytest.param(dtype, id=DTYPE_IDS[dtype]) for dtype in dtypes]


# What all operators share is tested on these; test_catalogue.py goes through the whole table.
DEEP = ("relu_hardswish", "hardsigmoid", "relu_bias", "div_leaky_relu", "min_bias_scale")
DEEP_OPS = [op for op in fused_act.ops() if op.name in DEEP or op.name == os.environ.get("FUSED_ACT_TEST_OPERATOR")]


@pytest.fixture(params=DEEP_OPS, ids=lambda op: op.name)
def op(request):
    return request.param


@pytest.fixture(params=[op for op in DEEP_OPS if cases.operands(op)], ids=lambda op: op.name)
def operand_op(request):
    """An operator that has tensor operands."""
    return request.param


@pytest.fixture(params=dtype_params(cases.DTYPES))
def dtype(request):
    return request.param


@pytest.fixture(params=dtype_params(cases.HALVES))
def half(request):
    return request.param


@pytest.fixture(params=dtype_params(cases.WIDES))
def wide(request):
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=cases.needs_cuda)])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def threads():
    """Restores the number of threads that a test changes."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def fresh_dynamo():
    """Compilations are counted, so none may be left over from another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
