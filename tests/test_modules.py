"""fused_act.nn: one module per operator, with the parameters one expects."""

import copy
import inspect
import io
import pickle

import cases
import pytest
import torch
from cases import call
from oracle import assert_same

import fused_act

CHANNELS = 6


def module_class(op):
    return getattr(fused_act.nn, op.module)


def make_module(op, **more):
    """The module and the arguments of the same call."""
    arguments = dict(cases.some_scalars(op))
    if cases.operands(op):
        arguments["num_features"] = CHANNELS
    return module_class(op)(**arguments, **more)


def params_of(op, module):
    return {p.name: getattr(module, p.name) for p in op.parameters}


def randomise(module):
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.copy_(cases.operand_values(p.shape, p.dtype, k))
    return module


def test_names_of_the_seed_modules():
    names = {op.name: op.module for op in fused_act.ops()}
    expected = {
        "relu_hardswish": "ReLUHardswish",
        "hardsigmoid": "Hardsigmoid",
        "relu_bias": "ReLUBias",
        "div_leaky_relu": "DivLeakyReLU",
        "min_bias_scale": "MinBiasScale",
    }
    assert {k: names.get(k) for k in expected} == expected


def test_modules_take_part_in_multiple_inheritance():
    """As torch.nn's: `__init__` goes on to the next class."""

    class Flag(torch.nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.flag = 1

    for base in (torch.nn.ReLU, fused_act.nn.ReLU, fused_act.nn.GELU):
        assert type("Both", (base, Flag), {})().flag == 1


def test_generated_functions_have_a_source():
    """For tracebacks, and for those who ask."""
    assert inspect.getsource(fused_act.functional.silu).startswith("def silu(x: Tensor) -> Tensor:")
    assert "functional.relu_bias(x, self.bias" in inspect.getsource(fused_act.nn.ReLUBias.forward)


def test_signatures_of_the_seed_modules():
    nn = fused_act.nn
    nn.ReLUHardswish()
    nn.Hardsigmoid()
    assert nn.ReLUBias(3).dim == 1 and nn.ReLUBias(3, 0).dim == 0
    assert nn.DivLeakyReLU(2.0).negative_slope == 0.01 and nn.DivLeakyReLU(2.0, 0.3).negative_slope == 0.3
    m = nn.MinBiasScale(3, 0.5, 2.0)
    assert (m.value, m.scale, m.dim, tuple(m.bias.shape)) == (0.5, 2.0, 1, (3,))
    assert nn.ReLUBias(3, device="meta").bias.is_meta
    assert nn.ReLUBias(3, dtype=torch.float64).bias.dtype == torch.float64


def test_module_is_the_operator(op, dtype, device):
    module = randomise(make_module(op).to(device=device, dtype=dtype))
    x = cases.filled((4, CHANNELS, 5), dtype, op).to(device)
    y = module(x)
    assert_same(y, call(op, x, params_of(op, module)))
    if cases.operands(op):
        y.sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())


def test_parameters(op):
    module = make_module(op)
    assert isinstance(module, torch.nn.Module)
    assert [n for n, _ in module.named_parameters()] == cases.operands(op)
    for p in module.parameters():
        assert p.shape == (CHANNELS,) and p.dtype == torch.get_default_dtype() and (p == 0).all() and p.requires_grad
    for name, value in cases.some_scalars(op).items():
        assert getattr(module, name) == value
    assert list(module.buffers()) == []


def test_dim(operand_op):
    module = randomise(make_module(operand_op, dim=2))
    x = cases.filled((3, 4, CHANNELS), torch.float32, operand_op)
    assert_same(module(x), call(operand_op, x, {**params_of(operand_op, module), "dim": 2}))


def test_device_and_dtype_arguments(operand_op, dtype, device):
    module = make_module(operand_op, device=device, dtype=dtype)
    for p in module.parameters():
        assert p.dtype == dtype and p.device.type == device.type


def test_state_dict_round_trip(op):
    module = randomise(make_module(op))
    state = module.state_dict()
    assert list(state) == cases.operands(op)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other = make_module(op)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    x = cases.filled((4, CHANNELS), torch.float32, op)
    assert_same(other(x), module(x))


def test_state_dict_of_another_size_is_refused(operand_op):
    state = {k: torch.zeros(CHANNELS + 1) for k in make_module(operand_op).state_dict()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        make_module(operand_op).load_state_dict(state)


def test_repr_shows_every_argument(op):
    module = make_module(op)
    text = repr(module)
    assert text.startswith(op.module + "(")
    for name, value in cases.some_scalars(op).items():
        assert f"{name}={value}" in text
    if cases.operands(op):
        assert str(CHANNELS) in text and "dim=1" in text


def test_pickle_and_deepcopy(op):
    module = randomise(make_module(op))
    x = cases.filled((4, CHANNELS), torch.float32, op)
    expected = module(x)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert type(other) is type(module) and repr(other) == repr(module)
        assert_same(other(x), expected)
        for a, b in zip(other.parameters(), module.parameters()):
            assert a is not b and torch.equal(a, b)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert_same(torch.load(buffer, weights_only=False)(x), expected)


def test_to(op, dtype):
    module = randomise(make_module(op)).to(dtype)
    assert all(p.dtype == dtype for p in module.parameters())
    assert module(cases.filled((4, CHANNELS), dtype, op)).dtype == dtype


def test_reset_after_to_empty(operand_op):
    """Made on meta, given memory, then filled: how large models are built."""
    module = make_module(operand_op, device="meta").to_empty(device="cpu")
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
        assert all((p == 0).all() for p in module.parameters())


def test_training_and_evaluation_are_the_same(op):
    module = randomise(make_module(op))
    x = cases.filled((4, CHANNELS), torch.float32, op)
    assert_same(module.train()(x), module.eval()(x))


WITH_INPLACE = [
    op
    for op in fused_act.ops()
    if "inplace" in inspect.signature(getattr(torch.nn, op.module, torch.nn.Identity).__init__).parameters
]


@pytest.mark.parametrize("op", WITH_INPLACE, ids=lambda op: op.name)
def test_inplace_trains_as_that_of_torch_nn(op, device):
    """Compiled, too."""
    arguments = {p.name: 0.5 for p in op.parameters if p.default is None}  # of threshold
    ours, theirs = (getattr(m, op.module)(inplace=True, **arguments) for m in (fused_act.nn, torch.nn))
    x = cases.ordinary(torch.float32, 60).to(device).requires_grad_()

    def step(activation):
        z = x * 1.5
        y = activation(activation(z) + 0.25)
        return y, torch.autograd.grad(y.square().sum(), x)[0], z

    assert len(WITH_INPLACE) >= 10
    torch._dynamo.reset()
    for activation in (ours, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        for got, want in zip(step(activation), step(theirs)):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_training_lowers_a_loss(operand_op, device):
    """The parameters learn: a fit of the operator to its own output with other parameters."""
    torch.manual_seed(0)
    x = cases.ordinary(torch.float32, 600).reshape(100, CHANNELS).to(device)
    target = randomise(make_module(operand_op)).to(device)(x).detach()
    module = make_module(operand_op).to(device)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.1)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = ((module(x) - target) ** 2).mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_in_sequential_with_convolution(op, device):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, CHANNELS, 3), make_module(op), torch.nn.Flatten()).to(device)
    x = cases.ordinary(torch.float32, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8).to(device)
    model(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_documentation_of_the_class(op):
    cls = module_class(op)
    assert cls.__module__.startswith("fused_act") and cls.__name__ == cls.__qualname__ == op.module
    doc = inspect.getdoc(cls)
    assert doc and op.expression.split(";")[0].strip() in doc
    signature = inspect.signature(cls)
    for p in op.parameters:
        assert p.name in signature.parameters or p.kind == "operand"


def test_wrong_arguments_are_named_when_a_module_is_made():
    with pytest.raises(TypeError, match="fused_act.nn.AddAct: num_features is 'relu', but must be a number"):
        fused_act.nn.AddAct(4, "relu")
    with pytest.raises(TypeError, match="fused_act.nn.ReLUBias: num_features is 4.5"):
        fused_act.nn.ReLUBias(4.5)
    with pytest.raises(ValueError, match="fused_act.nn.Gated: there is no activation 'swish'; there are linear"):
        fused_act.nn.Gated("swish")
    assert "act='linear'" in repr(fused_act.nn.BiasAct())
