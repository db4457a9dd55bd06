"""Programs, malformed programs and functions to fuse that nobody thought of: drawn by hypothesis.

200 examples in all, the same every time; with FUSED_ACT_FUZZ=nightly ten thousand, others every time (conftest.py).
What fails is made smaller and printed with a line that repeats it.
"""

import functools
import math
import re
from typing import NamedTuple

import cases
import oracle
import pytest
import torch
import torch.nn.functional as F
from oracle import assert_same
from test_chain import ARITHMETIC, BEFORE, BINARY, MASKS, PARAMETERS, STEPS, as_operator, params_of, run
from test_fuse import fused_kernels

import fused_act
from fused_act import _C
from fused_act._program import encode

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed: pip install fused_act[test]")
st = pytest.importorskip("hypothesis.strategies")

chain = torch.ops.fused_act.chain
LIMITS = _C._encoding
TOTAL = hypothesis.settings().max_examples


def examples(part, strategy, function):
    """Runs `function` on its part of the examples. Called in a test and not a decorator of it: a test has fixtures, and
    asks afterwards what was drawn. (The decorator that repeats an example goes to `function`.)"""
    given = hypothesis.given(strategy)(function)
    hypothesis.settings(max_examples=max(1, round(part * TOTAL)))(given)()


# ---------------------------------------------------------------------------------------------------------------------
# What a program must compute, and how far rounding may take it from that

# Steps that return one of their numbers or its negative: nothing is rounded, and the derivatives are exact.
SELECTS = {
    "Relu", "Relu6", "Hardtanh", "Clamp", "AbsClamp", "MinScalar", "MaxScalar", "Threshold", "FatRelu", "Hardshrink",
    "Min", "Minimum", "Maximum", "Neg", "Abs", "ClampMin", "ClampMax", *MASKS,
}  # fmt: skip
# Steps that are rounded as eager's are. Not lerp: eager rounds that once or twice, which depends on the length.
AS_EAGER = [name for name in ARITHMETIC if name != "Lerp"]
# Where the expression loses digits by cancellation (see oracle.VALUES and GRADIENTS), or the library does too (lerp).
CANCELS = {"Gelu", "GeluTanh", "Tanhshrink", "Elu", "Celu", "Selu", "Hardsigmoid", "Lerp"}

# 16 times what CONTRACT allows one step: 4 eps, in float64 1e-14.
ERROR = {torch.float32: 64 * 2.0**-23, torch.float64: 1.6e-13}


@functools.cache
def one_step(name):
    return as_operator([(name, ("operand", 0) if name in BINARY else None, STEPS[name][1][0])])


def apply_step(name, values, inputs, functional):
    op, scalars = one_step(name)
    return oracle.evaluate(op, inputs[0], params_of(dict(zip(scalars, values)), inputs[1:]), functional)


def evaluate(steps, x, operands, functional, after=lambda n, inputs, result: result):
    """The program in eager PyTorch. `after` may change the result of step n on its inputs, one or two."""
    v, slots = x, {}
    for n, (name, source, values) in enumerate(steps):
        if name == "save":
            slots[source[1]] = v
            continue
        inputs = [v]
        if source:
            inputs.append((slots if source[0] == "slot" else operands)[source[1]])
        v = inputs[1] if name == "load" else after(n, inputs, apply_step(name, values, inputs, functional))
    return v


def with_scalars(steps, compute):
    """The scalars rounded as the operator rounds them."""
    return [(name, source, tuple(oracle.rounded(s, compute) for s in values)) for name, source, values in steps]


def is_as_eager(steps):
    return all(name in (*AS_EAGER, "save", "load") for name, _, _ in steps)


class Rounding(torch.autograd.Function):
    """Adds an error to a result, and one to its derivative for each input. Its zeros get the sign of `zero`."""

    @staticmethod
    def forward(ctx, zero, result, error, slope_errors, *inputs):
        ctx.slope_errors = slope_errors
        value = result + error
        return torch.where(value == 0, zero, value)

    @staticmethod
    def backward(ctx, g):
        return None, g, None, None, *[None if e is None else g * e for e in ctx.slope_errors]


def out_of_range(t, dtype):
    """Where a type all but overflows, or keeps fewer digits than it has."""
    size, info = t.detach().abs(), torch.finfo(dtype)
    return size.isfinite() & (size != 0) & ((size > info.max / 1024) | (size < info.tiny * 1024))


def distance(a, b):
    return torch.where(oracle.same(a, b), 0.0, (a - b).abs().nan_to_num(math.inf, math.inf))


def farthest(samples, expected):
    return functools.reduce(torch.maximum, [distance(s, expected) for s in samples])


class Bounded(NamedTuple):
    """A result, and how far from it the library's may lie: infinitely far where rounding decides what it is."""

    expected: torch.Tensor
    error: torch.Tensor


def expectation(steps, x, operands, go, compute):
    """The value, and at each element the gradients for x and the operands: each Bounded, in float64 on the CPU.

    What rounding may do to the result of several steps depends on how each passes on the errors of those before, and on
    which side of a kink they leave a value. So the program is evaluated again with errors in each step and in its
    derivatives, of random signs and some times as large as those allowed; the bound is how far that moves the result.
    What has no error stays as it is: a gradient is compared at kinks and ties that are reached exactly, at others not.

    The expression runs in float64. Where all steps are rounded as eager's are, it runs in the compute type, without any
    errors of values; on a CPU float64 is the compute type and has errors from the first other step on.
    """
    exact = not x.is_cuda and (compute == torch.float64 or is_as_eager(steps))
    working = compute if exact else torch.float64
    tensors = [t.detach().expand(x.shape).to("cpu", working, copy=True).contiguous() for t in (x, *operands)]
    go = go.detach().to("cpu", working)
    nowhere = torch.zeros(x.shape, dtype=torch.bool)
    errors, results, rounded_otherwise = {}, [], not exact
    overflows, steep, nan = [nowhere], [out_of_range(go, compute)], [nowhere]

    def measure(n, inputs, result):
        nonlocal rounded_otherwise
        name, _, values = steps[n]
        results.append(result)
        nan.extend(t.isnan() for t in inputs)
        overflows.append(out_of_range(result, compute))
        errors[n] = [torch.zeros_like(result), None, None]
        if name in SELECTS:
            return result
        at = [t.detach().requires_grad_() for t in inputs]
        slopes = torch.autograd.grad(apply_step(name, values, at, oracle.GRADIENTS).sum(), at)
        steep.extend(out_of_range(t, compute) for t in (*at, *slopes))
        # Equal numbers are rounded in the same way; after a step that may differ by one digit they are not equal.
        rounded_otherwise |= name not in AS_EAGER or name in CANCELS
        error = ERROR[compute] if rounded_otherwise else 0.0
        if x.is_cuda and name in ("Hardsigmoid", "Hardswish"):
            error = ERROR[torch.float32]  # eager's kernels, and so the library's, hold 1/6 in float32
        error = error * result.detach().abs().nan_to_num(0, 0)
        if name in CANCELS:
            size = sum(t.detach().abs().nan_to_num(0, 0) for t in at).clamp(min=1)
            error = error + ERROR[compute if name == "Lerp" else working] * size
        if name == "Hardsigmoid":
            steep.append(at[0].isnan())  # where oracle.hardsigmoid has another derivative
        slope_errors = [ERROR[compute] * s.abs().nan_to_num(0, 0).clamp(min=1) for s in slopes]
        errors[n] = [error, *slope_errors, *[None] * (2 - len(slopes))]
        return result

    def derived(tensors, go, after):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = evaluate(steps, leaves[0], leaves[1:], oracle.GRADIENTS, after)
        options = dict(retain_graph=True, allow_unused=True, materialize_grads=True)
        if results and after is measure:  # what the gradient is at each step
            cotangents = torch.autograd.grad(y, [*leaves, *results], torch.ones_like(y), **options)
            steep.extend(out_of_range(c, compute) for c in cotangents)
        return [y.detach(), *torch.autograd.grad(y, leaves, go, **options)]

    expected = derived(tensors, go, measure)
    g = torch.Generator().manual_seed(1)

    def some(error):
        size = torch.rand(error.shape, generator=g, dtype=error.dtype) + 0.5
        return error * size * (torch.randint(0, 2, error.shape, generator=g) * 2 - 1)

    samples = []
    for sample in range(4):
        sign = 1 - 2 * (sample % 2)  # of two samples, one lies on the other side of a kink that is near
        if sign == 1:
            drawn = {n: [None if e is None else some(e) for e in of_step] for n, of_step in errors.items()}
        zero = torch.tensor(sign * 0.0, dtype=working)  # its sign is unspecified

        def rounded(n, inputs, result):
            error, *slope_errors = [None if e is None else sign * e for e in drawn[n]]
            return Rounding.apply(zero, result, error, slope_errors[: len(inputs)], *inputs)

        samples.append(derived([torch.where(t == 0, zero, t) for t in tensors], go, rounded))

    # Eager's derivative at NaN is that of a tensor of one element: in longer ones it depends on the length.
    nan = functools.reduce(torch.logical_or, nan)
    for place in map(tuple, nan.nonzero()[:8].tolist()):
        one = derived([t[place].reshape(1) for t in tensors], go[place].reshape(1), lambda n, inputs, result: result)
        for e, alone in zip(expected[1:], one[1:]):
            e[place] = alone[0]
        nan[place] = False
    overflown = functools.reduce(torch.logical_or, overflows)
    wild = functools.reduce(torch.logical_or, [overflown, *steep, nan])

    def bounded(k, e):
        error = 4 * farthest([s[k] for s in samples], e)
        if k > 0 or not exact:  # the factors of a gradient may be multiplied in another order
            error = error + ERROR[compute] * e.abs().nan_to_num(0, 0)
        # Behind a branch that is not taken eager multiplies 0 by derivatives that may be infinite or NaN; and it adds
        # infinities of both signs for an infinite gradient. Where it has 0 all the same, so must the library.
        unclear = wild | e.isnan() | (~go.isfinite() & (e != 0)) if k > 0 else overflown
        return Bounded(e.double(), torch.where(unclear, math.inf, error).double())

    return [bounded(k, e) for k, e in enumerate(expected)]


def assert_within(actual, bounded, **shown):
    actual, (expected, error) = actual.detach().cpu().double(), bounded
    ok = oracle.same(actual, expected) | ((actual - expected).abs() <= error) | error.isinf()
    oracle.report(ok, actual=actual, expected=expected, error=error, **{k: t.detach().cpu() for k, t in shown.items()})


def assert_sum_within(actual, bounded, operand, compute):
    """An operand's gradient: a sum in the compute type, rounded to the operand's dtype."""
    expected, magnitude, error = (t.sum_to_size(operand.shape) for t in (bounded[0], bounded[0].abs(), bounded[1]))
    error = error + 16 * torch.finfo(compute).eps * magnitude + 0.51 * oracle.ulp(expected, operand.dtype)
    error[~(expected.abs() <= torch.finfo(operand.dtype).max / 2)] = math.inf
    assert_within(actual, Bounded(expected, error), operand=operand)


# ---------------------------------------------------------------------------------------------------------------------
# Drawing programs and tensors

# A grid on which inputs lie too, so that bounds are met exactly.
GRID = st.integers(-64, 64).map(lambda k: k / 16)
SCALARS = {name: st.sampled_from(values) for name, (_, values) in STEPS.items()}
SCALARS |= {
    name: SCALARS[name] | st.tuples(*[GRID] * PARAMETERS[name].count("f"))
    for name in STEPS
    if "f" in PARAMETERS[name] and name != "PowScalar"
}
SCALARS["Hardtanh"] = SCALARS["Hardtanh"].map(lambda s: tuple(sorted(s)))
SCALARS["Softshrink"] = SCALARS["Softshrink"].map(lambda s: (abs(s[0]),))
SCALARS["Celu"] = SCALARS["Celu"].map(lambda s: (s[0] or 1.0,))
SCALARS |= {"save": st.just(()), "load": st.just(())}


def steps_as_drawn(names):
    """Names with scalars, and for a source any number: `programs` makes a place of it that there is."""
    places = st.integers(0, LIMITS["operands"] + LIMITS["slots"] - 1)
    one = {name: st.tuples(st.just(name), places, SCALARS[name]) for name in (*names, "save", "load")}
    return st.lists(st.sampled_from([*names, *["save", "load"] * 5]).flatmap(one.get), min_size=1, max_size=12)


ALL_STEPS, EXACT_STEPS = steps_as_drawn(list(STEPS)), steps_as_drawn(AS_EAGER)


@st.composite
def programs(draw, operands):
    """Up to 12 steps on so many operands; half of them keep numbers small before the steps that need it."""
    guarded, steps, saved = draw(st.booleans()), [], set()
    for name, place, scalars in draw(EXACT_STEPS if draw(st.integers(0, 3)) == 3 else ALL_STEPS):
        slot, is_slot = place % LIMITS["slots"], place >= LIMITS["operands"]
        if name == "save":
            new = [("save", ("slot", slot), ())]
        elif name != "load" and name not in BINARY:
            new = [(name, None, scalars)]
        elif slot in saved and (is_slot or not operands):
            new = [(name, ("slot", slot), scalars)]
        elif operands:
            new = [(name, ("operand", place % operands), scalars)]
        else:
            continue
        new = BEFORE.get(name, []) + new if guarded else new
        if len(steps) + len(new) <= 12:
            steps += new
            saved |= {slot} if name == "save" else set()
    return steps


SIZES = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33])
SHAPES = st.one_of(
    st.lists(SIZES, max_size=5).map(tuple).filter(lambda shape: math.prod(shape) <= 600),
    st.sampled_from(cases.SHAPES),
    st.sampled_from([(1201,), (3, 401), (2, 64, 3, 3)]),
)
# More elements than one thread, or one part of a sum, has. Rare, as they take time.
LONG = st.sampled_from([(32771,), (3, 11003), (5, 7, 31, 33)])


def operand_shape(draw, shape):
    """Per channel, full, one element, per row, per sample and channel, or any other that broadcasts."""
    if len(shape) > 1 and draw(st.booleans()):
        form = cases.OPERAND_FORMS[draw(st.sampled_from(sorted(cases.OPERAND_FORMS)))](shape)
        if form is not None and (len(form) != 1 or form[0] in (1, shape[-1])):
            return form
    keep = draw(st.lists(st.booleans(), max_size=len(shape)))
    return tuple(n if k else 1 for n, k in zip(shape[len(shape) - len(keep) :], keep))


def drawn_values(draw, shape, dtype, kinks, special):
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    choice = torch.rand(shape, generator=g)

    def one_of(values):
        return values[torch.randint(len(values), shape, generator=g)]

    ordinary = (torch.rand(shape, generator=g, dtype=torch.float64) * 8 - 4).to(dtype)
    grid = one_of(torch.arange(-64, 65) / 16).to(dtype)
    at_kinks = one_of(torch.tensor(kinks, dtype=torch.float64).to(dtype))
    t = torch.where(choice < 0.2, grid, torch.where(choice < 0.35, at_kinks, ordinary))
    return torch.where(choice > 0.9, one_of(cases.specials(dtype)), t) if special else t


def described(t):
    values = f" {t.tolist()}" if t.numel() < 40 else ""
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} strides {t.stride()} + {t.storage_offset()}{values}"


class Call(NamedTuple):
    steps: list
    x: torch.Tensor
    operands: list
    go: torch.Tensor
    needs: list  # whether x and each operand require a gradient

    def __repr__(self):
        tensors = {"x": self.x, **{f"operand {k}": t for k, t in enumerate(self.operands)}, "go": self.go}
        lines = [f"steps = {self.steps}", *(f"{name} = {described(t)}" for name, t in tensors.items())]
        return "\n".join([*lines, f"needs = {self.needs}"])

    def on(self, device):
        """With tensors on a device, in the same layouts."""

        def moved(t):
            if t.device == device:
                return t
            storage = torch.empty(0, dtype=t.dtype, device=device).set_(t.untyped_storage().to(device=device))
            return storage.as_strided(t.shape, t.stride(), t.storage_offset())

        return self._replace(x=moved(self.x), operands=[moved(t) for t in self.operands], go=moved(self.go))


@st.composite
def calls(draw):
    shape = draw(LONG if draw(st.integers(0, 39)) == 39 else SHAPES)
    count = draw(st.integers(0, LIMITS["operands"]))
    steps = draw(programs(count))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
    special = draw(st.booleans())
    kinks = [v for v in cases.kinks(*as_operator(steps)) if abs(v) < 100]

    def tensor(shape, dtype, special):
        t = drawn_values(draw, shape, dtype, kinks, special)
        return cases.LAYOUTS[draw(st.sampled_from(sorted(cases.LAYOUTS)))](t)

    own = st.just(dtype) | st.sampled_from(cases.DTYPES)
    operands = [tensor(operand_shape(draw, shape), draw(own), special) for _ in range(count)]
    needs = draw(st.lists(st.booleans(), min_size=1 + count, max_size=1 + count).filter(any))
    go = tensor(shape, dtype, special and draw(st.booleans()))
    return Call(steps, tensor(shape, dtype, special), operands, go, needs)


# ---------------------------------------------------------------------------------------------------------------------
# Valid programs


def check(call, run=run):
    """The value and all gradients of a call; the shares of the values and of x's gradients that are bound closely."""
    steps, x, operands, go, needs = call
    compute = oracle.COMPUTE[x.dtype]
    inputs = [t.detach().requires_grad_(need) for t, need in zip((x, *operands), needs)]
    y = run(steps, inputs[0], inputs[1:])
    grads = iter(torch.autograd.grad(y, [t for t in inputs if t.requires_grad], go))
    grads = [next(grads) if need else None for need in needs]
    for t, like in zip((y, *grads), (x, x, *operands)):
        if t is not None:
            assert (t.shape, t.dtype, t.device) == (like.shape, like.dtype, like.device)
            assert t.stride() == torch.empty_like(like).stride()

    # Every layout has the same results, and every dtype those of its compute type, rounded once.
    plain = [t.detach().to(compute).clone(memory_format=torch.contiguous_format) for t in (x, *operands)]
    plain = [t.requires_grad_() for t in plain]
    wide = run(steps, plain[0], plain[1:])
    wide_grads = torch.autograd.grad(wide, plain, go.to(compute).contiguous())
    reduced = x.is_cuda and x.dtype != compute and not is_as_eager(steps)  # formulas of their own, within 5e-6
    if not reduced:
        assert_same(y, wide.to(x.dtype), x=x)
    if needs[0]:
        assert_same(grads[0], wide_grads[0].to(x.dtype), x=x, go=go)

    steps = with_scalars(steps, compute)
    if is_as_eager(steps):
        full = [t.detach().expand(x.shape) for t in plain]
        signed = [lambda n, i, result, zero=zero: torch.where(result == 0, zero, result) for zero in (0.0, -0.0)]
        positive, negative = (evaluate(steps, full[0], full[1:], F, after) for after in signed)
        assert_same(torch.where(oracle.same(positive, negative), wide.detach(), positive), positive, x=x)
    value, *gradients = expectation(steps, plain[0], plain[1:], go, compute)
    assert_within(wide, value, x=x)
    if reduced:
        error = value.error + 0.51 * oracle.ulp(value.expected, x.dtype)
        error[~(value.expected.abs() <= torch.finfo(x.dtype).max / 2)] = math.inf
        assert_within(y, Bounded(value.expected, error), x=x)
    assert_within(wide_grads[0], gradients[0], x=x, go=go)
    for bounded, wide_grad, own, grad, operand in zip(
        gradients[1:], wide_grads[1:], plain[1:], grads[1:], operands, strict=True
    ):
        assert_sum_within(wide_grad, bounded, own, compute)
        if grad is not None:  # in its own dtype, and perhaps added up in another order
            assert_sum_within(grad, bounded, operand, compute)
    if compute == torch.float64 and go.isfinite().all():  # forward mode multiplies the other way round
        direction = torch.ones_like(wide)
        tangent = torch.ops.fused_act.chain_jvp(plain[0], plain[1:], *encode(steps), x_tangent=direction)
        assert_within(tangent * go, gradients[0], x=x, go=go)
    close = [b.error <= 1e-3 * b.expected.abs().clamp(min=1) for b in (value, gradients[0])]
    return torch.tensor([c.double().mean() if c.numel() else 1.0 for c in close])


def test_valid_programs(device):
    shares = []

    def compare(call):
        shares.append(check(call.on(device)))

    examples(0.5, calls(), compare)
    assert (torch.stack(shares).mean(0) > 0.7).all(), "rounding excuses too much"


def test_small_faults_are_noticed(device):
    """So the bounds of the test above are not too wide. Not noticed are faults in what is 0, or NaN, everywhere."""
    noticed = []

    def compare(call):
        call = call.on(device)._replace(needs=[True] * len(call.needs))
        factor = 1 + (1e-9 if call.x.dtype == torch.float64 else 1e-3)

        def wrong_value(steps, x, operands):
            return run([*steps, ("Mul", None, (factor,))], x, operands)

        def wrong_gradient(steps, x, operands):
            y = run(steps, x, operands)
            return torch.where(y.isfinite(), y.detach() + factor * (y - y.detach()), y)

        for wrong in (wrong_value, wrong_gradient):
            try:
                check(call, wrong)
            except AssertionError:
                noticed.append(True)
            else:
                noticed.append(False)

    examples(0.05, calls(), compare)
    assert sum(noticed) > 0.5 * len(noticed)


# ---------------------------------------------------------------------------------------------------------------------
# Malformed programs

CODES = st.integers(LIMITS["load"] - 1, len(PARAMETERS))
INTEGERS = CODES | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([255, 256, 2**31, 2**32 - 1])
FLOATS = GRID | st.floats() | st.sampled_from([1e308, 1e39, -0.0, math.inf, math.nan])
WRONG_DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
WRONG_SHAPES = [(4,), (3, 1), (2, 2, 3), (0,), (1, 1, 1, 1), (3, 2), (2,)]


def decode(program, scalars):
    """The steps of a program that the library took."""
    names, scalars, steps = list(PARAMETERS), iter(scalars), []
    for code, source in zip(program[1::2], program[2::2]):
        name = {LIMITS["save"]: "save", LIMITS["load"]: "load"}.get(code) or names[code]
        kind, first = ("operand", 0) if source < LIMITS["operands"] else ("slot", LIMITS["operands"])
        values = tuple(next(scalars) for _ in range(PARAMETERS.get(name, "").count("f")))
        steps.append((name, None if source == LIMITS["none"] else (kind, source - first), values))
    return steps


def changed(draw, items, element):
    """Up to two times, an item is replaced, removed or added, or more of them are removed, repeated or exchanged."""
    items = list(items)
    for _ in range(draw(st.integers(0, 2))):
        change = draw(st.sampled_from(["replace", "remove", "cut", "repeat", "add", "swap"]))
        at = draw(st.integers(0, max(0, len(items) - 1)))
        if change == "add" or not items:
            items.insert(at, draw(element))
        elif change == "replace":
            items[at] = draw(element)
        elif change == "remove":
            del items[at]
        elif change == "cut":
            del items[at:]
        elif change == "repeat":
            items[at:at] = items[: draw(st.sampled_from([1, 2, 30]))]
        else:
            items[at], items[0] = items[0], items[at]
    return items


@st.composite
def any_arguments(draw, device):
    shape = draw(st.sampled_from([(2, 3), (9,), (), (0, 3), (2, 1, 17)]))
    count = draw(st.integers(0, 3))

    def tensor(shape):
        return drawn_values(draw, shape, draw(st.sampled_from(cases.WIDES)), [0.0, 1.0], True).to(device)

    def wrong():
        kind = draw(st.sampled_from(["shape", "dtype", "meta", "sparse", "none", "number"]))
        if kind == "shape":
            return tensor(draw(st.sampled_from(WRONG_SHAPES)))
        t = torch.ones(draw(st.sampled_from([shape, ()])), device=device)
        if kind == "dtype":
            return t.to(draw(st.sampled_from(WRONG_DTYPES)))
        return {"meta": t.to("meta"), "sparse": t.to_sparse(), "none": None, "number": 2.0}[kind]

    if draw(st.integers(0, 9)) == 9:
        program, scalars = draw(st.lists(INTEGERS, max_size=60)), draw(st.lists(FLOATS, max_size=30))
    else:
        program, scalars = encode(draw(programs(count)))
        program, scalars = changed(draw, program, INTEGERS), changed(draw, scalars, FLOATS)
    operands = [tensor(operand_shape(draw, shape)) for _ in range(count)]
    if draw(st.integers(0, 4)) == 4:
        operands = [wrong() if t is None else t for t in changed(draw, operands, st.none())]
    x = wrong() if draw(st.integers(0, 19)) == 19 else tensor(shape)
    return x, operands, program, scalars


def has_no_reference(steps):
    """F.softshrink refuses an infinite lambda. torch.clamp drops a single bound that is NaN, where torch.clamp_min and
    clamp_max, and the library, return NaN."""
    scalars = [(name, values[0]) for name, _, values in steps if values]
    return any(
        (name == "Softshrink" and math.isinf(value)) or (name in ("MinScalar", "MaxScalar") and math.isnan(value))
        for name, value in scalars
    )


def outcome(function, *arguments):
    """The result, or which error it is and what it says."""
    try:
        return function(*arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        assert re.search(r"fused_act(\.|::)chain", str(error)), error  # :: where the dispatcher refuses
        return type(error), str(error)


def test_malformed_programs(device):
    taken = []

    def compare(arguments):
        x, operands, program, scalars = arguments
        result = outcome(chain, *arguments)
        taken.append(isinstance(result, torch.Tensor))
        tensors = [x, *operands]
        if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided for t in tensors):
            return
        gradients = outcome(torch.ops.fused_act.chain_backward, torch.ones_like(x), *arguments)
        assert taken[-1] == isinstance(gradients[0], torch.Tensor), (result, gradients)
        if any(t.device.type != device.type for t in tensors):
            return
        on_meta = outcome(chain, x.to("meta"), [t.to("meta") for t in operands], program, scalars)
        if not taken[-1]:
            assert on_meta == result
            return
        assert on_meta.shape == result.shape and on_meta.stride() == result.stride()
        compute = oracle.COMPUTE[x.dtype]
        steps = with_scalars(decode(program, scalars), compute)
        if has_no_reference(steps):
            return
        tensors = [t.to(compute) for t in tensors]
        assert_within(result, expectation(steps, tensors[0], tensors[1:], torch.ones_like(x), compute)[0], x=x)

    examples(0.25, any_arguments(device), compare)
    assert 0.1 * len(taken) < sum(taken) < 0.9 * len(taken)


# ---------------------------------------------------------------------------------------------------------------------
# Functions to fuse

# Of values {a} and {b}. Fused or not, these have the same bits:
LINES_AS_EAGER = [
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.min({a}, {b})", "torch.rsub({a}, {b})",
    "torch.relu({a})", "F.relu6({a})", "F.leaky_relu({a}, 0.1)", "F.hardtanh({a})", "F.hardswish({a})", "-{a}",
    "hardsigmoid({a})", "F.hardshrink({a})", "F.softshrink({a}, 0.25)", "F.threshold({a}, 0.1, -1)", "abs({a})",
    "{a}.clamp(-1.1, 0.9)", "clamp({a}, min=-0.5)", "{a}.clip(max=0.9)", "{a} * 0.3", "2 * {a}", "{a} / 3", "{a} + 1",
    "0.5 - {a}", "{a} - 0.25", "{a}.square()", "{a} / (1 + abs({b}))", "{a} * clamp(({a} + 3) / 6, 0, 1)",
    "torch.min({a}, torch.tensor(0.5, dtype={a}.dtype, device={a}.device))",
]  # fmt: skip
LINES = [
    *LINES_AS_EAGER, "torch.tanh({a})", "{a}.sigmoid()", "F.silu({a})", "F.gelu({a})", "F.mish({a})",
    "F.gelu({a}, approximate='tanh')", "F.softplus({a})", "F.elu({a}, 1.5)", "F.celu({a})", "F.selu({a})",
    "F.logsigmoid({a})", "F.tanhshrink({a})", "F.softsign({a})", "torch.exp(-abs({a}))", "(abs({a}) + 1).log()",
    "(abs({a}) + 1).rsqrt()", "(abs({a}) + 0.5) ** -2", "torch.tanh({a}) ** 3", "torch.pow({a}.sin(), 2)",
    "torch.lerp({a}, {b}, 0.3)", "{a} * torch.sigmoid({a})", "{a} * torch.sigmoid(1.702 * {a})",
    "{a} * torch.tanh(F.softplus({a}))", "0.5 * {a} * (1 + torch.erf({a} / 2**0.5))", "1 / (abs({a}) + 1)",
    "0.7 * {a} * (1 + torch.tanh({b}))", "{a} * F.relu6({a} + 3) / 6",
]  # fmt: skip
# No steps. Those of the second list share the memory of {a}.
OTHERS = [
    "{a}.sin()", "torch.atleast_1d({a}).flip(0)", "{a}.mean(-1, keepdim=True)", "{a}.softmax(-1)", "{a}.clone()",
    "torch.where({a} > 0, {a}, {b})", "torch.add({a}, {b}, alpha=2)",
]  # fmt: skip
ALIASES = ["{a}", "{a}.detach()", "{a}.contiguous()", "{a}.view({a}.shape)", "{a}[...]"]
IN_PLACE = [
    "{a}.relu_()", "{a}.mul_(0.5)", "{a}.clamp_(-1.1, 0.9)", "{a}.add_(1)", "F.leaky_relu_({a}, 0.2)",
    "F.relu({a}, inplace=True)",
]  # fmt: skip


class Function(NamedTuple):
    """A function of x and y, as it is written."""

    lines: list  # {} where a value may get an error
    results: str
    exact: bool
    overwrites: bool

    def text(self, rough=""):
        lines = [line.format(rough) for line in self.lines]
        return "\n    ".join(["def function(x, y):", *lines, f"return [{self.results}]"])

    def __repr__(self):
        return self.text()

    def compiled(self, rough=None, clamp=torch.clamp, hardsigmoid=F.hardsigmoid):
        """`rough`: what is done to a value that may be rounded in another way. For the others see oracle.GRADIENTS."""
        scope = {"torch": torch, "F": F, "rough": rough, "clamp": clamp, "hardsigmoid": hardsigmoid}
        exec(self.text("rough" if rough else ""), scope)
        return scope["function"]


@st.composite
def functions(draw):
    exact, lines, names, overwrites = draw(st.booleans()), [], ["x", "y"], False
    kinds = st.sampled_from([LINES_AS_EAGER if exact else LINES] * 9 + [OTHERS, ALIASES, IN_PLACE])
    back = st.sampled_from([0] * 6 + [1] * 3 + [2, 2, 3, 4, 5, 6, 7])  # most lines go on with the last values
    for line, *places in draw(st.lists(st.tuples(kinds.flatmap(st.sampled_from), back, back), min_size=2, max_size=14)):
        a, b = (names[-1 - min(p, len(names) - 1)] for p in places)
        if line in IN_PLACE:
            if len(names) > 2:  # to overwrite an argument splits all that follows, so it is rarer
                a = names[max(2, len(names) - 1 - places[0])]
            overwrites = True
            lines.append(line.format(a=a))
            continue
        text = line.format(a=a, b=b)
        names.append(f"v{len(lines)}")
        lines.append(f"{names[-1]} = {text}" if line in ALIASES else f"{names[-1]} = {{}}({text})")
    results = [names[-1], *draw(st.lists(st.sampled_from(names), max_size=2))]
    shape = draw(st.sampled_from([(3, 4), (2, 3, 5), (9,), ()]))
    dtype = draw(st.sampled_from(cases.WIDES)) if exact else torch.float64
    tensors = [drawn_values(draw, s, dtype, [0.0, 1.0, 3.0], False) for s in (shape, operand_shape(draw, shape))]
    return Function(lines, ", ".join(results), exact, overwrites), tensors


def values_and_gradients(function, tensors):
    """Results and what is left in the arguments; gradients, or None where a value that they need was overwritten."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    arguments = [t.clone() for t in leaves]
    results = function(*arguments)
    weighted = [(r * torch.linspace(0.1, 1, r.numel()).to(r).reshape(r.shape)).sum() for r in results]
    total = sum(weighted + [0 * t.sum() for t in leaves])  # the results may all be detached
    try:
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        grads = None
    return [t.detach() for t in (*results, *arguments)], grads


def test_functions_to_fuse(device):
    kernels, differentiated = [], []

    def compare(drawn):
        written, tensors = drawn
        tensors = [t.to(device) for t in tensors]
        fused = fused_act.fuse(written.compiled())
        kernels.append(fused_kernels(fused, *(t.clone() for t in tensors)))
        values, grads = values_and_gradients(fused, tensors)
        own_values, own_grads = values_and_gradients(written.compiled(), tensors)
        differentiated.append(own_grads is not None)
        if written.exact:
            for a, b in zip(values, own_values, strict=True):
                assert_same(a, b)

        tensors = [t.cpu() for t in tensors]
        # Of F.hardswish and F.hardsigmoid eager's CUDA kernels hold 1/6 in float32.
        size = ERROR[tensors[0].dtype if device.type == "cpu" else torch.float32]
        g = torch.Generator().manual_seed(1)

        def rough(t):
            error = size * torch.randn(2, *t.shape, dtype=t.dtype, generator=g)
            return t * (1 + error[0]) + error[1]

        exact = dict(clamp=oracle.clamp, hardsigmoid=oracle.hardsigmoid)
        expected = values_and_gradients(written.compiled(**exact), tensors)
        # Half of them with eager's own derivatives: what is not fused has those.
        samples = [values_and_gradients(written.compiled(rough, **c), tensors) for c in (exact, {}, exact, {})]

        def compare_all(got, which):
            for k, (a, b) in enumerate(zip(got, expected[which], strict=True)):
                far = farthest([s[which][k] for s in samples], b)
                assert_within(a, Bounded(b.double(), (4 * far + size * (1 + b.abs())).double()))

        compare_all(values, 0)
        if grads is None:
            # A fused chain keeps its input, of which eager's steps may keep nothing. Where it was overwritten through
            # another name, autograd then refuses.
            assert own_grads is None or written.overwrites
        elif own_grads is not None:
            compare_all(grads, 1)

    examples(0.2, functions(), compare)
    assert sum(k > 0 for k in kernels) > 0.5 * len(kernels)
    assert sum(differentiated) > 0.5 * len(differentiated)
