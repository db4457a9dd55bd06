"""An expression of pointwise steps as a program: an accumulator, operands and slots for values used again."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import fx

from . import _C
from ._pointwise import Expr

# What a program may hold.
MAX_STEPS, MAX_SCALARS, MAX_OPERANDS, MAX_SLOTS = 24, 24, 4, 3

_STEPS = frozenset(name for name, _ in _C._steps)

# The step that takes its two values the other way round.
_REVERSED = {
    "Add": "Add", "MulOperand": "MulOperand", "Minimum": "Minimum", "Maximum": "Maximum",
    "Sub": "Rsub", "DivOperand": "Rdiv",
}  # fmt: skip


class Unlowerable(Exception):
    """Why no single program computes an expression."""


# ---------------------------------------------------------------------------------------------------------------------
# Idioms


def _factors(e: Expr) -> tuple[float, list[Expr]]:
    """A product as a number and its other factors."""
    if e.step in ("Mul", "Div"):
        number, factors = _factors(e.args[0])
        return (number * e.scalars[0] if e.step == "Mul" else number / (e.scalars[0] or math.nan)), factors
    if e.step == "MulOperand":
        (a, left), (b, right) = map(_factors, e.args)
        return a * b, left + right
    return 1.0, [e]


def _polynomial(e: Expr, x: Expr) -> dict[int, float] | None:
    """Coefficients by degree, where e is a polynomial in x."""
    if e is x:
        return {1: 1.0}
    if not e.step:
        return None
    terms = [_polynomial(a, x) for a in e.args]
    if not terms or None in terms:
        return None
    p = terms[0]
    if e.step in ("Mul", "Div"):
        s = e.scalars[0] if e.step == "Mul" else 1 / (e.scalars[0] or math.nan)
        return {n: c * s for n, c in p.items()}
    if e.step == "Shift":
        return {**p, 0: p.get(0, 0.0) + e.scalars[0]}
    if e.step == "Add":
        return {n: p.get(n, 0.0) + terms[1].get(n, 0.0) for n in p.keys() | terms[1].keys()}
    times = {"MulOperand": [terms[-1]], "Square": [p]}.get(e.step)
    if e.step == "PowScalar" and e.scalars[0] == 3:
        times = [p, p]
    if times is None:
        return None
    for q in times:
        product: dict[int, float] = {}
        for n, c in p.items():
            for m, d in q.items():
                product[n + m] = product.get(n + m, 0.0) + c * d
        p = product
    return p


def _is_near(p: dict[int, float] | None, expected: dict[int, float]) -> bool:
    """Equal but for the rounding of constants in float64: eight written digits of sqrt(2 / pi) are not."""
    return (
        p is not None
        and p.keys() == expected.keys()
        and all(math.isclose(p[n], c, rel_tol=1e-14) for n, c in expected.items())
    )


def _gelu(e: Expr) -> Expr | None:
    number, factors = _factors(e)
    if number != 0.5 or len(factors) != 2:
        return None
    for x, gate in (factors, factors[::-1]):
        if gate.step != "Shift" or gate.scalars != (1.0,) or gate.args[0].step not in ("Erf", "Tanh"):
            continue
        inner = gate.args[0]
        p = _polynomial(inner.args[0], x)
        c = math.sqrt(2 / math.pi)
        if inner.step == "Erf" and _is_near(p, {1: math.sqrt(0.5)}):
            return Expr("Gelu", (x,))
        if inner.step == "Tanh" and _is_near(p, {1: c, 3: c * 0.044715}):
            return Expr("GeluTanh", (x,))
    return None


def _is_chain(e: Expr, x: Expr, *steps: tuple) -> bool:
    """Whether e is these steps on x, the last one first."""
    for step, *scalars in steps:
        if e.step != step or e.scalars != tuple(scalars):
            return False
        e = e.args[0]
    return e is x


def _idiom(e: Expr) -> Expr:
    """The step that computes e at once, with the same values and conventions at kinks; or e."""
    if e.step == "MulOperand":
        if e.args[0] is e.args[1]:
            return Expr("Square", e.args[:1])
        for x, gate in (e.args, e.args[::-1]):
            if _is_chain(gate, x, ("Sigmoid",)):
                return Expr("Silu", (x,))
            if _is_chain(gate, x, ("Sigmoid",), ("Mul", 1.702)):
                return Expr("QuickGelu", (x,))
            if _is_chain(gate, x, ("Clamp", 0.0, 1.0), ("Div", 6.0), ("Shift", 3.0)):
                return Expr("HardswishWritten", (x,))
            if _is_chain(gate, x, ("Tanh",), ("Softplus", 1.0, 20.0)):
                return Expr("Mish", (x,))
    if e.step == "DivOperand" and _is_chain(e.args[1], e.args[0], ("Shift", 1.0), ("Abs",)):
        return Expr("Softsign", e.args[:1])
    if e.step == "Div" and e.scalars == (6.0,) and e.args[0].step == "MulOperand":
        a, b = e.args[0].args
        for x, gate in ((a, b), (b, a)):
            if _is_chain(gate, x, ("Relu6",), ("Shift", 3.0)):  # at -3 and 3 as F.hardswish
                return Expr("Hardswish", (x,))
    if e.step in ("Mul", "Div", "MulOperand"):
        return _gelu(e) or e
    return e


class Builder:
    """Equal expressions as one object, with idioms replaced."""

    def __init__(self) -> None:
        self._known: dict[tuple, Expr] = {}

    def __call__(self, e: Expr) -> Expr:
        if not e.step:
            return self._known.setdefault((e.node,), e)
        args = tuple(map(self, e.args))
        key = (e.step, e.scalars, *map(id, args))
        if key not in self._known:
            self._known[key] = _idiom(Expr(e.step, args, e.scalars))
        return self._known[key]


# ---------------------------------------------------------------------------------------------------------------------
# Programs


class _Emitter:
    def __init__(self, root: Expr, main: Expr, keep: bool) -> None:
        self.steps: list[tuple] = []
        self.operands: list[fx.Node] = []
        self.main = self.acc = main
        self.slots: dict[Expr, int] = {}
        self.left: dict[Expr, int] = {root: 1}  # uses to come
        self.has_main: dict[Expr, bool] = {}
        self._count(root)
        if not self.has_main[root]:
            raise Unlowerable("the value does not depend on it")
        if self.left[main] > 1 or keep:  # keep: something else is computed before its only use
            self._save(main)
        self._compute(root)

    def _count(self, e: Expr) -> None:
        for a in e.args:
            self.left[a] = self.left.get(a, 0) + 1
            if a not in self.has_main:
                self._count(a)
        self.has_main[e] = e is self.main or any(self.has_main[a] for a in e.args)

    def _save(self, e: Expr) -> None:
        free = next((k for k in range(MAX_SLOTS) if k not in self.slots.values()), None)
        if free is None:
            raise Unlowerable(f"more than {_C._encoding['slots']} values are used again")
        self.slots[e] = free
        self.steps.append(("save", ("slot", free), ()))

    def _source(self, e: Expr) -> tuple[str, int]:
        if e in self.slots:
            return "slot", self.slots[e]
        if e.node not in self.operands:
            self.operands.append(e.node)
        if len(self.operands) > MAX_OPERANDS:
            raise Unlowerable(f"more than {_C._encoding['operands']} operands")
        return "operand", self.operands.index(e.node)

    def _is_source(self, e: Expr) -> bool:
        return e in self.slots or (not e.step and e is not self.main)

    def _use(self, e: Expr) -> None:
        self.left[e] -= 1
        if not self.left[e]:
            self.slots.pop(e, None)

    def _compute(self, e: Expr) -> None:
        """Brings e into the accumulator."""
        if self.acc is e:
            return
        if self._is_source(e):
            self.steps.append(("load", self._source(e), ()))
        elif not e.step:
            raise Unlowerable("the input is needed again")
        elif e.step not in _STEPS:
            raise Unlowerable(f"{e.step.lower()} is no step")
        elif len(e.args) == 1:
            self._compute(e.args[0])
            self._use(e.args[0])
            self.steps.append((e.step, None, e.scalars))
        else:
            self._binary(e)
        self.acc = e
        if e.step and e not in self.slots and self.left[e] > 1:
            self._save(e)

    def _binary(self, e: Expr) -> None:
        first, second = e.args  # the accumulator and the source
        step = e.step
        if not self._is_source(second):
            if step in _REVERSED and (self._is_source(first) or (first is not second and self.has_main[first])):
                first, second, step = second, first, _REVERSED[step]
            if not self._is_source(second):  # what holds the input first, while it is in the accumulator
                self._compute(second)
                if second not in self.slots:
                    self._save(second)
        if step not in _STEPS:
            raise Unlowerable(f"{step.lower()} is no step")
        self._compute(first)
        self.steps.append((step, self._source(second), e.scalars))
        self._use(first)
        self._use(second)


def lower(root: Expr, main: fx.Node) -> tuple[list[tuple], list[fx.Node]]:
    """Steps for ``_program.encode`` and the tensors that are their operands, with ``main`` as the chain's x.

    Raises:
        Unlowerable: it needs more steps, operands or slots than a program has.
    """
    leaf = next((e for e in leaves(root) if e.node is main), None)
    if leaf is None or leaf is root:
        raise Unlowerable("there is nothing to compute")
    try:
        emitter = _Emitter(root, leaf, keep=False)
    except Unlowerable:
        emitter = _Emitter(root, leaf, keep=True)
    scalars = sum(len(s) for _, _, s in emitter.steps)
    if len(emitter.steps) > MAX_STEPS or scalars > MAX_SCALARS:
        raise Unlowerable(f"more than {MAX_STEPS} steps")
    return emitter.steps, emitter.operands


def walk(root: Expr, into: Callable[[Expr], bool] = lambda e: True) -> list[Expr]:
    """The parts of an expression in the order of its evaluation, each once; those of ``e`` only where ``into(e)``."""
    found: dict[Expr, None] = {}

    def visit(e: Expr) -> None:
        if e not in found:
            found[e] = None
            if into(e):
                for a in e.args:
                    visit(a)

    visit(root)
    return list(found)


def leaves(root: Expr) -> list[Expr]:
    """The tensors from outside that an expression reads, in the order of its evaluation."""
    return [e for e in walk(root) if not e.step]
