"""Every CUDA kernel once, in every mode and dtype, against the CPU kernels: short enough for compute-sanitizer.

compute-sanitizer --tool memcheck python -m pytest tests/test_every_kernel.py      (also racecheck, initcheck)
"""

import re

import cases
import pytest
import torch

from fused_act import ops

pytestmark = cases.needs_cuda

# Name of the kernel that the case reaches: (shape, shape of the operands or None for one per channel, layout of x).
CASES = {
    "flat": ((3, 5, 7, 9), None, "contiguous"),
    "flat, channels_last": ((2, 8, 5, 3), None, "channels_last"),
    "strided": ((3, 5, 7, 9), None, "step"),
    "strided, unaligned": ((3, 5, 7, 9), None, "offset"),
    "rows": ((2, 3, 70, 70), None, "contiguous"),
    "rows, short": ((5, 6, 3, 3), None, "contiguous"),
    "rows, a plane in pieces": ((1, 2, 300, 200), None, "contiguous"),
    "rows, one sum": ((4, 6, 50, 50), (1, 1, 1), "contiguous"),
    "rows, per sample": ((4, 6, 50, 50), (4, 6, 1, 1), "contiguous"),
    "columns": ((3000, 64), None, "contiguous"),
    "columns, odd": ((3000, 7), None, "contiguous"),
    "columns, wide": ((9, 5000), None, "contiguous"),
    "reduce": ((6, 5, 4, 30), (6, 1, 4, 1), "contiguous"),
    "reduce, strided": ((6, 5, 40, 30), None, "step"),
    "full": ((3, 5, 7, 9), (3, 5, 7, 9), "contiguous"),
    "full, other order": ((3, 5, 7, 9), (3, 5, 7, 9), "channels_last"),
    "empty": ((0, 5, 7), None, "contiguous"),
}


def arrange(x, layout):
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "step":
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "offset":
        flat = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    return x


def results(op, dtype, device, shape, operand_shape, layout):
    g = torch.Generator().manual_seed(4)

    def make(size):
        return torch.randint(-64, 65, size, generator=g).div(16).to(dtype).to(device)

    packed = (*shape[:-1], 2 * shape[-1]) if op.packing else shape
    x, tangent, go = (arrange(make(size), layout) for size in (packed, packed, shape))
    parameters = {p.name: None if p.name == "alpha" else 0.5 for p in op.parameters if p.kind == "scalar"}
    parameters |= {p.name: "silu" for p in op.parameters if p.kind == "activation"}
    sizes = {
        p.name: shape if p.is_input else operand_shape or (shape[1],) for p in op.parameters if p.kind == "operand"
    }
    operands, directions = ({n: make(size) for n, size in sizes.items()} for _ in range(2))
    arguments = {op.input: x, **parameters, **operands, **({"dim": 1} if operands else {})}
    mask = {"output_mask": [True] * (1 + len(operands))} if operands else {}
    ops = torch.ops.fused_act
    out = [getattr(ops, op.name)(**arguments)]
    out.append(
        getattr(ops, f"{op.name}_jvp")(
            **arguments, **{f"{op.input}_tangent": tangent}, **{f"{n}_tangent": v for n, v in directions.items()}
        )
    )
    back = getattr(ops, f"{op.name}_backward")(go, **arguments, **mask)
    out += back if operands else [back]
    out += getattr(ops, f"{op.name}_double_backward")(
        go,
        **arguments,
        **{f"grad_grad_{op.input}": tangent},
        **{f"grad_grad_{n}": v for n, v in directions.items()},
        output_mask=[True] * (2 + len(operands)),
    )
    return out


# Beside the compiled chains that conftest's `op` runs through: those that are Programs, with each kind of operand.
PROGRAMS = [op for op in ops() if op.name in ("bias_act", "scale_shift_act", "act_add", "gated", "silu_and_mul")]


@pytest.mark.parametrize("case", CASES)
def test_every_kernel(op, dtype, case):
    compare_devices(op, dtype, case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda op: op.name)
def test_every_kernel_of_programs(program, dtype, case):
    compare_devices(program, dtype, case)


def compare_devices(op, dtype, case):
    on_gpu = results(op, dtype, "cuda", *CASES[case])
    on_cpu = results(op, dtype, "cpu", *CASES[case])
    terms = max(1, torch.Size(CASES[case][0]).numel())
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert a.stride() == b.stride() and a.dtype == b.dtype
        # Values are multiples of 1/16 below 4, so an element is off by a rounding or two, and a sum by those of its
        # terms.
        loose = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * terms**0.5
        torch.testing.assert_close(a.cpu(), b, rtol=4 * loose, atol=4 * loose * terms**0.5)


def rows_of_no_vectors(rows, length, dtype):
    """Two tensors of shape (rows, length): as the halves of one, as every third row, after an odd offset, one of them
    alone so, with two pitches."""
    g = torch.Generator().manual_seed(rows)

    def make(*size):
        return torch.randn(size, generator=g).to(dtype).cuda()

    count = rows * length
    packed, sparse, shifted, plain = (
        make(rows, 2 * length),
        make(2, rows, 3, length),
        make(2 * count + 1),
        make(rows, length),
    )
    yield from (packed.chunk(2, -1), sparse[:, :, 1].unbind(), shifted[1:].view(2, rows, length).unbind())
    yield from (
        (packed[:, :length], plain),
        (plain, sparse[0, :, 2]),
        (shifted[1 : 1 + count].view(rows, length), plain),
    )
    yield packed[:, :length], sparse[0, :, 1]


def is_of_whole_vectors(t):
    unit = 16 // t.element_size()
    return t.data_ptr() % 16 == 0 and all(n % unit == 0 for n in (t.shape[1], t.stride(0)))


@pytest.mark.parametrize("rows, length", [(1, 1), (1, 7), (3, 63), (129, 5), (61, 1001), (2, 4096)])
@pytest.mark.parametrize("dtype", [*cases.HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("act", ["relu", "silu", "hardtanh"])
def test_what_no_vector_fits(act, dtype, rows, length):
    """Residuals and gates have kernels for that, which take elements a warp's width apart: to the bit what whole
    vectors give. relu and hardtanh leave codes."""
    calls = {
        "act_add": lambda x, y: torch.ops.fused_act.act_add(x, y, act, dim=-1),
        "gated": lambda x, y: torch.ops.fused_act.gated(x, y, act, dim=-1),
    }

    def run(values, go):
        leaves = [t.detach().requires_grad_() for t in values]
        y = call(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, go)]

    for name, call in calls.items():
        for tensors in rows_of_no_vectors(rows, length, dtype):
            go = torch.randn(rows, length, device="cuda").to(dtype)
            pad = (0, -length % 16, 0, 1)
            whole = [torch.nn.functional.pad(t, pad) for t in (*tensors, go)]
            with torch.profiler.profile() as profile:
                results = run(tensors, go)
                torch.cuda.synchronize()
            kernels = [e.name for e in profile.events() if re.search("_kernel", e.name)]
            if act == "silu" and rows * length > 1:
                spread = not all(map(is_of_whole_vectors, tensors))
                assert len(kernels) == 2 and all(("spread" in k) == spread and "Exact" in k for k in kernels), kernels
            for got, want in zip(results, run(whole[:2], whole[2]), strict=True):
                assert torch.equal(got, want[:rows, :length]), (name, got, want)
