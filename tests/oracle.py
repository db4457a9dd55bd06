"""What an operator must compute: the expression of the table, run by PyTorch itself.

`reference` runs it eagerly in the tested type on the tested device (float32 and float64 must equal it bit for bit).
`oracle` runs it in float64 on the CPU, with scalars and operands rounded to the compute type first, which is what
float16 and bfloat16 are held to. Gradients come from autograd of the same expression, so the conventions at kinks,
ties and NaN are PyTorch's own; the two exceptions are written down in `clamp` and `hardsigmoid`.
"""

import ast
import functools
import math
import re

import torch
import torch.nn.functional as F

import fused_act

COMPUTE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}

# Functions whose float32 value may differ from eager by a few ulp (CONTRACT, section 1).
TRANSCENDENTAL = {
    "exp", "expm1", "log", "log1p", "tanh", "erf", "sigmoid", "logsigmoid", "silu", "gelu", "mish", "softplus",
    "elu", "selu", "celu", "tanhshrink", "sin", "cos",
}  # fmt: skip


def transcendental(op, params=()):
    """`params`: keyword arguments, among which the name of an activation may be."""
    words = set(re.findall(r"[A-Za-z_]\w*", op.expression))
    for p in op.parameters:
        if p.kind == "activation" and p.name in params and params[p.name] != "linear":
            words |= set(re.findall(r"[A-Za-z_]\w*", operator(params[p.name]).expression))
    return bool(TRANSCENDENTAL & words)


def constants(op):
    """The numbers written in the expression: where its kinks are likely to be."""
    return [n.value for n in ast.walk(ast.parse(op.expression)) if isinstance(n, ast.Constant) and n.value is not None]


@functools.cache
def compiled(expression):
    *statements, last = ast.parse(expression).body
    assert isinstance(last, ast.Expr), f"{expression!r} does not end with an expression"
    return (
        compile(ast.Module(statements, []), "<table>", "exec"),
        compile(ast.Expression(last.value), "<table>", "eval"),
    )


def align(operand, x, dim):
    """A 1-D operand of C elements lies along `dim`; any other broadcasts as in PyTorch."""
    if operand.dim() != 1 or x.dim() == 0:
        return operand
    if operand.numel() == 1:
        return operand.reshape(())
    shape = [1] * x.dim()
    shape[dim] = -1
    return operand.reshape(shape)


def clamp(x, min=None, max=None):
    """torch.clamp with the gradient that CONTRACT gives it, 1 at either bound. PyTorch 2.11 has the same, 2.14 has 0
    there: the operators do not follow the version of PyTorch. Can be differentiated any number of times."""
    inside = torch.ones_like(x, dtype=torch.bool)
    plain = [b.detach() if isinstance(b, torch.Tensor) else b for b in (min, max)]
    result = torch.clamp(x.detach(), *plain)
    for bound, holds, passes in ((min, torch.ge, torch.lt), (max, torch.le, torch.gt)):
        if bound is not None:
            inside = inside & holds(x, bound)
        if isinstance(bound, torch.Tensor):  # whose gradient at a tie and at NaN depends on the version, too
            result = torch.where(passes(x, bound), bound, result)
    return torch.where(inside, x, result)


class Instead:
    """A module, but for what `replacements` define."""

    def __init__(self, module, **replacements):
        vars(self).update(replacements, module=module)

    def __getattr__(self, name):
        return getattr(self.module, name)


def no_slope(x):
    """0 with the derivative 0, for what depends on x by comparison alone and would have no gradient in autograd."""
    return 0 * torch.nan_to_num(x, 0.0, 0.0, 0.0)


def hardsigmoid(x):
    """The derivative of PyTorch's holds 1/6 rounded to float32, also in float64, and has no derivative itself."""
    return F.hardtanh(x, -3.0, 3.0) / 6 + 0.5


def gelu(x, approximate="none"):
    """Without the cancellation of 1 + erf and 1 + tanh, which leaves no digit of PyTorch's float64 value at -8."""
    if approximate == "none":
        return x * (torch.special.erfc(-x / 2**0.5) / 2)
    t = x.clamp(-100, 100)
    return x * torch.sigmoid((8 / math.pi) ** 0.5 * (t + 0.044715 * t**3))


def tanhshrink(x):
    """By its series near 0, where x - tanh(x) cancels."""
    y = x * x
    return torch.where(x.abs() < 0.02, x * y * (1 / 3 - y * (2 / 15 - y * (17 / 315 - y * 62 / 2835))), x - x.tanh())


def elu(x, alpha=1.0):
    return torch.where(x > 0, x, alpha * torch.expm1(x))


def celu(x, alpha=1.0):
    return torch.where(x > 0, x, alpha * torch.expm1(x / alpha))


def selu(x):
    return 1.0507009873554804934193349852946 * elu(x, 1.6732632423543772848170429916717)


# In place of torch.nn.functional: for values in float64, and for gradients.
VALUES = Instead(F, gelu=gelu, tanhshrink=tanhshrink, elu=elu, celu=celu, selu=selu)
GRADIENTS = Instead(F, hardsigmoid=hardsigmoid)

TORCH = Instead(torch, clamp=clamp)  # with GRADIENTS

# What a parameter that is None is in an expression: it changes nothing.
NEUTRAL = {"gain": 1.0, "clamp": math.inf, "min": -math.inf, "max": math.inf, "alpha": None}


@functools.cache
def operator(name):
    return next(op for op in fused_act.ops() if op.name == name)


def namespace(functional):
    exact = functional is GRADIENTS
    return {
        "torch": TORCH if exact else torch,
        "F": functional,
        "relu": torch.relu,
        "clamp": clamp if exact else torch.clamp,
        "no_slope": no_slope,
        "activation": functools.partial(activation, functional),
    }


def activation(functional, name, x, alpha=None):
    """The activation of that name: alpha is its first parameter, the others have their defaults, or 0."""
    if name == "linear":
        return x
    op = operator(name)
    values = [NEUTRAL[p.name] if p.optional else p.default or 0.0 for p in op.parameters]
    if alpha is not None:
        values[0] = alpha
    names = {"x": x, **namespace(functional)}
    names.update(zip([p.name for p in op.parameters], values))
    statements, last = compiled(op.expression)
    exec(statements, names)
    return eval(last, names)


def evaluate(op, x, params, functional=F):
    """The expression in eager PyTorch. `params`: keyword arguments of the operator, `dim` included. `functional`: F,
    VALUES or GRADIENTS: GRADIENTS has those of CONTRACT where PyTorch's own are inexact, missing or dependent on its
    version."""
    params = dict(params)
    dim = params.pop("dim", op.dim)
    names = {op.input: x, **namespace(functional)}
    for p in op.parameters:
        value = params.get(p.name, p.default)
        if value is None and p.optional:
            value = NEUTRAL.get(p.name, 0.0)
        names[p.name] = align(value, x, dim) if isinstance(value, torch.Tensor) else value
    statements, last = compiled(op.expression)
    exec(statements, names)
    return eval(last, names)


def rounded(scalar, dtype):
    return torch.tensor(scalar, dtype=torch.float64).to(dtype).item()


def converted(op, params, compute, dtype, device):
    """Operands and scalars as the operator uses them: rounded to the compute type, then held in `dtype`."""
    defaults = {p.name: p.default for p in op.parameters if p.kind == "scalar"}
    result = {}
    for name, value in {**defaults, **params}.items():
        if value is None or isinstance(value, str):
            result[name] = value
        elif isinstance(value, torch.Tensor):
            result[name] = value.detach().to(device=device, dtype=compute).to(dtype)
        else:
            result[name] = value if name == "dim" else rounded(value, compute)
    return result


def reference(op, x, params, functional=F):
    """Eager PyTorch in the compute type of `x`, on the device of `x`. Not rounded to a half type."""
    compute = COMPUTE[x.dtype]
    return evaluate(op, x.detach().to(compute), converted(op, params, compute, compute, x.device), functional)


def oracle(op, x, params, device="cpu"):
    """The float64 value, not yet rounded."""
    params = converted(op, params, COMPUTE[x.dtype], torch.float64, device)
    return evaluate(op, x.detach().to(device, torch.float64), params, VALUES)


def gradients(op, x, params, grad_output, double, functional=GRADIENTS):
    """Autograd's gradients of the expression for x and each operand: in float64 on the CPU, or in the compute type."""
    compute = COMPUTE[x.dtype]
    dtype, device = (torch.float64, "cpu") if double else (compute, x.device)
    params = converted(op, params, compute, dtype, device)
    inputs = [x.detach().to(device=device, dtype=dtype, copy=True).requires_grad_()]
    inputs += [v.requires_grad_() for v in params.values() if isinstance(v, torch.Tensor)]
    out = evaluate(op, inputs[0], params, functional)
    return torch.autograd.grad(out, inputs, grad_output.detach().to(device=device, dtype=dtype))


def oracle_gradients(op, x, params, grad_output):
    """Gradients in float64. At a NaN the gradient for x is the one that eager gives for a one-element tensor."""
    grad_x, *rest = gradients(op, x, params, grad_output, double=True)
    where = x.detach().cpu().isnan()
    if where.any():
        one = {k: v.detach().reshape(-1)[:1] if isinstance(v, torch.Tensor) else v for k, v in params.items()}
        one.pop("dim", None)
        nan = torch.full((1,), float("nan"), dtype=x.dtype)
        slope = gradients(op, nan, one, torch.ones(1), double=True, functional=F)[0]
        grad_x[where] = (slope * grad_output.detach().cpu().double())[where] if slope != 0 else 0.0
    return (grad_x, *rest)


def slopes(op, x, params):
    """df/dx at each element in float64, and the same from the compute type (they differ where rounding of an
    intermediate crosses a kink: x = nextafter(3, 4) has (x + 3) / 6 == 1 in float32)."""
    ones = torch.ones(x.shape, dtype=torch.float64)
    exact = oracle_gradients(op, x, params, ones)[0]
    computed = gradients(op, x, params, ones.to(x.device), double=False)[0].cpu().double()
    return exact, torch.where(x.detach().cpu().isnan(), exact, computed)


# ---------------------------------------------------------------------------------------------------------------------
# Comparing


def ulp(value, dtype):
    """Spacing of `dtype` at the float64 `value`."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.abs().clamp(info.tiny, info.max)).exponent - 1
    return torch.ldexp(torch.full_like(value, info.eps), exponent)


def ordered(t):
    """Bits of a 16-bit type as integers in the order of the values, so that neighbours differ by one."""
    bits = t.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def same(actual, expected):
    return (actual == expected) | (actual.isnan() & expected.isnan())


def report(ok, **tensors):
    """AssertionError that shows the first elements where `ok` is false."""
    if ok.all():
        return
    index = (~ok).nonzero()[:5]
    rows = [f"{(~ok).sum().item()} of {ok.numel()} elements are wrong; the first:"]
    for i in map(tuple, index.tolist()):
        rows.append(f"  {i}: " + ", ".join(f"{k} = {t.expand(ok.shape)[i].item()!r}" for k, t in tensors.items()))
    raise AssertionError("\n".join(rows))


def assert_same(actual, expected, **shown):
    """Equal in shape and dtype, and element by element with ==, where NaN equals NaN and -0.0 equals 0.0."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    report(same(actual, expected), actual=actual, expected=expected, **{k: t.cpu() for k, t in shown.items()})


def assert_half_value(op, actual, x, params):
    """Within 1 ulp of the float64 value rounded once, and within 0.51 ulp of it for 99.9 % of the elements."""
    dtype, actual = x.dtype, actual.cpu()
    exact = oracle(op, x, params)
    # Where an intermediate overflows the compute type (a bfloat16 near 3e38 divided by 0.3), that is the answer. Not of
    # PyTorch's own functions: its gelu overflows from 2^127 on, on CPUs where that is oneDNN's.
    in_float32 = reference(op, x, params, VALUES).cpu().double()
    exact = torch.where(in_float32.isfinite() | exact.isnan(), exact, in_float32)
    expected = exact.to(dtype)
    ok = (actual.isnan() & expected.isnan()) | (
        ~actual.isnan() & ~expected.isnan() & ((ordered(actual) - ordered(expected)).abs() <= 1)
    )
    report(ok, actual=actual, expected=expected, x=x.cpu())
    if not actual.numel():
        return
    error = (actual.double() - exact).abs() / ulp(exact, dtype)
    near = (error <= 0.51) | same(actual, expected)
    assert near.double().mean() >= 0.999, f"within 0.51 ulp: {near.double().mean():.5f} of the elements"


def assert_value(op, actual, x, params, device="cpu", rounded_once=False):
    """`actual` is what CONTRACT section 1 allows for x.dtype. Of a transcendental chain: `device` is where float64 is
    computed, `rounded_once` whether ulps count from the rounded value, as CONTRACT.md has it, or from the exact one,
    which allows half an ulp less."""
    assert actual.dtype == x.dtype and actual.shape == x.shape
    actual = actual.detach()
    if x.dtype in (torch.float16, torch.bfloat16):
        assert_half_value(op, actual, x.detach(), params)
    elif not transcendental(op, params):
        assert_same(actual, reference(op, x, params), x=x.detach())
    else:
        exact, got, x = (t.to(device) for t in (oracle(op, x, params, device), actual.double(), x))
        once = exact.to(x.dtype).double()
        limit = 4 * ulp(exact, x.dtype) + 1e-37 if x.dtype == torch.float32 else 1e-14 * exact.abs() + 1e-300
        ok, near, true = same(got, once), got, once if rounded_once else exact
        if rounded_once and x.dtype == torch.float32:  # whose infinity comes after its greatest number
            near, true = (t.clamp(-(2.0**128), 2.0**128) for t in (got, once))
        ok |= (near - true).abs() <= limit
        report(ok, actual=got, exact=exact, x=x)


def within(actual, expected, scale, dtype, eps_multiple=4.0, compute=None):
    """|actual - expected| <= eps_multiple eps of the compute type * scale, then one rounding to dtype."""
    compute = torch.finfo(compute or COMPUTE[dtype])
    limit = eps_multiple * compute.eps * scale + 4 * compute.smallest_normal * compute.eps
    if torch.finfo(dtype).eps > compute.eps:
        limit = limit + 0.5 * ulp(expected, dtype) * (1 + 2**-10)  # the limit itself moves the rounded value
    close = ((actual - expected).abs() <= limit) & limit.isfinite()  # an infinite incoming gradient excuses nothing
    return close | same(actual, expected.to(dtype).double())


def assert_gradient(op, actual, x, params, grad_output):
    """The gradient for x is go * f'(x) to 4 eps of the compute type times |go| max(1, |f'|), rounded once."""
    assert actual.dtype == x.dtype and actual.shape == x.shape
    dtype, actual = x.dtype, actual.detach().cpu().double()
    go = grad_output.detach().cpu().double()
    exact, computed = slopes(op, x, params)
    expected = oracle_gradients(op, x, params, grad_output)[0]
    ok = within(actual, expected, go.abs() * exact.abs().clamp(min=1), dtype)
    crossed = ~same(exact, computed) & ((exact - computed).abs() > 1e-3) & go.isfinite()
    assert crossed.double().mean() < 0.03, "float32 and float64 autograd differ too often for this to be rounding"
    ok |= crossed & within(actual, go * computed, go.abs() * computed.abs().clamp(min=1), dtype)
    report(ok, actual=actual, expected=expected, x=x.detach().cpu(), go=go)


def assert_operand_gradient(actual, expected, magnitude, operand, x):
    """`actual` is the sum `expected` in the compute type of x, given the sum `magnitude` of the absolute values of its
    terms, rounded once to the operand's dtype."""
    assert actual.dtype == operand.dtype, (actual.dtype, operand.dtype)
    assert actual.shape == operand.shape, (actual.shape, operand.shape)
    assert actual.stride() == torch.empty_like(operand).stride()
    assert actual.device == operand.device
    actual = actual.detach().cpu().double()
    ok = within(actual, expected, magnitude, operand.dtype, eps_multiple=16.0, compute=COMPUTE[x.dtype])
    report(ok, actual=actual, expected=expected, magnitude=magnitude)
