"""Inputs for the tests: values that reach every exponent, kink, tie and special, and layouts of every kind."""

import functools
import math
from pathlib import Path

import oracle
import pytest
import torch

import fused_act

HALVES = (torch.float16, torch.bfloat16)
WIDES = (torch.float32, torch.float64)
DTYPES = HALVES + WIDES

# The source tree, where the tests lie in one: some tests read it and skip where it is absent.
ROOT = Path(__file__).resolve().parent.parent


def has_kernel(name, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"fused_act::{name}", key)


def cuda_built():
    return any(has_kernel(op.name, "CUDA") for op in fused_act.ops())


def no_cuda_reason():
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "" if cuda_built() else "fused_act was built without CUDA"


needs_cuda = pytest.mark.skipif(bool(no_cuda_reason()), reason=no_cuda_reason() or "CUDA is there")


def operands(op):
    return [p.name for p in op.parameters if p.kind == "operand"]


def scalars(op):
    return [p for p in op.parameters if p.kind == "scalar"]


def derived(op, suffix):
    """The dispatcher operator NAME_backward, NAME_jvp or NAME_double_backward."""
    return getattr(torch.ops.fused_act, f"{op.name}_{suffix}")


def call(op, x, params):
    return getattr(torch.ops.fused_act, op.name)(x, **params)


def backward(op, grad_output, x, params, *, only_x=False):
    """All gradients from NAME_backward, as a tuple whatever the number of operands."""
    if not operands(op):
        return (derived(op, "backward")(grad_output, x, **params),)
    mask = [True] + [not only_x] * len(operands(op))
    return tuple(derived(op, "backward")(grad_output, x, **{"dim": 1, **params}, output_mask=mask))


# Exact and inexact in float32, a negative one, one that bfloat16 rounds by 0.1 %.
SCALARS = (2.0, -0.75, 0.3, 3.0, 0.01)


def scalar_sets(op):
    """A few choices of all scalar parameters, one of which leaves the defaults as they are."""
    params = scalars(op)
    if not params:
        return [{}]
    sets = [{p.name: SCALARS[(i + 2 * k) % len(SCALARS)] for k, p in enumerate(params)} for i in range(len(SCALARS))]
    if any(p.default is not None for p in params):
        sets.append({p.name: SCALARS[k] for k, p in enumerate(params) if p.default is None})
    return sets


def some_scalars(op):
    return scalar_sets(op)[0]


def kinks(op, chosen):
    """Where an operator may have a kink or a tie: constants of its expression, its scalars, and the usual ones."""
    values = {0.0, 0.5, 1.0, 3.0, 6.0, 20.0}
    values.update(abs(float(v)) for v in (*oracle.constants(op), *chosen.values()) if isinstance(v, (int, float)))
    values.update(abs(p.default) for p in scalars(op) if p.default is not None)
    return sorted(values | {-v for v in values})


@functools.cache
def patterns(dtype):
    """All 65,536 bit patterns of a 16-bit type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def neighbours(values, dtype):
    """Each value rounded to dtype, with two neighbours to either side."""
    t = torch.tensor(values, dtype=torch.float64).to(dtype)
    if dtype in HALVES:
        bits = t.view(torch.int16)
        return torch.cat([t] + [(bits + k).view(dtype) for k in (-2, -1, 1, 2)])
    near, up, down = [t], t, t
    for _ in range(2):
        up = torch.nextafter(up, torch.full_like(up, math.inf))
        down = torch.nextafter(down, torch.full_like(down, -math.inf))
        near += [up, down]
    return torch.cat(near)


def specials(dtype):
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    values = [
        math.nan,
        math.inf,
        -math.inf,
        0.0,
        -0.0,
        info.max,
        info.min,
        info.smallest_normal,
        tiny,
        -tiny,
        1.0,
        -1.0,
    ]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


@functools.cache
def exponents(dtype):
    """Every exponent of float32 or float64 with twelve mantissas and both signs; NaNs of both signs among them."""
    mantissa, integer, bias = (23, torch.int32, 255) if dtype == torch.float32 else (52, torch.int64, 2047)
    e = torch.arange(bias + 1, dtype=torch.int64)[:, None]
    g = torch.Generator().manual_seed(1)
    m = torch.tensor([0, 1, 2, 2 ** (mantissa - 1), 2**mantissa - 1, 2**mantissa - 2])
    m = torch.cat([m, torch.randint(2**mantissa, (6,), generator=g)])
    positive = ((e << mantissa) | m).reshape(-1).to(integer).view(dtype)
    return torch.cat([positive, -positive])


def grid(dtype, op, chosen):
    """All bit patterns of a half type; otherwise all exponents, kinks with neighbours, specials, and a dense middle."""
    if dtype in HALVES:
        return patterns(dtype)
    g = torch.Generator().manual_seed(2)
    dense = torch.rand(4001, generator=g, dtype=torch.float64) * 16 - 8
    return torch.cat([exponents(dtype), neighbours(kinks(op, chosen), dtype), specials(dtype), dense.to(dtype)])


@functools.cache
def sweep():
    """Every 509th float32 from 2^-12 to 2^7, of either sign: where functions bend."""
    first, last = torch.tensor([2.0**-12, 2.0**7]).view(torch.int32).tolist()
    positive = torch.arange(first, last, 509, dtype=torch.int32).view(torch.float32)
    return torch.cat([positive, -positive])


def finite_grid(dtype, op, chosen, n=4096, bound=50.0):
    """Values without specials, kinks included: for sums, where one infinity would hide everything else."""
    g = torch.Generator().manual_seed(3)
    near = neighbours(kinks(op, chosen), dtype)
    near = near[near.abs() <= bound]
    wide = torch.exp2(torch.rand(n, generator=g, dtype=torch.float64) * 20 - 15)
    wide = wide.clamp(max=bound) * torch.randint(0, 2, (n,), generator=g).mul(2).sub(1)
    return torch.cat([near, wide.to(dtype)])[:n]


def filled(shape, dtype, op=None, seed=0):
    """A tensor of `shape` whose elements are drawn from kinks, their neighbours and ordinary values, in mixed order."""
    source = finite_grid(dtype, op, some_scalars(op)) if op is not None else ordinary(dtype)
    g = torch.Generator().manual_seed(seed)
    return source[torch.randint(len(source), tuple(shape), generator=g)]


def ordinary(dtype, n=509):
    g = torch.Generator().manual_seed(4)
    return (torch.rand(n, generator=g, dtype=torch.float64) * 8 - 4).to(dtype)


def operand_values(shape, dtype, seed=0):
    g = torch.Generator().manual_seed(seed + 100)
    return (torch.rand(tuple(shape), generator=g, dtype=torch.float64) * 4 - 2).to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Operand forms: the shape of an operand for an x of at least two dimensions, None where the form does not apply


OPERAND_FORMS = {
    "channel": lambda s: (s[1],),
    "channel_trailing_ones": lambda s: (s[1],) + (1,) * (len(s) - 2) if len(s) > 2 else None,
    "channel_all_dims": lambda s: (1, s[1]) + (1,) * (len(s) - 2),
    "one_element": lambda s: (1,),
    "zero_dim": lambda s: (),
    "full": lambda s: tuple(s),
    "per_row": lambda s: (s[0],) + (1,) * (len(s) - 1),
    "row_and_channel": lambda s: (s[0], s[1]) + (1,) * (len(s) - 2),
    "last_dim": lambda s: (1, s[-1]),
    "inner_dims": lambda s: tuple(s[-2:]),
    "first_and_last": lambda s: (s[0],) + (1,) * (len(s) - 2) + (s[-1],),
    "without_batch": lambda s: tuple(s[1:]) if len(s) > 2 else None,
}


def make_params(op, shape, dtype, device="cpu", form="channel", chosen=None, seed=0):
    """Keyword arguments for `op` on an x of `shape`: scalars, and operands of the given form."""
    params = dict(some_scalars(op) if chosen is None else chosen)
    for k, name in enumerate(operands(op)):
        if form == "channel" and len(shape) < 2:
            operand_shape = tuple(shape)
        else:
            operand_shape = OPERAND_FORMS[form](shape)
        params[name] = operand_values(operand_shape, dtype, seed + k).to(device)
    if operands(op) and len(shape) == 1:
        params["dim"] = 0
    return params


def with_operands(params, function):
    """The same arguments with `function` applied to the tensors among them."""
    return {k: function(v) if isinstance(v, torch.Tensor) else v for k, v in params.items()}


def tracked(x, params, x_needs=True, operands_need=True):
    """Leaves for x and the operands, as (x, params, the list of those that require a gradient)."""
    x = x.detach().requires_grad_(x_needs)
    params = with_operands(params, lambda t: t.detach().requires_grad_(operands_need))
    leaves = [t for t in (x, *params.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    return x, params, leaves


def away_from_kinks(op, shape, chosen, device):
    """float64 inputs around which the function is smooth, checked by comparing slopes to either side."""
    g = torch.Generator().manual_seed(7)
    params = make_params(op, shape, torch.float64, chosen=chosen)
    x = torch.zeros(shape, dtype=torch.float64)
    pending = torch.ones(shape, dtype=torch.bool)
    for _ in range(200):
        x = torch.where(pending, torch.rand(shape, generator=g, dtype=torch.float64) * 10 - 5, x)
        low, high = (oracle.slopes(op, x + h, params)[0] for h in (-0.05, 0.05))
        pending = (low - high).abs() > 0.1
        if not pending.any():
            break
    assert not pending.any(), "no smooth point found"
    return x.to(device), with_operands(params, lambda t: t.to(device))


# ---------------------------------------------------------------------------------------------------------------------
# Layouts: functions that return a tensor of the same shape and dtype in another layout. All copy the values, but for
# the expanded ones, which repeat a part of them.


def smooth_function(op, chosen, device):
    """The operator as a function of the tensors that PyTorch's numerical checks vary, and those tensors."""
    x, params, leaves = tracked(*away_from_kinks(op, (2, 3, 2), chosen, device))
    names = operands(op)
    return lambda x, *values: call(op, x, {**params, **dict(zip(names, values))}), leaves


def permuted(t, order):
    inverse = [order.index(d) for d in range(t.dim())]
    return t.permute(order).contiguous().permute(inverse)


def embedded(t, begin, step):
    """A slice of a larger tensor, filled with NaN elsewhere so that a wrong address shows."""
    big = torch.full([n * s + 2 * b for n, s, b in zip(t.shape, step, begin)], math.nan, dtype=t.dtype, device=t.device)
    view = big[tuple(slice(b, b + n * s, s) for n, s, b in zip(t.shape, step, begin))]
    return view.copy_(t)


def offset(t, elements):
    """The same strides at an address that lies `elements` after an aligned one."""
    extent = sum((n - 1) * s for n, s in zip(t.shape, t.stride())) + 1 if t.numel() else 0
    storage = torch.full((elements + extent,), math.nan, dtype=t.dtype, device=t.device)
    return torch.as_strided(storage, t.shape, t.stride(), elements).copy_(t)


def windows(t):
    """Overlapping windows: element [.., i, j] shares memory with [.., i - 1, j + 1]."""
    return torch.as_strided(t.contiguous(), t.shape, [*t.stride()[:-2], 1, 1]) if t.dim() > 1 else t


def odd_strides_of_ones(t):
    """Dimensions of size 1 with a stride that means nothing."""
    return torch.as_strided(
        t, t.shape, [s if n != 1 else 7 + 2 * i for i, (n, s) in enumerate(zip(t.shape, t.stride()))]
    )


LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: permuted(t, [0, *range(2, t.dim()), 1]) if t.dim() > 2 else t,
    "transposed": lambda t: permuted(t, [*range(t.dim() - 2), t.dim() - 1, t.dim() - 2]) if t.dim() > 1 else t,
    "reversed_dims": lambda t: permuted(t, list(reversed(range(t.dim())))),
    "batch_inner": lambda t: permuted(t, [*range(1, t.dim()), 0]) if t.dim() > 1 else t,
    "inner_crop": lambda t: embedded(t, [0] * (t.dim() - 1) + [1], [1] * t.dim()) if t.dim() else t,
    "crop": lambda t: embedded(t, [1] * t.dim(), [1] * t.dim()),
    "step_inner": lambda t: embedded(t, [0] * t.dim(), [1] * (t.dim() - 1) + [2]) if t.dim() else t,
    "step_all": lambda t: embedded(t, [1] * t.dim(), [2] * t.dim()),
    "step_channel": lambda t: embedded(t, [0] * t.dim(), [3 if d == 1 else 1 for d in range(t.dim())]),
    "channels_last_crop": lambda t: permuted_crop(t),
    "expanded_batch": lambda t: t[:1].expand(t.shape) if t.dim() else t,
    "expanded_channel": lambda t: t[:, :1].expand(t.shape) if t.dim() > 1 else t,
    "expanded_inner": lambda t: t[..., :1].expand(t.shape) if t.dim() else t,
    "expanded_all": lambda t: t.reshape(-1)[:1].reshape(()).expand(t.shape) if t.numel() else t,
    "offset_1": lambda t: offset(t.contiguous(), 1),
    "offset_7_channels_last": lambda t: offset(LAYOUTS["channels_last"](t), 7),
    "windows": windows,
    "odd_strides_of_ones": odd_strides_of_ones,
}


def permuted_crop(t):
    if t.dim() < 3:
        return embedded(t, [0] * t.dim(), [1] * t.dim())
    order = [0, *range(2, t.dim()), 1]
    inverse = [order.index(d) for d in range(t.dim())]
    return embedded(t.permute(order), [0, *[1] * (t.dim() - 2), 0], [1] * t.dim()).permute(inverse)


SHAPES = [
    (3, 5, 4, 7),
    (2, 8, 4, 8),
    (2, 3, 4, 2, 5),
    (2, 3, 2, 2, 3, 2),
    (2, 3, 1, 2, 1, 2, 3),
    (4, 6, 5),
    (9, 16),
    (7, 3),
    (23,),
    (1, 6, 1, 1),
    (5, 1, 3, 3),
    (1, 1, 1, 1),
    (1,),
    (),
    (0, 3, 4),
    (3, 0, 4),
    (2, 3, 0),
    (0,),
]
