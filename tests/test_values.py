"""Values (CONTRACT, section 1): against the expression of the table, over every exponent, kink and special value."""

import math
import os
import subprocess
import sys

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import call
from conftest import DEEP_OPS
from oracle import assert_same, assert_value

import fused_act

OPERAND_SAMPLES = (0.0, 0.1, -2.5, 1000.0, -3e-6, -0.5)


def crossed_with_operands(op, values, dtype, device):
    """x with one column per operand sample, so that each value meets each of them, and the operands along dim 1."""
    if not cases.operands(op):
        return values.to(device), {}
    x = values[:, None].repeat(1, len(OPERAND_SAMPLES))
    samples = torch.tensor(OPERAND_SAMPLES, dtype=torch.float64).to(dtype)
    params = {name: samples.roll(k).to(device) for k, name in enumerate(cases.operands(op))}
    return x.to(device), params


def test_every_half_bit_pattern(op, half, device):
    for chosen in cases.scalar_sets(op):
        x, operands = crossed_with_operands(op, cases.patterns(half), half, device)
        params = {**chosen, **operands}
        assert_value(op, call(op, x, params), x, params)


def test_bit_identical_to_eager(op, wide, device):
    for chosen in cases.scalar_sets(op):
        x, operands = crossed_with_operands(op, cases.grid(wide, op, chosen), wide, device)
        params = {**chosen, **operands}
        assert_value(op, call(op, x, params), x, params)


def eager_error(op, x, params, exact):
    """What eager itself is off by on this device, which values that equal it to the bit share: its float64 hardsigmoid
    on CUDA holds 1/6 in float32."""
    return (oracle.reference(op, x, params).cpu().double() - exact).abs().nan_to_num()


def test_near_the_float64_value(op, wide, device):
    """Independent of eager: a few ulp from float64 where nothing cancels, overflows or underflows."""
    for chosen in cases.scalar_sets(op):
        x = cases.finite_grid(wide, op, chosen)
        params = {**chosen, **{name: torch.tensor([0.25], dtype=wide) for name in cases.operands(op)}}
        exact = oracle.oracle(op, x, params)
        on_device = x.to(device), cases.with_operands(params, lambda t: t.to(device))
        y = call(op, *on_device).cpu().double()
        scale = exact.abs().clamp(min=1.0) * max(1.0, *(abs(s) for s in chosen.values()), 1.0)
        allowed = (8 * torch.finfo(wide).eps * scale).maximum(eager_error(op, *on_device, exact))
        oracle.report((y - exact).abs() <= allowed, actual=y, exact=exact, x=x)


def test_infinities_as_in_float64(op, dtype, device):
    for chosen in cases.scalar_sets(op):
        x = torch.tensor([math.inf, -math.inf], dtype=dtype, device=device)
        params = {**chosen, **{name: torch.tensor([0.5], dtype=dtype, device=device) for name in cases.operands(op)}}
        exact = oracle.oracle(op, x, params)
        y = call(op, x, params)
        if dtype is torch.float64 and (eager_error(op, x, params, exact.cpu()) > 0).any():
            assert_same(y, oracle.reference(op, x, params))
            torch.testing.assert_close(y.cpu(), exact.cpu(), rtol=1e-7, atol=0)
        else:
            assert_same(y, exact.to(dtype))


def test_nan_in_nan_out(op, dtype, device):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    x = torch.full((4, 33), math.nan, dtype=dtype)
    quiet = x.view(bits)[0, 0].item()
    signalling = torch.tensor(math.inf, dtype=dtype).view(bits).item() + 1
    x.view(bits)[1] = quiet + 1
    x.view(bits)[2] = signalling
    x[3] = -x[0]
    x = x.to(device)
    for chosen in cases.scalar_sets(op):
        params = {**chosen, **{name: torch.zeros(1, dtype=dtype, device=device) for name in cases.operands(op)}}
        assert call(op, x, params).isnan().all()


def test_special_operand_values(operand_op, dtype, device):
    """NaN, infinite, huge and tiny operands meet NaN, infinite, huge and tiny x."""
    specials = torch.cat([cases.specials(dtype), cases.neighbours(cases.kinks(operand_op, {}), dtype)])
    x = specials[:, None].repeat(1, len(specials)).to(device)
    params = {**cases.some_scalars(operand_op), **{n: specials.to(device) for n in cases.operands(operand_op)}}
    y = call(operand_op, x, params)
    if dtype in cases.WIDES:
        assert_same(y, oracle.reference(operand_op, x, params), x=x)
    else:  # most of these overflow, so compare with one rounding of the float32 chain, to 1 ulp
        expected = oracle.reference(operand_op, x, params).cpu().to(dtype)
        y = y.cpu()
        near = (oracle.ordered(y) - oracle.ordered(expected)).abs() <= 1
        oracle.report(oracle.same(y, expected) | (near & ~y.isnan() & ~expected.isnan()), y=y, expected=expected)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, -1e-3, 1e30])
def test_special_scalars(op, wide, device, special):
    """A NaN slope or bound gives NaN where eager gives NaN, division by zero what eager gives, and so on."""
    if not cases.scalars(op):
        pytest.skip("the operator has no scalar parameter")
    for name in [p.name for p in cases.scalars(op)]:
        chosen = {**cases.some_scalars(op), name: special}
        x = torch.cat([cases.exponents(wide), cases.neighbours(cases.kinks(op, {}), wide)]).to(device)
        params = {**chosen, **{n: torch.tensor([0.5], dtype=wide, device=device) for n in cases.operands(op)}}
        assert_same(call(op, x, params), oracle.reference(op, x, params), x=x)


@pytest.mark.parametrize("bound", ["min", "max"])
def test_nan_as_the_only_bound(bound, dtype, device):
    """As torch.clamp_min and clamp_max, and as torch.clamp has it of two bounds; of one its CPU kernels ignore it."""
    x = cases.filled((5, 33), dtype).to(device)
    assert torch.ops.fused_act.clamp(x, **{bound: math.nan}).isnan().all()
    assert getattr(torch, f"clamp_{bound}")(x, math.nan).isnan().all()


def test_scalars_may_be_integers(op, dtype, device):
    if not cases.scalars(op):
        pytest.skip("the operator has no scalar parameter")
    x = cases.filled((5, 8), dtype, op).to(device)
    params = cases.make_params(op, x.shape, dtype, device)
    whole = {**params, **{p.name: 3 for p in cases.scalars(op)}}
    assert_same(call(op, x, whole), call(op, x, {**whole, **{p.name: 3.0 for p in cases.scalars(op)}}))


def test_scalars_stay_in_the_compute_type(op, half, device):
    """0.01 rounded to bfloat16 first would be 0.01001: wrong in the third digit, and in half of all results."""
    params = cases.scalars(op)
    if not params:
        pytest.skip("the operator has no scalar parameter")
    x = cases.patterns(half).to(device)
    operands = {name: torch.tensor([0.5], dtype=half, device=device) for name in cases.operands(op)}
    chosen = {p.name: 0.01 * (k + 1.37) for k, p in enumerate(params)}
    assert_value(op, call(op, x, {**chosen, **operands}), x, {**chosen, **operands})
    coarse = {k: oracle.rounded(v, half) for k, v in chosen.items()}
    assert not torch.equal(
        call(op, x, {**chosen, **operands}).nan_to_num(), call(op, x, {**coarse, **operands}).nan_to_num()
    ), "this test cannot tell rounded scalars from exact ones"


@pytest.mark.parametrize("operand_dtype", cases.DTYPES, ids=str)
def test_operand_of_any_dtype(operand_op, dtype, device, operand_dtype):
    """The operand is read in its own type and used in the compute type; the result has the dtype of x."""
    values = cases.grid(dtype, operand_op, {})
    x = values[: len(values) // 6 * 6].reshape(-1, 6).to(device)
    samples = torch.tensor([0.1, -2.3, 1e-3, 3.14159265358979, 0.0, -1.0], dtype=torch.float64).to(operand_dtype)
    params = {**cases.some_scalars(operand_op), **{n: samples.to(device) for n in cases.operands(operand_op)}}
    assert_value(operand_op, call(operand_op, x, params), x, params)


# ---------------------------------------------------------------------------------------------------------------------
# The same answer everywhere: not a function of length, position, alignment or thread count


def special_cycle(op, dtype):
    values = [math.nan, math.inf, -math.inf, 3.0, -3.0, 0.0, 0.75, torch.finfo(dtype).max, -0.001, 2.0, -7.5]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def test_independent_of_length_and_position(op, dtype, device):
    """Every n from 1 to 70, with every special value in every place: vector blocks and tails of all lengths."""
    cycle = special_cycle(op, dtype)
    params = {
        **cases.some_scalars(op),
        **{n: torch.tensor([0.3], dtype=dtype, device=device) for n in cases.operands(op)},
    }
    along = {"dim": 0} if cases.operands(op) else {}
    go = torch.tensor(1.5, dtype=dtype, device=device)

    def both(x):
        grad = cases.backward(op, go.expand(x.shape).contiguous(), x, {**params, **along}, only_x=True)
        return call(op, x, params), grad[0]

    alone = [both(v.reshape(1).to(device)) for v in cycle]
    table = [torch.cat([pair[i] for pair in alone]) for i in (0, 1)]
    index = torch.arange(70) % len(cycle)
    got, want = ([], []), ([], [])
    for n in range(1, 71):
        for turn in range(len(cycle)):
            i = (index[:n] + turn) % len(cycle)
            for k, t in enumerate(both(cycle[i].to(device))):
                got[k].append(t)
                want[k].append(table[k][i.to(device)])
    for k in (0, 1):
        assert_same(torch.cat(got[k]), torch.cat(want[k]))


def test_channel_operand_of_every_size(operand_op, dtype, device):
    """All channel counts and inner sizes from 1 to 20: vectors that span a channel's end, in NCHW and channels_last."""
    got, want = [], []
    for channels in range(1, 21):
        for inner in (*range(1, 10), 12, 16, 17):
            x = cases.filled((3, channels, inner), dtype, operand_op, seed=channels).to(device)
            params = cases.make_params(operand_op, x.shape, dtype, device)
            full = cases.with_operands(params, lambda t: t[:, None].expand(x.shape).contiguous())
            expected = call(operand_op, x, full).reshape(-1)
            last = x.transpose(1, 2).contiguous().transpose(1, 2)
            got += [call(operand_op, x, params).reshape(-1), call(operand_op, last, params).reshape(-1)]
            want += [expected, expected]
    assert_same(torch.cat(got), torch.cat(want))


def test_independent_of_alignment(op, dtype, device):
    """x, the operand and the incoming gradient each 0 to 15 elements after an aligned address."""
    values = cases.filled((6, 37), dtype, op)
    params = cases.make_params(op, values.shape, dtype, device, "full")
    go = cases.ordinary(dtype)[: 6 * 37].reshape(6, 37).to(device)
    x = values.to(device)
    expected = call(op, x, params)
    expected_grads = cases.backward(op, go, x, params)
    for k in range(16):
        for shifted in ("x", "operand", "go"):
            xk = cases.offset(x, k) if shifted == "x" else x
            pk = cases.with_operands(params, lambda t: cases.offset(t, k)) if shifted == "operand" else params
            gk = cases.offset(go, k) if shifted == "go" else go
            assert_same(call(op, xk, pk), expected)
            for a, b in zip(cases.backward(op, gk, xk, pk), expected_grads, strict=True):
                assert_same(a, b)


def test_independent_of_thread_count(op, dtype, threads):
    x = cases.filled((64, 33, 65), dtype, op)
    params = cases.make_params(op, x.shape, dtype)
    go = cases.filled(x.shape, dtype, seed=5)
    results = []
    for count in (1, 2, 3, 8):
        threads(count)
        leaf = x.clone().requires_grad_()
        tracked = cases.with_operands(params, lambda t: t.clone().requires_grad_())
        y = call(op, leaf, tracked)
        tensors = [leaf, *(v for v in tracked.values() if isinstance(v, torch.Tensor))]
        results.append([y.detach(), *torch.autograd.grad(y, tensors, go)])
    for other in results[1:]:
        # y and the gradient for x; an operand's gradient is a sum, which may be split by the thread count
        for a, b in zip(results[0][:2], other[:2]):
            assert_same(a, b)


SIMD_SCRIPT = """
import sys; sys.path[:0] = {path!r}
import hashlib, torch, cases, fused_act
digest = hashlib.sha256()
for op in (op for op in fused_act.ops() if op.name in {deep!r}):
    for dtype in cases.DTYPES:
        x = cases.grid(dtype, op, {{}})[:32768 + 13]
        params = {{**cases.some_scalars(op), **{{n: torch.tensor([0.3], dtype=dtype) for n in cases.operands(op)}}}}
        dim = {{"dim": 0}} if cases.operands(op) else {{}}
        grad = cases.backward(op, torch.full_like(x, 0.7), x, {{**params, **dim}}, only_x=True)[0]
        for t in (cases.call(op, x, params), grad):
            t = t.masked_fill(t.isnan(), 1.2345).masked_fill(t == 0, 0.0)  # NaNs and zeros of either sign are the same
            digest.update(t.view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def test_independent_of_simd_level():
    """The scalar, AVX2 and AVX-512 builds give the same bits, as far as this processor has them."""
    levels = ["default", "avx2", "avx512"]
    best = torch.backends.cpu.get_cpu_capability().lower()
    if best not in levels[1:]:
        pytest.skip(f"one build only on this processor ({best})")
    script = SIMD_SCRIPT.format(path=[p for p in sys.path if p], deep=[op.name for op in DEEP_OPS])
    digests = {}
    for level in levels[: levels.index(best) + 1]:
        if level == "avx512" and not torch.cpu._is_avx512_supported():
            continue  # PyTorch itself would stop there with an illegal instruction
        env = {**os.environ, "ATEN_CPU_CAPABILITY": level}
        run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, (level, run.returncode, run.stderr)
        digests[level] = run.stdout.strip()
    assert len(set(digests.values())) == 1, digests


# ---------------------------------------------------------------------------------------------------------------------
# The table itself: the five seed operators are the expressions that their issue names, written here by hand


def written_hardswish(x):
    r = torch.relu(x)
    return r * torch.clamp((r + 3) / 6, 0, 1)


SEEDS = {
    "relu_hardswish": lambda x: written_hardswish(x),
    "hardsigmoid": lambda x: F.hardsigmoid(x),
    "relu_bias": lambda x, bias: torch.relu(x) + bias[:, None],
    "div_leaky_relu": lambda x, divisor, negative_slope: F.leaky_relu(x / divisor, negative_slope),
    "min_bias_scale": lambda x, value, bias, scale: (
        (torch.min(x, torch.tensor(value, dtype=x.dtype)) + bias[:, None]) * scale
    ),
}
SEED_ARGUMENTS = {
    "relu_hardswish": {},
    "hardsigmoid": {},
    "relu_bias": {"bias": torch.tensor([0.5, -1.0, 0.1])},
    "div_leaky_relu": {"divisor": 1.7, "negative_slope": 0.013},
    "min_bias_scale": {"value": 0.5, "bias": torch.tensor([0.5, -1.0, 0.1]), "scale": 2.5},
}


@pytest.mark.parametrize("name", SEEDS)
def test_seed_operator_is_its_written_expression(name):
    assert name in [op.name for op in fused_act.ops()], f"{name} is not in the table"
    x = torch.cat([cases.exponents(torch.float32), cases.ordinary(torch.float32)])[:6600].reshape(2, 3, -1)
    arguments = SEED_ARGUMENTS[name]
    assert_same(getattr(torch.ops.fused_act, name)(x, **arguments), SEEDS[name](x, **arguments))


@pytest.mark.parametrize(
    "name, x, arguments, expected",
    [
        ("relu_hardswish", [-1.0, 0.0, 1.0, 3.0, 4.0], {}, [0.0, 0.0, 2.0 / 3.0, 3.0, 4.0]),
        ("hardsigmoid", [-4.0, -3.0, 0.0, 1.5, 3.0, 9.0], {}, [0.0, 0.0, 0.5, 0.75, 1.0, 1.0]),
        ("relu_bias", [[-2.0, 2.0]], {"bias": [-1.0, 0.5]}, [[-1.0, 2.5]]),
        ("div_leaky_relu", [-8.0, 8.0], {"divisor": 2.0}, [-0.04, 4.0]),
        ("min_bias_scale", [[0.25, 9.0]], {"value": 0.5, "bias": [1.0, -1.0], "scale": 4.0}, [[5.0, -2.0]]),
    ],
)
def test_numbers_worked_out_by_hand(name, x, arguments, expected):
    arguments = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in arguments.items()}
    y = getattr(torch.ops.fused_act, name)(torch.tensor(x), **arguments)
    torch.testing.assert_close(y, torch.tensor(expected), rtol=2e-7, atol=0)


def test_a_call_has_its_own_steps_whatever_the_one_before_had():
    """Steps are remembered from call to call: each part of what they follow from changes here in turn."""
    x, b = torch.tensor([[-1.0, 0.0, 2.0]]), torch.tensor([0.5, -2.0, 1.0])
    bias_act = torch.ops.fused_act.bias_act
    calls = [
        (dict(act="leaky_relu", alpha=0.25), F.leaky_relu(x, 0.25)),
        (dict(act="leaky_relu", alpha=0.5), F.leaky_relu(x, 0.5)),
        (dict(act="leaky_relu"), F.leaky_relu(x)),
        (dict(act="relu"), F.relu(x)),
        (dict(act="relu", bias=b), F.relu(x + b)),
        (dict(act="relu", gain=0.0), F.relu(x) * 0.0),
        (dict(act="relu", gain=-0.0), F.relu(x) * -0.0),
        (dict(act="linear", clamp=1.5), x.clamp(-1.5, 1.5)),
    ]
    for order in (1, -1):
        for arguments, want in calls[::order]:
            y = bias_act(x, **arguments)
            assert_same(y, want)
            assert torch.equal(y.signbit(), want.signbit())
            with pytest.raises(ValueError, match="there is no activation 'rule'"):
                bias_act(x, act="rule")
            assert_same(bias_act(x, **arguments), want)
