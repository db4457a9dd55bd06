"""The benchmark has a row for every operator of the table, and times it against what it computes."""

import importlib.util
import json
import sys

import cases
import pytest
import torch

import fused_act

PATH = cases.ROOT / "benchmarks" / "operators.py"
pytestmark = pytest.mark.skipif(not PATH.exists(), reason="the benchmarks are not beside the tests")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fused_act_benchmark", PATH)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("op", fused_act.ops(), ids=lambda op: op.name)
def test_what_is_compared_computes_the_same(script, op, device):
    x = torch.randn(2, 4, 3, 6, device=device, dtype=torch.float64)
    for case in script.make_cases([op.name], ["relu", "silu", "softplus"]):
        values = case.parameters(x)
        y = getattr(torch.ops.fused_act, op.name)(x, **values)
        assert list(y.shape) == case.result_shape(x)
        torch.testing.assert_close(case.written_out()(x, **values), y)


@pytest.mark.parametrize(
    "name, forward, training",
    [("relu", 1.0, 2.5), ("relu_bias", 1.0, 2.5), ("add_act", 1.5, 4.0), ("silu_and_mul", 0.75, 2.0)],
)
def test_bytes(script, name, forward, training):
    """In copies of x. add_act reads two tensors and writes one, then reads three and writes two; of silu_and_mul the
    result is half as large as x."""
    (case,) = script.make_cases([name], ["relu"])
    assert case.copies("forward") == forward and case.copies("training") == training


def test_every_operator_has_its_rows(script, tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = "--device cpu --only forward backward training --dtypes float32 --layouts contiguous --repeats 1"
    script.main([*arguments.split(), "--shape", "1", "4", "2", "2", "--output", str(path)])
    rows = json.loads(path.read_text())["rows"]
    names = {case.name for case in script.make_cases([op.name for op in fused_act.ops()], ["relu", "silu", "gelu"])}
    for section in ("forward", "backward", "training"):
        assert {r["operator"] for r in rows if r["section"] == section} == names
    assert all(r["us"] > 0 for r in rows)
    assert "bias_act(gelu)" in capsys.readouterr().out


def test_overhead_and_compiled_rows(script, tmp_path):
    path = tmp_path / "results.json"
    arguments = (
        "--device cpu --only forward overhead --dtypes float32 --layouts contiguous --repeats 1 --operators relu"
    )
    script.main([*arguments.split(), "--calls", "2", "--batches", "2", "--compile", "--output", str(path)])
    calls = {(r["section"], r["call"]) for r in json.loads(path.read_text())["rows"]}
    assert calls >= {("forward", call) for call in ("fused", "eager", "torch.compile", "control")}
    assert calls >= {("overhead", way) for way in ("default", "packet", "functional", "control")}
