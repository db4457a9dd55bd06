"""Errors (CONTRACT, sections 3 and 4): before anything runs, with the operator and the values in the message."""

import re

import cases
import pytest
import torch
from cases import call, derived

import fused_act

OTHER_DTYPES = {
    torch.int8: "int8|Char",
    torch.uint8: "uint8|Byte",
    torch.int32: "int32|Int",
    torch.int64: "int64|Long",
    torch.bool: "bool|Bool",
    torch.complex64: "complex64|ComplexFloat",
    torch.complex128: "complex128|ComplexDouble",
    torch.float8_e4m3fn: "float8_e4m3fn|Float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2|Float8_e5m2",
}


# Where an operator can be called: each has it under its name.
ENTRY_POINTS = [
    pytest.param(torch.ops.fused_act, id="dispatcher"),
    pytest.param(fused_act.functional, id="functional"),
    pytest.param(fused_act._C, id="pybind"),
]


def named(op, text=""):
    """The message starts with the operator and contains `text` (a regular expression)."""
    return rf"(?s)^fused_act\.{op.name}\w*: .*(?:{text})"


def valid(op, shape=(3, 5, 4), device="cpu"):
    x = cases.filled(shape, torch.float32, op).to(device)
    return x, cases.make_params(op, shape, torch.float32, device)


@pytest.mark.parametrize("bad", OTHER_DTYPES, ids=str)
def test_dtype_of_x(op, device, bad):
    x, params = valid(op, device=device)
    with pytest.raises((TypeError, RuntimeError), match=named(op, OTHER_DTYPES[bad])):
        call(op, torch.zeros(x.shape, device=device).to(bad), params)


@pytest.mark.parametrize("bad", OTHER_DTYPES, ids=str)
def test_dtype_of_an_operand(operand_op, device, bad):
    x, params = valid(operand_op, device=device)
    for name in cases.operands(operand_op):
        with pytest.raises((TypeError, RuntimeError), match=named(operand_op, OTHER_DTYPES[bad])) as error:
            call(operand_op, x, {**params, name: params[name].to(bad)})
        assert name in str(error.value)


def test_dtype_is_a_type_error(op):
    x, params = valid(op)
    with pytest.raises(TypeError, match=named(op)):
        call(op, x.long(), params)


@pytest.mark.parametrize("where", ["functional", "pybind", "meta"])
def test_dtype_error_of_every_entry_point(op, where):
    x, params = valid(op)
    x = x.long()
    with pytest.raises((TypeError, RuntimeError), match=named(op, "int64|Long")):
        if where == "functional":
            getattr(fused_act.functional, op.name)(x, **params)
        elif where == "pybind":
            getattr(fused_act._C, op.name)(x, **params)
        else:
            call(op, x.to("meta"), cases.with_operands(params, lambda t: t.to("meta")))


def test_wrong_number_of_elements(operand_op, device):
    """The message of CONTRACT, word for word."""
    x = torch.zeros(2, 64, 3, device=device)
    for name in cases.operands(operand_op):
        params = cases.make_params(operand_op, x.shape, torch.float32, device)
        params[name] = torch.zeros(63, device=device)
        expected = f"fused_act.{operand_op.name}: {name} has 63 elements, but x.shape[1] is 64"
        for function in (
            getattr(torch.ops.fused_act, operand_op.name),
            getattr(fused_act.functional, operand_op.name),
            getattr(fused_act._C, operand_op.name),
        ):
            with pytest.raises((RuntimeError, ValueError), match=re.escape(expected)):
                function(x, **params)
        with pytest.raises((RuntimeError, ValueError), match=re.escape(f"{name} has 63 elements, but x.shape[2] is 3")):
            call(operand_op, x, {**params, "dim": 2})
        with pytest.raises((RuntimeError, ValueError), match=re.escape(f"{name} has 63 elements, but x.shape[2] is 3")):
            call(operand_op, x, {**params, "dim": -1})


@pytest.mark.parametrize("bad", [(4, 1), (3, 1, 4, 1), (2, 5, 4), (3, 5, 5), (1, 3, 5, 4), (2, 3, 5, 4)], ids=str)
def test_operand_that_does_not_broadcast_or_would_enlarge_x(operand_op, device, bad):
    """Both shapes are named. (1, 3, 5, 4) broadcasts with (3, 5, 4) in PyTorch, but to a result of four dimensions."""
    x, params = valid(operand_op, device=device)
    for name in cases.operands(operand_op):
        own = {**params, name: torch.zeros(bad, device=device)}
        with pytest.raises((RuntimeError, ValueError), match=named(operand_op, name)) as error:
            call(operand_op, x, own)
        numbers = re.findall(r"\d+", str(error.value).split(": ", 1)[1])
        for size in (*bad, *x.shape):
            assert str(size) in numbers, f"{error.value} does not name {bad} and {tuple(x.shape)}"


def test_operand_larger_than_a_zero_dimensional_x(operand_op):
    _, params = valid(operand_op)
    for name in cases.operands(operand_op):
        for size in ((1,), (3,)):
            own = {**cases.some_scalars(operand_op), **{n: torch.zeros(()) for n in cases.operands(operand_op)}}
            with pytest.raises((RuntimeError, ValueError, IndexError), match=named(operand_op)):
                call(operand_op, torch.zeros(()), {**own, name: torch.zeros(size)})


@pytest.mark.parametrize("dim", [3, -4, 100, -100, 2**40])
def test_dim_out_of_range(operand_op, device, dim):
    x, params = valid(operand_op, device=device)
    with pytest.raises(IndexError, match=named(operand_op, str(dim))):
        call(operand_op, x, {**params, "dim": dim})


def test_default_dim_needs_two_dimensions(operand_op):
    x = torch.zeros(5)
    params = {**cases.make_params(operand_op, (5,), torch.float32), "dim": 1}
    with pytest.raises(IndexError, match=named(operand_op)):
        call(operand_op, x, params)


def test_incoming_gradient_of_another_shape(op, device):
    x, params = valid(op, device=device)
    for bad in ((3, 5), (3, 5, 5), (1, 5, 4), (60,), ()):
        with pytest.raises((RuntimeError, ValueError), match=named(op, r"grad_output")):
            cases.backward(op, torch.zeros(bad, device=device), x, params)


def test_incoming_gradient_of_another_dtype_is_never_garbage(op, device):
    """Autograd never passes one; called by hand it is either right or a clear error."""
    x, params = valid(op, device=device)
    go = cases.ordinary(torch.float32)[:60].reshape(x.shape).bfloat16().to(device)
    expected = cases.backward(op, go.float(), x, params)
    try:
        actual = cases.backward(op, go, x, params)
    except (TypeError, RuntimeError) as error:
        assert re.match(named(op, "grad_output"), str(error))
        return
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-2, atol=1e-2)


def test_output_mask_of_the_wrong_length(operand_op):
    x, params = valid(operand_op)
    for length in (0, 1, 2 + len(cases.operands(operand_op))):
        with pytest.raises((RuntimeError, ValueError), match=named(operand_op, "output_mask")):
            derived(operand_op, "backward")(torch.zeros_like(x), x, **params, dim=1, output_mask=[True] * length)


def test_tangent_of_another_shape(op):
    x, params = valid(op)
    rest = {f"{n}_tangent": None for n in cases.operands(op)} | ({"dim": 1} if cases.operands(op) else {})
    with pytest.raises((RuntimeError, ValueError), match=named(op, "tangent")):
        derived(op, "jvp")(x, **params, x_tangent=torch.zeros(2, 2), **rest)


@pytest.mark.parametrize("bad", [None, 1.5, [1.0, 2.0], "x"], ids=repr)
@pytest.mark.parametrize("where", ENTRY_POINTS)
def test_x_that_is_not_a_tensor(op, bad, where):
    _, params = valid(op)
    with pytest.raises((TypeError, RuntimeError), match=op.name):
        getattr(where, op.name)(bad, **params)


@pytest.mark.parametrize("bad", [None, 1.5, [1.0, 2.0], "x"], ids=repr)
@pytest.mark.parametrize("where", ENTRY_POINTS)
def test_operand_that_is_not_a_tensor(operand_op, bad, where):
    x, params = valid(operand_op)
    with pytest.raises((TypeError, RuntimeError), match=operand_op.name):
        getattr(where, operand_op.name)(x, **{**params, cases.operands(operand_op)[0]: bad})


def test_missing_and_unknown_arguments(op):
    x, params = valid(op)
    functions = [getattr(m, op.name) for m in (torch.ops.fused_act, fused_act.functional, fused_act._C)]
    for function in functions:
        with pytest.raises((TypeError, RuntimeError), match=op.name):
            function(x, **params, nonsense=1)
        for p in op.parameters:
            if p.default is None:
                with pytest.raises((TypeError, RuntimeError), match=op.name):
                    function(x, **{k: v for k, v in params.items() if k != p.name})


@pytest.mark.parametrize("kind", ["coo", "csr", "quantized"])
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_strides(op, kind):
    _, params = valid(op, (3, 5))
    make = {
        "coo": lambda: torch.zeros(3, 5).to_sparse(),
        "csr": lambda: torch.zeros(3, 5).to_sparse_csr(),
        "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3, 5), 0.1, 0, torch.qint8),
    }
    with pytest.raises((NotImplementedError, TypeError, RuntimeError), match=op.name):
        call(op, make[kind](), params)


def test_operand_on_another_device(operand_op):
    """Meta stands for a second device here; test_cuda has the real pair."""
    x, params = valid(operand_op)
    for name in cases.operands(operand_op):
        with pytest.raises(RuntimeError, match=named(operand_op, "meta")) as error:
            call(operand_op, x, {**params, name: params[name].to("meta")})
        assert "cpu" in str(error.value)


def test_an_error_leaves_everything_usable(op):
    """After an error the next call gives the right answer and inputs are untouched."""
    x, params = valid(op)
    before, expected = x.clone(), call(op, x, params)
    with pytest.raises((TypeError, RuntimeError)):
        call(op, x.int(), params)
    assert torch.equal(x, before)
    assert torch.equal(call(op, x, params), expected)


def test_error_text_has_no_stack_trace_or_macro_noise(operand_op):
    x, params = valid(operand_op)
    own = cases.with_operands(params, lambda t: torch.zeros(7))
    with pytest.raises((RuntimeError, ValueError)) as error:
        call(operand_op, x, own)
    text = str(error.value)
    assert "Expected" not in text and ".cpp:" not in text and "INTERNAL ASSERT" not in text, text


def test_clamp_without_a_bound(device):
    """As torch.clamp. The activation by that name takes min as its alpha, and without one has no bound."""
    x = torch.randn(5, device=device)
    for function in (torch.clamp, torch.ops.fused_act.clamp, fused_act.functional.clamp, torch.ops.fused_act.clamp_):
        with pytest.raises(RuntimeError, match="'?min'? (or|and) '?max'?.*None"):
            function(x)
    assert torch.equal(torch.ops.fused_act.bias_act(x, None, "clamp"), x)
    assert torch.equal(torch.ops.fused_act.bias_act(x, None, "clamp", alpha=0.25), x.clamp(min=0.25))
