"""From the table of operators to what is timed: arguments, the same in plain PyTorch, and the bytes that it needs."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _C
from .._table import Operator, Parameter, ops


@dataclass(frozen=True)
class Case:
    """One operator, with an activation where it takes one by name."""

    operator: Operator
    activation: str | None = None

    @property
    def name(self) -> str:
        return f"{self.operator.name}({self.activation})" if self.activation else self.operator.name

    @property
    def operands(self) -> list[Parameter]:
        return [p for p in self.operator.parameters if p.kind == "operand"]

    def result_shape(self, shape: Sequence[int]) -> list[int]:
        return [*shape[:-1], shape[-1] // (2 if self.operator.packing else 1)]

    def bytes_moved(self, section: str, shape: Sequence[int], itemsize: int, operand_gradients: bool = True) -> int:
        """The bytes that ``section`` has to move for an x of ``shape``: each input whose value counts is read once and
        each result written once. Backward reads grad_output too, and no input that its gradients do not depend on, or
        where there are codes, those; without ``operand_gradients`` it writes those of x and of operands as large as
        x. What is timed through autograd writes no gradient that is another's tensor."""
        sizes = {self.operator.input: math.prod(shape)}
        sizes |= {p.name: math.prod(shape) if p.is_input else shape[1] for p in self.operands}
        result = math.prod(self.result_shape(shape))
        bits = code_bits(self) if itemsize < 8 and result >= _C._coded_from else 0
        elements = codes = 0
        if section in ("forward", "training"):
            elements += sum(sizes.values()) + result
        if section in ("backward", "training"):
            shared = shared_gradients(self) if bits or section == "training" else ()
            written = [name for name in self.differentiated(operand_gradients) if name not in shared]
            elements += result + sum(sizes[name] for name in written)
            if bits:
                codes = result * bits // 8 * (2 if section == "training" else 1)
            else:
                elements += sum(sizes[name] for name in read_by_backward(self, operand_gradients))
        return elements * itemsize + codes

    def differentiated(self, operand_gradients: bool) -> list[str]:
        """The tensors that get a gradient, x first."""
        return [self.operator.input, *(p.name for p in self.operands if operand_gradients or p.is_input)]

    def live_tensors(self, section: str) -> int:
        """How many tensors as large as x may be alive at once while a row is measured; rather too many than too few."""
        inputs = 2 + 1 + sum(p.is_input for p in self.operands)  # two sets of x, the target of the copy, operands
        gradients = len(self.differentiated(operand_gradients=True)) + 2  # and two on their way through the graph
        if section == "forward":
            return inputs + min(eager_operations(self), 3) + 1
        # Two grad_outputs; what eager keeps of each operation, in backward for either set of x.
        return inputs + 2 + (eager_operations(self) + 1) * (2 if section == "backward" else 1) + gradients

    def parameters(self, x: torch.Tensor, requires_grad: bool = False) -> dict[str, object]:
        """An operand is a random vector along dim 1, or as large as x; a scalar is its default, or 0.5 where it has
        none (0.5 puts a bound inside the range of random data; a lower bound is -0.5)."""
        values: dict[str, object] = {}
        for p in self.operator.parameters:
            if p.kind == "activation":
                values[p.name] = self.activation
            elif p.kind == "scalar":
                bounds = {"min": -0.5, "max": 0.5}
                values[p.name] = bounds.get(p.name, None if p.optional else 0.5) if p.default is None else p.default
            else:
                size = x.shape if p.is_input else (x.shape[1],)
                operand = torch.randn(size, device=x.device, dtype=x.dtype)
                if p.is_input:
                    operand = operand.to(memory_format=memory_format_of(x))
                values[p.name] = operand.requires_grad_(requires_grad)
        if self.operands:
            values["dim"] = 1
        return values

    def written_out(self) -> Callable[..., torch.Tensor]:
        """The table's expression as one function of plain PyTorch, of x and :meth:`parameters`."""
        operator, namespace = self.operator, {"torch": torch, "F": F, "relu": torch.relu, "clamp": torch.clamp}
        text = operator.expression
        if self.activation:  # in its defaults: without alpha, gain and clamp
            text = re.sub(r"^torch\.clamp\((.*) \* gain, -clamp, clamp\)$", r"\1", text)
            text = text.replace("activation(act, ", "act_fn(").replace(", alpha)", ")")
            inner = _activation(self.activation)
            defaults = {p.name: 0.0 if p.default is None else p.default for p in inner.parameters}
            exec(function_source("act_fn", inner.input, inner.expression, defaults, []), namespace)
        names = list(self.parameters(torch.empty(1, 2, 2, 2)))
        aligned = [p.name for p in self.operands if not p.is_input]
        exec(function_source("written", operator.input, text, dict.fromkeys(names), aligned), namespace)
        return namespace["written"]


@functools.cache
def eager_operations(case: Case) -> int:
    """How many operations eager PyTorch makes of the expression: counted, since one function can be several."""
    count = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal count
            count += 1
            return function(*args, **(kwargs or {}))

    with torch.random.fork_rng(devices=[]):  # so that asking changes no data that is drawn after it
        x = torch.randn(1, 2, 2, 2)
        values = case.parameters(x)
    with Count():
        case.written_out()(x, **values)
    return count


def trained(case: Case) -> tuple[torch.Tensor, dict[str, object]]:
    """The result of a call of which training saves codes if it ever does, and its arguments."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        x = torch.randn(1, 2, 64, _C._coded_from // 128, requires_grad=True)
        values = {case.operator.input: x, **case.parameters(x, requires_grad=True)}
        return getattr(torch.ops.fused_act, case.operator.name)(**values), values


@functools.cache
def code_bits(case: Case) -> int:
    """How many bits an element training saves instead of tensors; 0 where it saves tensors. Found out by looking."""
    saved: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        _, values = trained(case)
    elements = values[case.operator.input].numel()
    return saved[0].numel() * 32 // elements if [t.dtype for t in saved] == [torch.int32] else 0


@functools.cache
def shared_gradients(case: Case) -> frozenset[str]:
    """The operands whose gradient is the tensor that is that of x, or grad_output itself. Found out by looking."""
    y, values = trained(case)
    grad_output, names = torch.ones_like(y), case.differentiated(operand_gradients=True)
    gradients = torch.autograd.grad(y, [values[name] for name in names], grad_output)
    addresses = [grad_output.data_ptr(), *(g.data_ptr() for g in gradients)]
    return frozenset(name for n, name in enumerate(names) if addresses[1 + n] in addresses[: 1 + n])


@functools.cache
def read_by_backward(case: Case, operand_gradients: bool) -> frozenset[str]:
    """The inputs that the gradients depend on, found out on a few random values: gradients of plain PyTorch, with one
    input after the other replaced."""
    function = case.written_out()

    def gradients(values: dict[str, object]) -> tuple[torch.Tensor, ...]:
        leaves = {n: v.clone().requires_grad_() if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        x, wanted = leaves.pop(case.operator.input), case.differentiated(operand_gradients)
        y = function(x, **leaves)
        return torch.autograd.grad(y, [{case.operator.input: x, **leaves}[n] for n in wanted], torch.ones_like(y))

    with torch.random.fork_rng(devices=[]):
        x = 3 * torch.randn(4, 4, 4, 8, dtype=torch.float64)
        values = {case.operator.input: x, **case.parameters(x)}
        others = {case.operator.input: 3 * torch.randn_like(x), **case.parameters(x)}
        expected = gradients(values)
        tensors = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        changed = {name: gradients(values | {name: others[name]}) for name in tensors}
    return frozenset(name for name, found in changed.items() if not all(map(torch.equal, found, expected)))


def function_source(name: str, x: str, expression: str, parameters: dict[str, object], aligned: list[str]) -> str:
    """``def name(x, parameters...)``; one-dimensional operands are laid along dim 1."""
    *statements, last = ast.parse(expression).body
    lines = [f"def {name}({', '.join([x, *(f'{n}={v!r}' for n, v in parameters.items())])}, **others):"]
    lines += [f"    {n} = {n}.reshape((1, -1) + (1,) * ({x}.dim() - 2))" for n in aligned]
    lines += [f"    {ast.unparse(statement)}" for statement in statements]
    return "\n".join([*lines, f"    return {ast.unparse(last)}"])


def memory_format_of(x: torch.Tensor) -> torch.memory_format:
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


def make_cases(names: Sequence[str], activations: Sequence[str]) -> list[Case]:
    cases = []
    for operator in ops():
        if operator.name in names:
            named = any(p.kind == "activation" for p in operator.parameters)
            cases += [Case(operator, activation) for activation in (activations if named else [None])]
    return cases


def _activation(name: str) -> Operator:
    return next(operator for operator in ops() if operator.name == name)
