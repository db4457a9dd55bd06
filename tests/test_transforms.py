"""Transforms (CONTRACT, section 4): torch.func, vmap, checkpointing, inference_mode, autocast, compiled autograd."""

import itertools
import threading
import warnings

import cases
import oracle
import pytest
import torch
from cases import call, derived, tracked
from oracle import assert_same
from torch.utils.checkpoint import checkpoint

import fused_act


def smooth(op, shape=(4, 3), dtype=torch.float64, device="cpu"):
    """Inputs between kinks and the operands, as (x, names, operands, function of all of them)."""
    x, params = cases.away_from_kinks(op, shape, cases.some_scalars(op), device)
    x, params = x.to(dtype), cases.with_operands(params, lambda t: t.to(dtype))
    names = cases.operands(op)

    def fused(x, *operands):
        return call(op, x, {**params, **dict(zip(names, operands))})

    def eager(x, *operands):
        return oracle.evaluate(op, x, {**params, **dict(zip(names, operands))}, oracle.GRADIENTS)

    return (x, *(params[n] for n in names)), fused, eager


def assert_all_close(actual, expected, **tolerances):
    torch.testing.assert_close(actual, expected, check_stride=False, **tolerances)


def every(inputs):
    return tuple(range(len(inputs)))


def test_func_grad(op, device):
    inputs, fused, eager = smooth(op, device=device)
    for f in (torch.func.grad, torch.func.grad_and_value):
        a, b = (f(lambda *t: g(*t).sin().sum(), argnums=every(inputs))(*inputs) for g in (fused, eager))
        assert_all_close(a, b)


def test_func_vjp(op, device):
    inputs, fused, eager = smooth(op, device=device)
    go = cases.operand_values(inputs[0].shape, torch.float64).to(device)
    assert_all_close(torch.func.vjp(fused, *inputs)[1](go), torch.func.vjp(eager, *inputs)[1](go))


def test_func_jvp(op, device):
    inputs, fused, eager = smooth(op, device=device)
    t = tuple(cases.operand_values(i.shape, torch.float64, k).to(device) for k, i in enumerate(inputs))
    assert_all_close(torch.func.jvp(fused, inputs, t), torch.func.jvp(eager, inputs, t))
    for k in every(inputs):  # a tangent for one input only
        a, b = (
            torch.func.jvp(lambda v: g(*inputs[:k], v, *inputs[k + 1 :]), (inputs[k],), (t[k],)) for g in (fused, eager)
        )
        assert_all_close(a, b)


def test_func_linearize(op):
    inputs, fused, eager = smooth(op)
    t = tuple(cases.operand_values(i.shape, torch.float64, k) for k, i in enumerate(inputs))
    a, b = (torch.func.linearize(g, *inputs)[1](*t) for g in (fused, eager))
    assert_all_close(a, b)


@pytest.mark.parametrize("jacobian", [torch.func.jacrev, torch.func.jacfwd], ids=lambda f: f.__name__)
def test_jacobian(op, device, jacobian):
    inputs, fused, eager = smooth(op, device=device)
    assert_all_close(jacobian(fused, every(inputs))(*inputs), torch.func.jacrev(eager, every(inputs))(*inputs))


SECOND = {
    "hessian": torch.func.hessian,
    "jacrev_of_jacrev": lambda f, n: torch.func.jacrev(torch.func.jacrev(f, n), n),
    "jacfwd_of_jacrev": lambda f, n: torch.func.jacfwd(torch.func.jacrev(f, n), n),
    "jacrev_of_jacfwd": lambda f, n: torch.func.jacrev(torch.func.jacfwd(f, n), n),
    "jacfwd_of_jacfwd": lambda f, n: torch.func.jacfwd(torch.func.jacfwd(f, n), n),
}


@pytest.mark.parametrize("order", SECOND)
def test_second_order(op, device, order):
    inputs, fused, eager = smooth(op, (2, 3), device=device)
    a = SECOND[order](lambda *t: fused(*t).pow(2).sum(), every(inputs))(*inputs)
    b = torch.func.hessian(lambda *t: eager(*t).pow(2).sum(), every(inputs))(*inputs)
    assert_all_close(a, b)


def test_third_derivative_in_torch_func_is_never_wrong(op):
    """An error that says so; for a piecewise linear operator the right value is as good."""
    inputs, fused, eager = smooth(op, (2, 30))

    def third(function):
        total = lambda x: function(x, *inputs[1:]).pow(3).sum()  # noqa: E731
        for _ in range(2):
            total = (lambda inner: lambda x: torch.func.grad(inner)(x).pow(2).sum())(total)
        return torch.func.grad(total)(inputs[0])

    x = inputs[0].clone().requires_grad_()
    slope = torch.autograd.grad(eager(x, *inputs[1:]).sum(), x, create_graph=True)[0]
    curved = slope.requires_grad and bool((torch.autograd.grad(slope.sum(), x)[0] != 0).any())
    try:
        value = third(fused)
    except RuntimeError as error:
        assert op.name in str(error) and "third derivative" in str(error)
    else:
        assert not curved
        assert_all_close(value, third(eager))


def test_autograd_functional(op):
    """The older torch.autograd.functional, which uses the double-backward trick for jvp."""
    inputs, fused, eager = smooth(op, (2, 3))
    for f in (
        torch.autograd.functional.jacobian,
        lambda g, i: torch.autograd.functional.hessian(lambda *t: g(*t).pow(2).sum(), i),
    ):
        assert_all_close(f(fused, inputs), f(eager, inputs))
    ones = tuple(map(torch.ones_like, inputs))
    a, b = (torch.autograd.functional.jvp(g, inputs, ones) for g in (fused, eager))
    assert_all_close(a, b)


# ---------------------------------------------------------------------------------------------------------------------
# vmap


def stack(function, in_dims, args, size, out_dim=0):
    rows = [function(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims))) for i in range(size)]
    if isinstance(rows[0], (tuple, list)):
        return tuple(None if r[0] is None else torch.stack(r, out_dim) for r in zip(*rows))
    return torch.stack(rows, out_dim)


def batched(shape, position, size, dtype=torch.float32, seed=0):
    full = list(shape)
    full.insert(position if position >= 0 else len(shape) + 1 + position, size)
    return cases.operand_values(full, dtype, seed)


def strict_vmap(function, in_dims, **options):
    """vmap that fails where PyTorch falls back to a loop."""

    def run(*args):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*performance drop.*")
            return torch.vmap(function, in_dims, **options)(*args)

    return run


def in_dims_of(count):
    """Every combination of unbatched, batched in front and batched at the end, for `count` tensors."""
    for dims in itertools.product((None, 0, 1, -1), repeat=count):
        if any(d is not None for d in dims):
            yield dims


@pytest.mark.parametrize(
    "form", ["channel", "full", "channel_trailing_ones", "one_element", "zero_dim", "without_batch"]
)
@pytest.mark.parametrize("dim", [1, -1, 0])
def test_vmap_forward(op, device, form, dim):
    """The same bits as a loop, for every choice of batch dimensions."""
    size, shape = 3, (4, 5, 2)
    names = cases.operands(op)
    if not names and (form, dim) != ("channel", 1):
        pytest.skip("the form of an operand is nothing to an operator without one")
    for in_dims in in_dims_of(1 + len(names)):
        params = cases.make_params(op, shape, torch.float32, form=form)
        if names:
            params["dim"] = dim
            if form == "channel":
                params.update({n: cases.operand_values((shape[dim],), torch.float32, k) for k, n in enumerate(names)})
        args = []
        for k, (d, t) in enumerate(zip(in_dims, [torch.zeros(shape), *(params[n] for n in names)])):
            d = None if d is None else max(-1, min(d, t.dim()))
            in_dims = (*in_dims[:k], d, *in_dims[k + 1 :])
            args.append(
                (t if k else cases.filled(shape, torch.float32, op)) if d is None else batched(t.shape, d, size, seed=k)
            )
        args = [a.to(device) for a in args]

        def function(x, *operands):
            return call(op, x, {**params, **dict(zip(names, operands))})

        assert_same(strict_vmap(function, in_dims)(*args), stack(function, in_dims, args, size))
        assert_same(strict_vmap(function, in_dims, out_dims=1)(*args), stack(function, in_dims, args, size, 1))


@pytest.mark.parametrize("suffix", ["backward", "jvp", "double_backward"])
def test_vmap_of_derived_operators(op, device, suffix):
    size, shape = 3, (4, 5, 2)
    names = cases.operands(op)
    params = {"dim": 1, **cases.make_params(op, shape, torch.float32)} if names else cases.some_scalars(op)
    tensors = {"x": shape, **{n: (5,) for n in names}}
    more = {
        "backward": {"grad_output": shape},
        "jvp": {"x_tangent": shape, **{f"{n}_tangent": (5,) for n in names}},
        "double_backward": {"grad_output": shape, "grad_grad_x": shape, **{f"grad_grad_{n}": (5,) for n in names}},
    }[suffix]
    tensors.update(more)
    mask = {}
    if suffix == "double_backward":
        mask["output_mask"] = [True] * (2 + len(names))
    elif suffix == "backward" and names:
        mask["output_mask"] = [True] * (1 + len(names))
    absent_choices = [()] + (
        [tuple(f"grad_grad_{n}" for n in names), ("grad_grad_x",)] if suffix == "double_backward" and names else []
    )
    for absent in absent_choices:
        present = [n for n in tensors if n not in absent]
        for in_dims in itertools.product((None, 0, -1), repeat=len(present)):
            if all(d is None for d in in_dims):
                continue
            args = [
                (
                    batched(tensors[n], d, size, seed=k)
                    if d is not None
                    else cases.operand_values(tensors[n], torch.float32, k)
                ).to(device)
                for k, (n, d) in enumerate(zip(present, in_dims))
            ]

            def function(*args):
                named = {**params, **dict.fromkeys(absent), **dict(zip(present, args)), **mask}
                return derived(op, suffix)(**named)

            a, b = strict_vmap(function, in_dims)(*args), stack(function, in_dims, args, size)
            for got, want in zip(a, b) if isinstance(a, (tuple, list)) else [(a, b)]:
                torch.testing.assert_close(got, want, check_stride=False, rtol=1e-5, atol=1e-5)


def test_vmap_of_output_mask(operand_op):
    """Outputs that are not asked for stay None under vmap where vmap allows it, and cost nothing where it does not."""
    names = cases.operands(operand_op)
    params = {"dim": 1, **cases.make_params(operand_op, (4, 5), torch.float32)}
    go, x = batched((4, 5), 0, 3, seed=1), batched((4, 5), 0, 3, seed=2)
    for k in range(1 + len(names)):
        mask = [i == k for i in range(1 + len(names))]

        def function(go, x):
            return derived(operand_op, "backward")(go, x, **params, output_mask=mask)[k]

        assert_all_close(
            strict_vmap(function, (0, 0))(go, x), stack(function, (0, 0), (go, x), 3), rtol=1e-5, atol=1e-5
        )


def test_nested_vmap(op, device):
    x = cases.filled((3, 4, 5, 6), torch.float32, op).to(device)
    params = cases.make_params(op, (5, 6), torch.float32, device)
    y = torch.vmap(torch.vmap(lambda t: call(op, t, params)))(x)
    assert_same(y, torch.stack([torch.stack([call(op, t, params) for t in row]) for row in x]))


def test_vmap_over_nothing_but_a_vector(op):
    """Each example is a vector or a single number."""
    x = cases.filled((7, 6), torch.float32, op)
    params = dict(cases.some_scalars(op), **{n: torch.tensor(0.3) for n in cases.operands(op)})
    expected = call(op, x, params)
    assert_same(torch.vmap(lambda t: call(op, t, params))(x), expected)
    assert_same(torch.vmap(torch.vmap(lambda t: call(op, t, params)))(x), expected)


def test_per_sample_gradients(op, device):
    """vmap(grad): the gradient of each example, operands included."""
    inputs, fused, eager = smooth(op, (4, 3), device=device)
    xs = torch.stack([inputs[0] + 0.001 * k for k in range(5)])
    dims = (0, *[None] * (len(inputs) - 1))
    a, b = (
        torch.vmap(torch.func.grad(lambda *t: g(*t).sin().sum(), argnums=every(inputs)), dims)(xs, *inputs[1:])
        for g in (fused, eager)
    )
    assert_all_close(a, b)


def test_grad_of_vmap_and_batched_autograd(op):
    inputs, fused, eager = smooth(op, (4, 3))
    xs = torch.stack([inputs[0]] * 3)
    dims = (0, *[None] * (len(inputs) - 1))
    a, b = (
        torch.func.grad(lambda *t: torch.vmap(g, dims)(*t).sin().sum(), argnums=every(inputs))(xs, *inputs[1:])
        for g in (fused, eager)
    )
    assert_all_close(a, b)
    leaves = [t.clone().requires_grad_() for t in inputs]
    basis = cases.operand_values((6, *inputs[0].shape), torch.float64)
    a, b = (torch.autograd.grad(g(*leaves), leaves, basis, is_grads_batched=True) for g in (fused, eager))
    assert_all_close(a, b)


def test_ensembles_of_modules(operand_op):
    """functional_call under vmap over stacked parameters."""
    arguments = dict(cases.some_scalars(operand_op), num_features=5)
    models = [getattr(fused_act.nn, operand_op.module)(**arguments) for _ in range(3)]
    for k, m in enumerate(models):
        for p in m.parameters():
            p.data.copy_(cases.operand_values((5,), torch.float32, k))
    state, buffers = torch.func.stack_module_state(models)
    x = cases.filled((4, 5), torch.float32, operand_op)
    y = torch.vmap(lambda s, b: torch.func.functional_call(models[0], (s, b), (x,)))(state, buffers)
    assert_same(y, torch.stack([m(x) for m in models]))


# ---------------------------------------------------------------------------------------------------------------------
# Running modes


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(op, dtype, device, reentrant):
    shape = (4, 6, 5)
    x, params, leaves = tracked(cases.filled(shape, dtype, op).to(device), cases.make_params(op, shape, dtype, device))
    go = cases.filled(shape, dtype, seed=3).to(device)
    expected = torch.autograd.grad(call(op, x, params), leaves, go)
    checkpoint(lambda t: call(op, t, params), x, use_reentrant=reentrant).backward(go)
    for leaf, want in zip(leaves, expected):
        assert_same(leaf.grad, want)


def test_inference_mode(op, device):
    x = cases.filled((4, 6), torch.float32, op).to(device)
    params = cases.make_params(op, x.shape, torch.float32, device)
    expected = call(op, x, params)
    with torch.inference_mode():
        y = call(op, x.clone(), params)
        assert y.is_inference()
        assert_same(call(op, *tracked(x, params)[:2]), expected)
    assert_same(y.clone(), expected)


def test_autocast_runs_in_the_dtype_given(op, dtype, device):
    x, params, leaves = tracked(
        cases.filled((4, 6), dtype, op).to(device), cases.make_params(op, (4, 6), torch.float32, device)
    )
    expected = call(op, x, params)
    expected_grads = torch.autograd.grad(expected.sum(), leaves)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = call(op, x, params)
        assert_same(y, expected)
        z = fused_act.functional.__dict__[op.name](
            torch.nn.functional.linear(x.float(), torch.eye(6, device=device)), **params
        )
    assert z.dtype == torch.bfloat16
    for a, b in zip(torch.autograd.grad(y.sum(), leaves), expected_grads):
        assert_same(a, b)


def test_anomaly_mode(op):
    x, params, leaves = tracked(cases.filled((4, 6), torch.float32, op), cases.make_params(op, (4, 6), torch.float32))
    with torch.autograd.detect_anomaly(check_nan=True):
        torch.autograd.grad(call(op, x, params).sum(), leaves)


def test_hooks(op):
    """Tensor hooks and gradient hooks of leaves see the gradients."""
    x, params, leaves = tracked(cases.filled((4, 6), torch.float32, op), cases.make_params(op, (4, 6), torch.float32))
    seen = []
    for leaf in leaves:
        leaf.register_hook(lambda g: seen.append(g) or g * 2)
    y = call(op, x, params)
    y.grad_fn.register_prehook(lambda g: (g[0] * 3,))
    y.sum().backward()
    assert len(seen) == len(leaves)
    for leaf, g in zip(leaves, sorted(seen, key=lambda g: -g.numel())):
        assert_same(leaf.grad, g * 2)


def test_tensor_subclass(op):
    """A subclass goes through __torch_function__ and keeps its class."""

    class Named(torch.Tensor):
        pass

    x = cases.filled((4, 6), torch.float32, op)
    params = cases.make_params(op, x.shape, torch.float32)
    y = getattr(fused_act.functional, op.name)(x.as_subclass(Named), **params)
    assert type(y) is Named
    assert_same(y.as_subclass(torch.Tensor), call(op, x, params))


def test_no_hidden_copies(op):
    """One dispatcher call forward and one backward, in any layout: nothing is cloned, converted or made contiguous."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    shape = (4, 6, 5)
    for layout in ("contiguous", "channels_last", "step_all", "expanded_batch"):
        x, params, leaves = tracked(
            cases.LAYOUTS[layout](cases.filled(shape, torch.float32, op)), cases.make_params(op, shape, torch.float32)
        )
        go = torch.ones(()).expand(shape)
        with Log() as log:
            torch.autograd.grad(call(op, x, params), leaves, go)
        # an operand that no formula reads may come back as memory of its shape
        work = [n for n in log.names if n not in ("aten.detach.default", "aten.empty_strided.default")]
        assert work == [f"fused_act.{op.name}.default", f"fused_act.{op.name}_backward.default"]


def test_threads_at_the_same_time(op):
    """Eight Python threads, forward and backward: nothing is shared between calls."""
    x = cases.filled((64, 33, 17), torch.float32, op)
    params = cases.make_params(op, x.shape, torch.float32)

    def run():
        leaf, own, leaves = tracked(x, params)
        return torch.autograd.grad(call(op, leaf, own), leaves, torch.ones_like(leaf))

    expected, wrong = run(), []

    def work():
        for _ in range(10):
            wrong.extend(1 for a, b in zip(run(), expected) if not torch.equal(a, b))

    pool = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in pool]
    [t.join() for t in pool]
    assert not wrong


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_autograd(op, device, backend, fresh_dynamo):
    """The whole backward pass is traced as one graph, without a break at the operator."""
    shape = (4, 6, 5)
    x, params, leaves = tracked(
        cases.filled(shape, torch.float32, op).to(device), cases.make_params(op, shape, torch.float32, device)
    )

    def loss():
        return (call(op, x * 1.0, params) * 0.7).sum()

    expected = torch.autograd.grad(loss(), leaves)
    graphs = []

    def compiler(graph):
        graphs.append(graph)
        return torch.compile(graph, backend=backend, fullgraph=True, dynamic=True)

    with torch._dynamo.compiled_autograd._enable(compiler):
        loss().backward()
    assert graphs
    for leaf, want in zip(leaves, expected):
        assert_same(leaf.grad, want)


def test_compiled_autograd_with_saved_tensor_hooks(op, fresh_dynamo):
    """Tensors that hooks packed are unpacked inside the compiled graph."""
    x, params, leaves = tracked(cases.filled((4, 6), torch.float32, op), cases.make_params(op, (4, 6), torch.float32))
    expected = torch.autograd.grad(call(op, x, params).sum(), leaves)
    with (
        torch.autograd.graph.save_on_cpu(),
        torch._dynamo.compiled_autograd._enable(lambda g: torch.compile(g, backend="eager")),
    ):
        call(op, x, params).sum().backward()
    for leaf, want in zip(leaves, expected):
        assert_same(leaf.grad, want)
