"""``fused_act.fuse``: every run of pointwise operations in a function or a model as one kernel."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ._runs import Analysis, analyse, compiled
from ._trace import CONSTANTS, Untraceable, has_hooks, is_patched, is_sequential, original_class, trace

# Signatures, modes and hooks that one function or module is traced for; beyond that its own code runs.
_MAX_PLANS = 16


class _Unsupported(Exception):
    """An argument that no trace can take."""


def _signature(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Sequence[Tensor]]:
    """What a trace depends on, and the tensors that it takes."""
    if not kwargs and all([isinstance(a, Tensor) for a in args]):  # nearly every call, in a microsecond
        return ((Tensor,) * len(args), ()), args
    tensors: list[Tensor] = []

    def kind(a: Any) -> Any:
        if isinstance(a, Tensor):
            tensors.append(a)
            return Tensor
        if type(a) in CONSTANTS:
            return type(a), a, str(a)  # 0.0 and -0.0 are equal
        if type(a) in (list, tuple):
            return type(a), tuple([kind(item) for item in a])
        raise _Unsupported(f"an argument is a {type(a).__name__}")

    return (tuple([kind(a) for a in args]), tuple([(name, kind(a)) for name, a in kwargs.items()])), tensors


def _arguments(key: Any) -> Callable[[Callable[[], Any]], tuple[tuple, dict[str, Any]]]:
    """Arguments of a signature, with the tensors that a function makes."""

    def value(kind: Any, tensor: Callable[[], Any]) -> Any:
        if kind is Tensor:
            return tensor()
        type_, content, *_ = kind
        return type_(value(k, tensor) for k in content) if type_ in (list, tuple) else content

    def make(tensor: Callable[[], Any]) -> tuple[tuple, dict[str, Any]]:
        args, kwargs = key
        return tuple(value(k, tensor) for k in args), {name: value(k, tensor) for name, k in kwargs}

    return make


@dataclass(frozen=True)
class _Plan:
    """What a function or module does for one signature.

    Attributes:
        forward: the code, of a module and the tensors; None: as it was.
        intact: whether the modules still are as they were when it was traced.
        root: the module that the code of a function takes as its own.
        analysis: the runs; None where there was no trace.
        reason: why there was none.
        inlined: paths of the modules that it stands for, besides its own.
    """

    forward: Callable | None
    intact: Callable[[nn.Module], bool]
    root: nn.Module | None = None
    analysis: Analysis | None = None
    reason: str = ""
    inlined: tuple[str, ...] = ()


def _always(module: Any) -> bool:
    return True


def _conditions(root: nn.Module, inlined: list[tuple[str, nn.Module]], analysis: Analysis) -> Callable:
    """``intact(module)``: no hook, other class or other mode has come to a module that the code does not call."""
    scope: dict[str, Any] = {"has_hooks": has_hooks, "is_patched": is_patched}
    lines = [
        "def intact(module):",
        "    children = module._modules",
        f"    if len(children) != {len(root._modules)}:",
        "        return False",
    ]
    modes = {path for path, m in inlined if not is_sequential(m)}
    for k, path in enumerate(dict.fromkeys([path for path, _ in inlined] + analysis.fused_away)):
        *parents, name = path.split(".")
        step = "".join(f"[{p!r}]._modules" for p in parents)
        module = root.get_submodule(path)
        scope[f"kinds_{k}"] = (original_class(module), _fused_class(original_class(module)))
        lines += [
            f"    m = children{step}[{name!r}]",
            f"    if type(m) not in kinds_{k} or has_hooks(m) or is_patched(m):",
            "        return False",
        ]
        if path in modes:
            lines += [f"    if m.training is not {module.training}:", "        return False"]
        # What the trace read of it: plain attributes, and in a container who its children are.
        scope[f"constants_{k}"] = tuple(
            (n, v) for n, v in vars(module).items() if type(v) in CONSTANTS and n != "training"
        )
        lines += [
            f"    if len(m._modules) != {len(module._modules)}:",
            "        return False",
            f"    for name, value in constants_{k}:",
            "        if m.__dict__.get(name) != value:",
            "            return False",
        ]
        if path in analysis.conv:
            lines += ["    if m.bias is None:", "        return False"]
        if path in analysis.batch_norms:
            lines += ["    if m.training:", "        return False"]
    lines.append("    return True")
    exec(compile("\n".join(lines), "<fused_act.fuse>", "exec"), scope)
    return scope["intact"]


def _plan(function: Callable, module: nn.Module | None, key: Any, fold_batchnorm: bool = False) -> _Plan:
    """Traces for a signature. Never raises."""
    try:
        graph, root, inlined = trace(function, module, _arguments(key))
        analysis = analyse(graph, root, fold_batchnorm)
        if not analysis.runs:
            return _Plan(None, _always, None, analysis, "", tuple(path for path, _ in inlined))
        forward = compiled(analysis.graph)
        intact = _conditions(root, inlined, analysis) if module is not None else _always
    except Untraceable as error:
        return _Plan(None, _always, reason=str(error))
    except Exception as error:  # whatever a model does: it works as it did
        return _Plan(None, _always, reason=f"{type(error).__name__}: {error}")
    own_root = root if module is None else None
    return _Plan(forward, intact, own_root, analysis, "", tuple(path for path, _ in inlined))


# ---------------------------------------------------------------------------------------------------------------------
# Functions


class FusedFunction:
    """What :func:`fuse` makes of a function: the same signature, values and gradients, in fewer kernels.

    It is traced once for each combination of its arguments that are not tensors. What the function reads besides its
    arguments (globals, closures) is read when it is traced.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._plans: dict[Any, _Plan] = {}
        # Where the whole function is one kernel of its arguments: that, for tensors like those it was given before.
        self._remembered: Callable[..., Any] | None = None
        if (key := _required(function)) is not None:
            plan = self._plans[key] = _plan(function, None, key)
            if plan.analysis and not plan.analysis.fused_away:
                self._remembered = plan.analysis.only_kernel()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        remembered = self._remembered
        if remembered is not None and not kwargs and not torch.compiler.is_compiling():
            result = remembered(*args)
            if result is not NotImplemented:
                return result
        try:
            key, tensors = _signature(args, kwargs)
        except _Unsupported:
            return self._function(*args, **kwargs)
        plan = self._plans.get(key)
        if plan is None:
            if torch.compiler.is_compiling() or len(self._plans) >= _MAX_PLANS:
                return self._function(*args, **kwargs)
            plan = self._plans[key] = _plan(self._function, None, key)
        if plan.forward is None or (plan.analysis.fused_away and _has_any_global_hook()):
            return self._function(*args, **kwargs)
        return plan.forward(plan.root, *tensors)

    def __repr__(self) -> str:
        return f"<fused_act.fuse({self._function!r})>"

    def __set_name__(self, owner: type, name: str) -> None:
        """In a class a function takes its place: torch.compile and torch.fx accept no other ``forward``."""

        @functools.wraps(self._function)
        def method(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        method._fused_act = self  # type: ignore[attr-defined]
        setattr(owner, name, method)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedFunction:
        return self  # as functions are

    def __reduce__(self) -> Any:
        found: Any = sys.modules.get(self.__module__)
        for name in self.__qualname__.split("."):
            found = getattr(found, name, None)
        own = found is self or getattr(found, "_fused_act", None) is self
        return self.__qualname__ if own else (fuse, (self._function,))


def _required(function: Callable[..., Any], skip: int = 0) -> Any:
    """The signature of a call with tensors for all arguments without a default, by position."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        return None
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not needed or any(p.kind is p.KEYWORD_ONLY for p in needed):
        return None
    return (Tensor,) * len(needed), ()


# ---------------------------------------------------------------------------------------------------------------------
# Modules


class _Plans:
    """The plans of one module, by signature and mode. Copies of the module share them; a pickle does without."""

    def __init__(self, fold_batchnorm: bool) -> None:
        self.fold_batchnorm = fold_batchnorm
        self.by_key: dict[Any, list[_Plan]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Plans:
        other = _Plans(self.fold_batchnorm)
        other.by_key = {key: list(plans) for key, plans in self.by_key.items()}
        return other

    def __reduce__(self) -> Any:
        return _Plans, (self.fold_batchnorm,)

    def find(self, module: nn.Module, key: Any) -> _Plan | None:
        plans = self.by_key.get((key, module.training))
        if plans is not None:
            for plan in plans:
                if plan.intact(module):
                    return plan
        if torch.compiler.is_compiling() or sum(map(len, self.by_key.values())) >= _MAX_PLANS:
            return None
        return self.make(module, key)

    def make(self, module: nn.Module, key: Any) -> _Plan:
        plan = _plan(original_class(module).forward, module, key, self.fold_batchnorm)
        self.by_key.setdefault((key, module.training), []).append(plan)
        return plan


class _Fused:
    """Mixed into the class of a module whose forward is fused."""

    _fused_act_original: type[nn.Module]

    def _fused_act_call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            key, tensors = _signature(args, kwargs)
        except _Unsupported:
            return self._fused_act_original.forward(self, *args, **kwargs)
        plans = self.__dict__.get("_fused_act")
        # A hook that is registered for all modules is for those that the code does not call, too.
        plan = None if plans is None or _has_any_global_hook() else plans.find(self, key)
        if plan is None or plan.forward is None:
            return self._fused_act_original.forward(self, *args, **kwargs)
        return plan.forward(self, *tensors)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "training" and (plans := self.__dict__.get("_fused_act")) is not None:
            plans.by_key.clear()  # the trace may have read it

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, args, *rest = super().__reduce_ex__(protocol)
        args = tuple(self._fused_act_original if a is type(self) else a for a in args)
        return (_rebuild, (make, args), *rest)


def _named_parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a method without ``self``, if all have names, and defaults that a trace can take."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    named = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    return (
        parameters if named and all(p.default is p.empty or type(p.default) in CONSTANTS for p in parameters) else None
    )


def _default_key(function: Callable[..., Any]) -> Any:
    """The signature of a call of a method with tensors for the arguments without a default."""
    parameters = _named_parameters(function)
    if parameters is None or all(p.default is not p.empty for p in parameters):
        return _required(function, skip=1)
    kinds = {p.name: Tensor if p.default is p.empty else (type(p.default), p.default) for p in parameters}
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return tuple(k for name, k in kinds.items() if name not in keywords), tuple((n, kinds[n]) for n in keywords)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with the parameters of the original, by which torch.export and torch.fx name inputs."""
    parameters = _named_parameters(original)
    scope: dict[str, Any] = {}
    if parameters is None:
        declared, positional, keywords = ["*args", "**kwargs"], "args", "kwargs"
    else:
        declared, given, named = [], [], []
        for p in parameters:
            if p.kind is p.KEYWORD_ONLY and not named:
                declared.append("*")
            scope[f"default_{p.name}"] = p.default
            declared.append(p.name if p.default is p.empty else f"{p.name}=default_{p.name}")
            if p.kind is p.KEYWORD_ONLY:
                named.append(f"{p.name!r}: {p.name}")
            else:
                given.append(f"{p.name}, ")
        positional, keywords = f"({''.join(given)})", f"{{{', '.join(named)}}}"
    source = (
        f"def forward({', '.join(['self', *declared])}):\n    return self._fused_act_call({positional}, {keywords})"
    )
    exec(compile(source, "<fused_act.fuse>", "exec"), scope)
    scope["forward"].__doc__ = original.__doc__
    return scope["forward"]


@functools.cache
def _fused_class(original: type[nn.Module]) -> type[nn.Module]:
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_fused_act_original": original,
        "forward": _forward(original.forward),
    }
    return type(original.__name__, (_Fused, original), names)


def _rebuild(make: Callable, args: tuple) -> nn.Module:
    module = make(*args)
    module.__class__ = _fused_class(type(module))
    return module


def _may_fuse(module: nn.Module) -> bool:
    kind = type(module)
    if hasattr(kind, "_fused_act_original") or isinstance(module, torch.jit.ScriptModule):
        return False
    if kind.__module__.partition(".")[0] in ("torch", "fused_act") and not is_sequential(module):
        return False
    # What another tool has put in the place of forward, stays.
    return not is_patched(module) and getattr(module, "_compiled_call_impl", None) is None


def _fuse_modules(model: nn.Module, fold_batchnorm: bool) -> dict[str, list[_Plan]]:
    """Fuses each module that has a run; the plans of all, by path."""
    found: dict[str, list[_Plan]] = {}
    changes = []
    for path, module in model.named_modules():
        before = vars(module).get("_fused_act")
        if before is not None and fold_batchnorm and not before.fold_batchnorm:  # once more, from the start
            module.__class__ = original_class(module)
            del module.__dict__["_fused_act"]
        if not _may_fuse(module):
            continue
        key = _default_key(type(module).forward)
        if key is None:
            continue
        plans = _Plans(fold_batchnorm)
        modes = [(m, m.training) for m in module.modules()]
        try:
            for mode in (not module.training, module.training):
                for m, _ in modes:
                    vars(m)["training"] = mode
                plans.make(module, key)
        finally:
            for m, mode in modes:
                vars(m)["training"] = mode
        found[path] = [plan for both in plans.by_key.values() for plan in both]
        if any(plan.forward for plan in found[path]):
            changes.append((module, plans))
    for module, plans in changes:
        try:
            fused = _fused_class(type(module))
            module.__class__ = fused
        except TypeError:  # a class with a metaclass or __slots__ of its own
            continue
        module.__dict__["_fused_act"] = plans
    return found


def _copy(model: nn.Module) -> nn.Module:
    """A copy of the modules, with the same parameters and buffers."""
    memo: dict[int, Any] = {}

    def keep(value: Any) -> None:
        if isinstance(value, Tensor):
            memo[id(value)] = value
        elif isinstance(value, (list, tuple)):
            for item in value:
                keep(item)
        elif isinstance(value, dict):
            for item in value.values():
                keep(item)

    for module in model.modules():
        keep({k: v for k, v in vars(module).items() if k != "_modules"})
    return copy.deepcopy(model, memo)


def _check_target(name: str, target: Any) -> None:
    if isinstance(target, type):
        raise TypeError(f"fused_act.{name}: expected a function or an nn.Module, but got the class {target.__name__}")
    if not callable(target):
        raise TypeError(f"fused_act.{name}: expected a function or an nn.Module, but got a {type(target).__name__}")


def fuse(target: Any, *, fold_batchnorm: bool = False, inplace: bool = False) -> Any:
    """Every run of pointwise operations as one kernel, forward and backward. Nothing is compiled.

    ``fuse(function)``, or as a decorator: a callable with the same signature, values and gradients. It is traced once
    for each combination of arguments that are not tensors.

    ``fuse(model)``: a copy of the model that shares its parameters and buffers, with the same classes, attributes and
    ``state_dict``. A convolution's own bias goes into the run that follows it (under autocast it is then not rounded
    first). A module whose forward cannot be traced runs as it did, and its children are fused one by one; so does one
    with an argument that is neither a tensor, a number, a string nor a list of those. A module with hooks is never
    fused away.

    Where eager would give another shape or dtype than the run's input has (mixed dtypes, an operand that is larger,
    integers), the original operations run. What a run computes it rounds once, so float16 and bfloat16 are closer to
    the exact value than in eager. :func:`explain` tells what was fused.

    Args:
        target: a function of tensors or an ``nn.Module``.
        fold_batchnorm: make BatchNorm2d and BatchNorm3d in eval mode part of the run too.
        inplace: change the model itself instead of a copy.

    Raises:
        TypeError: ``target`` is neither callable nor a module, or a class: modules are fused, not their classes.
    """
    if isinstance(target, nn.Module):
        if isinstance(target, torch.jit.ScriptModule):
            return target
        if not inplace:
            try:
                target = _copy(target)
            except Exception as error:
                warnings.warn(f"fused_act.fuse: the model cannot be copied ({error}), so it is fused in place")
        _fuse_modules(target, fold_batchnorm)
        return target
    if isinstance(target, FusedFunction):
        return target
    _check_target("fuse", target)
    return FusedFunction(target) if isinstance(target, (types.FunctionType, types.MethodType)) else target


# ---------------------------------------------------------------------------------------------------------------------
# explain


@dataclass(frozen=True)
class Report:
    """What :func:`explain` found.

    Attributes:
        kernels: one line for each fused kernel: where, its operator, the operations in it, and what autograd keeps
            for backward.
        left: one line for each pointwise operation that stays, with the reason.
        untraced: one line for each function or module that was not traced, with the reason.
        pointwise_before, pointwise_after: pointwise kernels of eager, and with those fused.
        bytes_before, bytes_after: read and written by the fused ones, per element of their results.
    """

    kernels: tuple[str, ...]
    left: tuple[str, ...]
    untraced: tuple[str, ...]
    pointwise_before: int
    pointwise_after: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        lines = [
            f"fused_act.fuse: pointwise kernels {self.pointwise_before} -> {self.pointwise_after}; the fused ones move "
            f"{self.bytes_before} -> {self.bytes_after} bytes per element"
        ]
        for title, found in (("fused", self.kernels), ("left", self.left), ("not traced", self.untraced)):
            lines += [f"{title}:", *(f"  {line}" for line in found)] if found else []
        return "\n".join(lines)


def explain(target: Any, *args: Any, fold_batchnorm: bool = False, **kwargs: Any) -> Report:
    """Prints and returns which operations :func:`fuse` puts into which kernel, and why others stay.

    Args:
        target: a function or module, fused or not.
        args, kwargs: of a call, for a function with arguments that are not tensors. The dtype of the first tensor is
            the one that bytes are counted in (float32 without).
        fold_batchnorm: as for :func:`fuse`.

    Bytes count every tensor that is no parameter or constant as large as the result.

    Raises:
        TypeError: ``target`` is not callable, or a class.
    """
    _check_target("explain", target)
    itemsize, key = 4, None
    if args or kwargs:
        try:
            key, tensors = _signature(args, kwargs)
            itemsize = tensors[0].element_size() if tensors else 4
        except _Unsupported:
            key = None
    if isinstance(target, nn.Module):
        plans = _module_plans(target, key, fold_batchnorm)
    else:
        function = target._function if isinstance(target, FusedFunction) else target
        key = key or _required(function)
        if key is None:
            plan = _Plan(None, _always, reason="call it with example arguments: it has none that must be tensors")
        else:
            plan = _plan(function, None, key)
        plans = {getattr(function, "__name__", type(function).__name__): plan}
    kernels, left, untraced = [], [], []
    before = after = bytes_before = bytes_after = 0
    for where, plan in plans.items():
        if plan.analysis is None:
            untraced.append(f"{where}: {plan.reason}")
            continue
        before += plan.analysis.kernels
        after += plan.analysis.kernels
        for run in plan.analysis.runs:
            after -= run.kernels - 1
            bytes_before += run.reads_before * itemsize
            bytes_after += run.reads_after * itemsize
            kernels.append(
                f"{where}: {run.kernel} <- {', '.join(run.names)} ({run.kernels} kernels; training saves {run.saved})"
            )
        left += [f"{where}: {name}: {why}" for name, why in plan.analysis.left]
    report = Report(tuple(kernels), tuple(left), tuple(untraced), before, after, bytes_before, bytes_after)
    print(report)
    return report


def _module_plans(model: nn.Module, key: Any, fold_batchnorm: bool) -> dict[str, _Plan]:
    """The plan of each module that runs by itself, in the mode that it is in."""
    plans: dict[str, _Plan] = {}
    covered: set[str] = set()
    for path, module in model.named_modules():
        kind = original_class(module)
        if path in covered or isinstance(module, torch.jit.ScriptModule):
            continue
        if kind.__module__.partition(".")[0] in ("torch", "fused_act") and not is_sequential(module):
            continue
        own = key if not path and key is not None else _default_key(kind.forward)
        if own is None:
            continue
        fused = vars(module).get("_fused_act")
        folds = fold_batchnorm or (fused is not None and fused.fold_batchnorm)
        plan = _plan(kind.forward, module, own, folds)
        if plan.analysis is None and not any(True for _ in module.children()) and has_hooks(module):
            continue
        prefix = f"{path}." if path else ""
        if plan.analysis is not None:
            covered.update(prefix + inner for inner in plan.inlined)
        if plan.analysis is None or plan.analysis.kernels:
            plans[path or kind.__name__] = plan
    return plans
