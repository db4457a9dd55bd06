"""Chains found in real models (../shared/kernelbench.json) that one of the operators covers, with their shapes."""

import json

import cases
import oracle
import pytest
import torch
from cases import tracked
from oracle import assert_same

import fused_act

DATA = cases.ROOT.parent / "shared" / "kernelbench.json"

# The steps of a run, by name, and how an operator takes their arguments.
OPERATORS = {
    ("relu", "hardswish"): ("relu_hardswish", lambda run: {}),
    ("hardsigmoid",): ("hardsigmoid", lambda run: {}),
    ("relu", "add"): ("relu_bias", lambda run: {"bias": operand(run[1], 0)}),
    ("div", "leaky_relu"): (
        "div_leaky_relu",
        lambda run: {"divisor": run[0]["value"], "negative_slope": run[1]["negative_slope"]},
    ),
    ("min", "add", "mul"): (
        "min_bias_scale",
        lambda run: {"value": run[0]["value"], "bias": operand(run[1], 0), "scale": run[2]["value"]},
    ),
}


def operand(step, seed):
    return cases.operand_values(step["shape"], torch.float32, seed)


def eager(run, x, operands):
    """The run as its model writes it, step by step."""
    for step in run:
        name, form = step["op"], step.get("operand")
        other = step.get("value") if form in (None, "scalar") else None
        if form in ("channel", "full"):
            other = operands[0]
        elif form == "scalar_tensor":
            other = torch.tensor(step["value"], device=x.device)
        if name == "relu":
            x = torch.relu(x)
        elif name == "hardswish":
            x = x * oracle.clamp((x + 3) / 6, 0, 1) if "as_written" in step else torch.nn.functional.hardswish(x)
        elif name == "leaky_relu":
            x = torch.nn.functional.leaky_relu(x, step["negative_slope"])
        elif name == "hardsigmoid":
            x = torch.nn.functional.hardsigmoid(x)
        else:
            x = {"add": torch.add, "mul": torch.mul, "div": torch.div, "min": torch.min}[name](x, other)
    return x


def covered_runs():
    if not DATA.exists():
        return []
    runs = []
    for problem in json.loads(DATA.read_text())["problems"]:
        for run, shape in zip(problem["runs"], problem["tensor_shape_at_run"]):
            steps = tuple(step["op"] for step in run)
            if steps in OPERATORS and all(
                s.get("operand") in (None, "scalar", "channel", "scalar_tensor") for s in run
            ):
                runs.append(pytest.param(run, shape, id=f"{problem['level']}-{problem['id']}"))
    return runs


RUNS = covered_runs()
ABSENT = "the KernelBench census (kernelbench.json) does not lie beside this source tree"


@pytest.mark.skipif(not DATA.exists(), reason=ABSENT)
def test_every_seed_chain_occurs_in_the_data():
    found = {OPERATORS[tuple(step["op"] for step in p.values[0])][0] for p in RUNS}
    assert found == {name for name, _ in OPERATORS.values()}


@pytest.mark.skipif(not DATA.exists(), reason=ABSENT)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("run, shape", RUNS)
def test_chain_of_a_model(run, shape, layout, device):
    """Bit-identical to the model's own chain in float32, with its shape but a smaller batch; gradients agree."""
    budget = 2**21 if device.type == "cpu" else 2**24
    per_row = torch.Size(shape[1:]).numel()
    shape = (max(1, min(shape[0], budget // per_row)), *shape[1:])
    name, arguments = OPERATORS[tuple(step["op"] for step in run)]
    (op,) = (op for op in fused_act.ops() if op.name == name)
    x = cases.LAYOUTS[layout](cases.filled(shape, torch.float32, op)).to(device)
    params = cases.with_operands(arguments(run), lambda t: t.to(device))
    function = getattr(torch.ops.fused_act, name)
    leaf, own, leaves = tracked(x, params)
    actual = function(leaf, **own)
    actual_grads = torch.autograd.grad(actual, leaves, torch.ones_like(x))
    eager_leaf, eager_own, eager_leaves = tracked(x, params)
    expected = eager(run, eager_leaf, [v for v in eager_own.values() if isinstance(v, torch.Tensor)])
    expected_grads = torch.autograd.grad(expected, eager_leaves, torch.ones_like(x))
    assert_same(actual, expected)
    for a, b in zip(actual_grads, expected_grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
