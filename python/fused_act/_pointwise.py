"""PyTorch's pointwise operations, as steps of a chain.

A handler has the signature of the PyTorch function and gets :class:`Expr` in the place of tensors. It returns the
expression, or None where the operation is not pointwise with these arguments (``torch.max(x, dim)``) or no steps
compute exactly what it does.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ._trace import Constant, has_hooks, is_patched, original_class


class Expr:
    """A step on earlier values, or a tensor from outside.

    Attributes:
        step: the name of the step; "" for a tensor from outside.
        args: the values that the step takes, the one in the accumulator first.
        scalars: its numbers.
        node: the tensor from outside.
        number: what it holds, if it is a constant with no dimensions.
    """

    __slots__ = ("step", "args", "scalars", "node", "number")

    def __init__(self, step: str, args: tuple[Expr, ...] = (), scalars: tuple[float, ...] = (), node=None, number=None):
        self.step, self.args, self.scalars, self.node, self.number = step, args, scalars, node, number

    @property
    def is_mask(self) -> bool:
        """Whether it is boolean in eager, and 0 or 1 as a step."""
        if not self.step:
            return self.node is not None and _is_mask(self.node)
        return self.step in _MASK_STEPS or (self.step in _MASK_ALGEBRA and all(a.is_mask for a in self.args))


_MASK_STEPS = frozenset(name + operand for name in ("Gt", "Ge", "Lt", "Le", "Eq") for operand in ("", "Operand"))
_MASK_ALGEBRA = ("MulOperand", "Maximum", "RsubScalar")  # and, or, not


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 2**53 or type(value) is float


def _unary(step: str, *names: str) -> Callable:
    """A handler of ``f(input, *scalars, inplace=False)``."""

    def handle(input, *scalars):
        if not isinstance(input, Expr) or not all(map(_is_number, scalars)):
            return None
        return Expr(step, (input,), tuple(map(float, scalars)))

    parameters = "".join(f", {name}" for name in names)
    arguments = "".join(f", {name.partition('=')[0]}" for name in names)
    namespace: dict[str, Any] = {"handle": handle}
    exec(f"def handler(input{parameters}, inplace=False): return handle(input{arguments})", namespace)
    return namespace["handler"]


def _identity(input, inplace=False):
    return input if isinstance(input, Expr) else None


def _scaled(step: str, input: Expr, *scalars: float) -> Expr:
    return Expr(step, (input,), tuple(map(float, scalars)))


def _add(input, other, *, alpha=1):
    if alpha != 1:
        return None  # eager has a rounding of its own there
    if isinstance(input, Expr) and _is_number(other):
        return _scaled("Shift", input, other)
    if isinstance(other, Expr) and _is_number(input):
        return _scaled("Shift", other, input)
    return Expr("Add", (input, other)) if isinstance(input, Expr) and isinstance(other, Expr) else None


def _sub(input, other, *, alpha=1):
    if alpha != 1:
        return None
    if isinstance(input, Expr) and _is_number(other):
        return _scaled("Shift", input, -other)
    if isinstance(other, Expr) and _is_number(input):
        return _scaled("RsubScalar", other, input)
    return Expr("Sub", (input, other)) if isinstance(input, Expr) and isinstance(other, Expr) else None


def _rsub(input, other, *, alpha=1):
    return _sub(other, input, alpha=alpha)


def _mul(input, other):
    if (_mask(input) and _is_number(other)) or (_mask(other) and _is_number(input)):
        return None  # of the number's dtype
    if isinstance(input, Expr) and _is_number(other):
        return _scaled("Mul", input, other)
    if isinstance(other, Expr) and _is_number(input):
        return _scaled("Mul", other, input)
    return Expr("MulOperand", (input, other)) if isinstance(input, Expr) and isinstance(other, Expr) else None


def _div(input, other, *, rounding_mode=None):
    if rounding_mode is not None:
        return None
    if isinstance(input, Expr) and _is_number(other):
        return _scaled("Div", input, other)
    if isinstance(other, Expr) and _is_number(input):  # eager computes a number over a tensor so
        return _mul(Expr("Reciprocal", (other,)), input)
    return Expr("DivOperand", (input, other)) if isinstance(input, Expr) and isinstance(other, Expr) else None


def _extremum(step: str, with_number: str | None) -> Callable:
    def handler(input, other):
        if not (isinstance(input, Expr) and isinstance(other, Expr)):
            return None
        if with_number and other.number is not None:
            return _scaled(with_number, input, other.number)
        return Expr(step, (input, other))

    return handler


def _clamp(input, min=None, max=None):
    if not isinstance(input, Expr) or (min is None and max is None):
        return None
    for step, bound, other in (("ClampMin", min, max), ("ClampMax", max, min)):
        if isinstance(bound, Expr):  # not with two tensors: where they are equal eager's gradient is that of neither
            return Expr(step, (input, bound)) if other is None else None
    if not all(b is None or _is_number(b) for b in (min, max)):
        return None
    if max is None:
        return _scaled("MaxScalar", input, min)
    return _scaled("MinScalar", input, max) if min is None else _scaled("Clamp", input, min, max)


# Of PowScalar, as its `wrong` says.
_EXPONENTS = (*range(3, 9), -2)


def _pow(input, exponent):
    if not isinstance(input, Expr) or not _is_number(exponent):
        return None
    # Those with a step of their own have one in eager too.
    own = {1: None, 2: "Square", 0.5: "Sqrt", -0.5: "Rsqrt", -1: "Reciprocal"}
    if exponent in own:
        return Expr(own[exponent], (input,)) if own[exponent] else input
    return _scaled("PowScalar", input, exponent) if exponent in _EXPONENTS else None


def _gelu(input, approximate="none"):
    step = {"none": "Gelu", "tanh": "GeluTanh"}.get(approximate)
    return Expr(step, (input,)) if step and isinstance(input, Expr) else None


def _clamp_min(input, min):
    return _clamp(input, min=min)


def _clamp_max(input, max):
    return _clamp(input, max=max)


def _comparison(step: str, turned: str) -> Callable:
    def handler(input, other):
        if isinstance(input, Expr) and _is_number(other):
            return _scaled(step, input, other)
        if isinstance(other, Expr) and _is_number(input):
            return _scaled(turned, other, input)
        both = isinstance(input, Expr) and isinstance(other, Expr)
        return Expr(f"{step}Operand", (input, other)) if both else None

    return handler


def _mask(input: Any) -> bool:
    return isinstance(input, Expr) and input.is_mask


def _not(input):
    return Expr("RsubScalar", (input,), (1.0,)) if _mask(input) else None


def _ne(input, other):
    equal = _comparison("Eq", "Eq")(input, other)
    return equal and _not(equal)


def _and(input, other):
    return Expr("MulOperand", (input, other)) if _mask(input) and _mask(other) else None


def _or(input, other):
    return Expr("Maximum", (input, other)) if _mask(input) and _mask(other) else None


def _where(condition, input=None, other=None):
    if not _mask(condition) or _mask(input) or _mask(other):
        return None
    if isinstance(input, Expr) and _is_number(other):
        return Expr("Where", (input, condition), (float(other),))
    if isinstance(other, Expr) and _is_number(input):
        return Expr("WhereNot", (other, condition), (float(input),))
    if not (isinstance(input, Expr) and isinstance(other, Expr)):
        return None
    return Expr("Add", (Expr("Where", (input, condition), (0.0,)), Expr("WhereNot", (other, condition), (0.0,))))


def _where_method(input, condition, other):
    return _where(condition, input, other)


def _masked_fill(input, mask, value):
    return _where(mask, value, input) if _is_number(value) else None


def _prelu(input, weight):
    both = isinstance(input, Expr) and isinstance(weight, Expr)
    return Expr("PRelu", (input, weight)) if both else None


def _lerp(input, end, weight):
    if not (isinstance(input, Expr) and isinstance(end, Expr) and _is_number(weight)):
        return None
    return Expr("Lerp", (input, end), (float(weight),))


_HANDLERS: dict[str, Callable] = {
    **{
        name: _unary(name.capitalize())
        for name in (
            "relu", "relu6", "hardsigmoid", "hardswish", "softsign", "sigmoid", "logsigmoid", "tanh", "tanhshrink",
            "selu", "silu", "mish", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square", "erf",
        )
    },
    "leaky_relu": _unary("LeakyRelu", "negative_slope=0.01"),
    "hardtanh": _unary("Hardtanh", "min_val=-1.0", "max_val=1.0"),
    "threshold": _unary("Threshold", "threshold", "value"),
    "hardshrink": _unary("Hardshrink", "lambd=0.5"),
    "softshrink": _unary("Softshrink", "lambd=0.5"),
    "softplus": _unary("Softplus", "beta=1", "threshold=20"),
    "elu": _unary("Elu", "alpha=1.0"),
    "celu": _unary("Celu", "alpha=1.0"),
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "gt": _comparison("Gt", "Lt"),
    "ge": _comparison("Ge", "Le"),
    "lt": _comparison("Lt", "Gt"),
    "le": _comparison("Le", "Ge"),
    "eq": _comparison("Eq", "Eq"),
    "ne": _ne,
    "logical_not": _not,
    "logical_and": _and,
    "logical_or": _or,
    "where": _where,
    "where_method": _where_method,
    "masked_fill": _masked_fill,
    "prelu": _prelu,
    "gelu": _gelu,
    "clamp": _clamp,
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _mul,
    "div": _div,
    "pow": _pow,
    "lerp": _lerp,
    "minimum": _extremum("Minimum", None),
    "maximum": _extremum("Maximum", None),
    "min": _extremum("Minimum", "Min"),
    "max": _extremum("Maximum", None),
    "identity": _identity,
}  # fmt: skip
_ALIASES = {
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "clip": "clamp", "negative": "neg",
    "absolute": "abs", "truediv": "div", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "not_equal": "ne", "bitwise_not": "logical_not", "invert": "logical_not", "bitwise_and": "logical_and",
    "and_": "logical_and", "bitwise_or": "logical_or", "or_": "logical_or",
}  # fmt: skip
# Whose results are masks, some only where their arguments are; and the others that take masks.
_COMPARISONS = frozenset(("gt", "ge", "lt", "le", "eq", "ne"))
_LOGIC = frozenset(("logical_not", "logical_and", "logical_or"))
_TAKE_MASKS = _LOGIC | {"where", "where_method", "masked_fill", "mul"}
_NAMES = {**{name: name for name in _HANDLERS}, **_ALIASES}

# Where autocast computes, and returns, another dtype: float32, or half precision of prelu.
_PROMOTED = {"pow", "exp", "log", "reciprocal", "rsqrt", "softplus", "prelu"}

# Kernels of eager where it is not one.
_KERNELS = {"identity": 0, "softsign": 3, "tanhshrink": 2}


def _targets() -> dict[Any, tuple[str, bool]]:
    """The operation and whether it is in place, by what a graph names: a function, or a method by its name."""
    found: dict[Any, tuple[str, bool]] = {}
    for name, handler in _NAMES.items():
        for in_place in (False, True):
            own = name + "_" * in_place
            for owner in (torch, F):
                if callable(target := getattr(owner, own, None)):
                    found[target] = handler, in_place
            if hasattr(Tensor, own):
                found[own] = handler, in_place
        for spelling, in_place in ((name, False), (f"i{name}", True)):
            if target := getattr(operator, spelling, None):
                found[target] = handler, in_place
    found.pop("identity", None)
    found[abs] = "abs", False
    found["where"] = "where_method", False  # whose condition is the second argument
    for target in (torch.prelu, "prelu"):  # whose weight is not shaped as operands are
        del found[target]
    found[prelu_by] = "prelu", False
    return found


# torch.nn's modules and what they hand to the function.
_MODULES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Identity: ("identity", ()),
    nn.ReLU: ("relu", ("inplace",)),
    nn.ReLU6: ("relu6", ("inplace",)),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope", "inplace")),
    nn.Hardtanh: ("hardtanh", ("min_val", "max_val", "inplace")),
    nn.ELU: ("elu", ("alpha", "inplace")),
    nn.CELU: ("celu", ("alpha", "inplace")),
    nn.SELU: ("selu", ("inplace",)),
    nn.Sigmoid: ("sigmoid", ()),
    nn.LogSigmoid: ("logsigmoid", ()),
    nn.Tanh: ("tanh", ()),
    nn.SiLU: ("silu", ("inplace",)),
    nn.GELU: ("gelu", ("approximate",)),
    nn.Mish: ("mish", ("inplace",)),
    nn.Softplus: ("softplus", ("beta", "threshold")),
    nn.Softsign: ("softsign", ()),
    nn.Hardsigmoid: ("hardsigmoid", ("inplace",)),
    nn.Hardswish: ("hardswish", ("inplace",)),
    nn.Tanhshrink: ("tanhshrink", ()),
    nn.Hardshrink: ("hardshrink", ("lambd",)),
    nn.Softshrink: ("softshrink", ("lambd",)),
    nn.Threshold: ("threshold", ("threshold", "value", "inplace")),
}

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


# ---------------------------------------------------------------------------------------------------------------------
# A convolution without its bias, and the bias as an operand. Graphs call these.


def convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """``conv(x)`` before its bias is added."""
    if not conv.transposed:
        return conv._conv_forward(x, conv.weight, None)
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(conv.kernel_size) - 1]
    return function(
        x, conv.weight, None, conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation
    )  # fmt: skip


def channel_bias(conv: nn.Module) -> Tensor:
    """The bias of ``conv``, shaped to broadcast to its output."""
    return conv.bias.view((-1,) + (1,) * len(conv.kernel_size))


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """As the convolution adds it: autocast has rounded the bias to the dtype of x by then."""
    return x + bias.to(x.dtype)


def slope_for(weight: Tensor, x: Tensor) -> Tensor:
    """The weight of a PReLU, shaped to broadcast to x as F.prelu has it: along dimension 1."""
    if weight.dim() > 1 or (weight.numel() != 1 and x.dim() < 2):
        F.prelu(x, weight)  # which says what is wrong
    return weight if weight.numel() == 1 else weight.view((-1,) + (1,) * (x.dim() - 2))


def prelu_by(x: Tensor, slope: Tensor) -> Tensor:
    return F.prelu(x, slope.reshape(-1))


def scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A BatchNorm in eval mode, folded."""
    return x * scale.to(x.dtype) + shift.to(x.dtype)


# ---------------------------------------------------------------------------------------------------------------------


_TARGETS = _targets()


@dataclass(frozen=True)
class Operation:
    """What a node of a graph is, if it is pointwise.

    Attributes:
        name: of the PyTorch function.
        in_place: whether it overwrites its first tensor.
        args, kwargs: of the function. Nodes stand for tensors.
        kernels: that eager launches for it.
        promoted: whether autocast computes it in a dtype of its own choice.
    """

    name: str
    in_place: bool
    args: tuple
    kwargs: dict[str, Any]
    kernels: int
    promoted: bool

    def expression(self, value: Callable[[fx.Node], Expr]) -> Expr | None:
        """The steps; ``value`` gives the expression of an argument."""
        if self.name == "add_bias":
            return Expr("Add", tuple(map(value, self.args)))
        if self.name == "scale_and_shift":
            x, scale, shift = map(value, self.args)
            return Expr("Add", (Expr("MulOperand", (x, scale)), shift))
        given = [value(a) if isinstance(a, fx.Node) else a for a in self.args]
        named = {k: value(a) if isinstance(a, fx.Node) else a for k, a in self.kwargs.items()}
        if self.name not in _TAKE_MASKS and any(map(_mask, (*given, *named.values()))):
            return None  # PyTorch counts with booleans, or refuses to
        return _HANDLERS[self.name](*given, **named)


def constant(node: fx.Node) -> float | None:
    """The number in a node that makes a tensor without dimensions, as eager uses it, in whatever dtype."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") not in ("tensor", "as_tensor"):
        return None
    if len(node.args) != 1 or not _is_number(node.args[0]) or set(node.kwargs) - {"dtype", "device"}:
        return None
    value, dtype = node.args[0], node.kwargs.get("dtype", torch.get_default_dtype())
    if isinstance(dtype, fx.Node):  # x.dtype: a number that none of the four rounds
        exact = all(torch.tensor(value, dtype=d).item() == value for d in (torch.bfloat16, torch.float16))
        return float(value) if exact else None
    if dtype is not None and not dtype.is_floating_point:
        return None
    return torch.tensor(value, dtype=dtype).item()


def _is_shape(node: Any) -> bool:
    """Whether a value is a size or made of sizes: arithmetic with those is no kernel."""
    if not isinstance(node, fx.Node):
        return True
    known = node.meta.get("shape")
    if known is None:
        if node.op == "call_function" and node.target is getattr:
            known = node.args[1] in ("shape", "ndim", "dtype", "device", "is_cuda", "itemsize")
        elif node.op == "call_method":
            known = node.target in ("size", "dim", "numel", "stride", "ndimension", "element_size", "item")
        elif node.op == "call_function" and (node.target in _TARGETS or node.target in (operator.getitem, len)):
            nodes = [a for a in node.args if isinstance(a, fx.Node)]
            known = bool(nodes) and all(map(_is_shape, nodes))
        elif node.op == "call_function":
            known = getattr(node.target, "__module__", "") in ("math", "_operator", "builtins") and all(
                map(_is_shape, node.args)
            )
        else:
            known = False
        node.meta["shape"] = known
    return known


def _is_mask(node: fx.Node) -> bool:
    """Whether a value is a comparison or made of comparisons."""
    known = node.meta.get("mask")
    if known is None:
        name, in_place = _TARGETS.get(node.target, ("", False)) if _hashable(node.target) else ("", False)
        known = not in_place and node.op in ("call_function", "call_method") and not _is_shape(node)
        if name in _LOGIC or name == "mul":
            known &= all(isinstance(a, fx.Node) and _is_mask(a) for a in node.args) and not node.kwargs
        else:
            known &= name in _COMPARISONS
        node.meta["mask"] = known
    return known


def operation(node: fx.Node, root: nn.Module) -> Operation | None:
    """What a node is, or None where it is not pointwise."""
    args, kwargs, module = node.args, dict(node.kwargs), None
    if node.op == "call_module":
        module = root.get_submodule(node.target)
        found = _MODULES.get(original_class(module))
        if found is None or has_hooks(module) or is_patched(module):
            return None
        name, attributes = found
        in_place, kwargs = False, {**kwargs, **{a: getattr(module, a) for a in attributes}}
    elif node.op == "call_function" and node.target in (add_bias, scale_and_shift):
        return Operation(node.target.__name__, False, args, kwargs, 1, False)
    elif node.op in ("call_function", "call_method"):
        found = _TARGETS.get(node.target) if _hashable(node.target) else None
        if found is None or _is_shape(node):
            return None
        name, in_place = found
        if in_place and name in _COMPARISONS | _LOGIC:
            return None
    else:
        return None
    handler = _HANDLERS[name]
    try:
        bound = inspect.signature(handler).bind(*args, **kwargs)
    except TypeError:
        return None
    in_place = in_place or bool(bound.arguments.get("inplace", False))
    kernels, promoted = _KERNELS.get(name, 1), name in _PROMOTED
    if name == "div" and not isinstance(args[0], fx.Node):
        kernels, promoted = 2, True
    op = Operation(name, in_place, args, kwargs, kernels, promoted)
    return op if op.expression(_leaf) is not None else None


def _hashable(target: Any) -> bool:
    return isinstance(target, str) or getattr(target, "__hash__", None) is not None


def _leaf(node: fx.Node) -> Any:
    """A tensor from outside; None for what is none."""
    return None if _is_shape(node) else Expr("", node=node, number=constant(node))


def as_function(op: Operation, node: fx.Node) -> tuple[str, Any, tuple, dict[str, Any]]:
    """A node's op, target, args and kwargs, with a function in the place of a module."""
    if node.op != "call_module":
        return node.op, node.target, op.args, op.kwargs
    if op.name == "identity":
        return "call_function", _identity_of, op.args, {}
    return "call_function", getattr(F, op.name), op.args, op.kwargs


def _identity_of(x: Tensor) -> Tensor:
    return x


# ---------------------------------------------------------------------------------------------------------------------
# What the other nodes do to their inputs

_LAYERS = (
    *CONVOLUTIONS, nn.Linear, nn.Bilinear, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.Embedding, nn.Softmax,
)  # fmt: skip
_FUNCTIONS = {
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.linear, F.batch_norm,
    F.layer_norm, F.group_norm, F.instance_norm, F.softmax, torch.softmax, torch.matmul, torch.bmm, torch.mm,
    torch.addmm, torch.cat, torch.stack, torch.clone, operator.matmul, convolve, F.max_pool2d, F.avg_pool2d,
    F.embedding, F.scaled_dot_product_attention,
}  # fmt: skip
_METHODS = {"matmul", "bmm", "mm", "softmax", "clone", "mean", "sum"}


def is_fresh(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node that is not pointwise returns memory of its own, and leaves its inputs alone."""
    if node.op == "call_module":
        return isinstance(root.get_submodule(node.target), _LAYERS)
    if node.op == "call_method":
        return node.target in _METHODS
    return node.op == "call_function" and _hashable(node.target) and node.target in _FUNCTIONS


def is_fence(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node that is not pointwise may change a tensor that others see."""
    if node.op == "call_module":
        module = root.get_submodule(node.target)
        return not original_class(module).__module__.startswith("torch.nn.modules") or bool(
            getattr(module, "inplace", False) or any(True for _ in module.children())
        )
    if node.op == "call_method":
        return node.target.endswith("_") and not node.target.endswith("__")
    if node.op != "call_function":
        return False
    if isinstance(node.target, Constant) or node.target in (convolve, channel_bias, slope_for):
        return False
    home, name = getattr(node.target, "__module__", None) or "torch", getattr(node.target, "__name__", "_")
    if home.partition(".")[0] not in ("torch", "math", "_operator", "builtins"):
        return True
    in_place = name.endswith("_") or name in ("setitem", "delitem", "setattr") or "out" in node.kwargs
    return in_place or bool(node.kwargs.get("inplace")) or (home == "_operator" and name[0] == "i" and name != "is_")
