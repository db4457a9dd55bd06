"""Traces of functions and modules for :func:`fused_act.fuse`.

torch.fx records what a function does with stand-ins for its tensors. What it cannot see would be fixed by the trace (a
branch on grad mode, a random number drawn, a counter increased), so a trace that meets any of it is refused.
"""

from __future__ import annotations

import builtins
import operator
import random
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn


class Untraceable(Exception):
    """Why a trace would not stand for every call."""


# Recorded, so that what they make is made in each call, on the device and with the random numbers of that call.
_FACTORIES = (
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros",
)  # fmt: skip
# Their answer holds at the time of the trace only. no_grad, autocast and checkpoint ask them too.
_STATE = (
    (torch, "is_grad_enabled"),
    (torch, "is_autocast_enabled"),
    (torch, "is_inference_mode_enabled"),
    (torch, "set_grad_enabled"),
    (torch.autograd.graph.saved_tensors_hooks, "__enter__"),
)

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

# fx replaces nn.Module.__call__ while it traces.
_lock = threading.RLock()


class Constant:
    """A tensor that the traced function found elsewhere than in its arguments or its module."""

    __name__ = "constant"
    __module__ = __name__

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self) -> Tensor:
        return self.value


class Value(fx.Proxy):
    """Stands for a value in a trace."""


def _augmented(name: str) -> Callable[[Any, Any], Any]:
    target = getattr(operator, name.strip("_"))

    def record(self: Value, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return record


for _name in ("iadd", "isub", "imul", "itruediv", "ipow", "ifloordiv", "imod", "iand", "ior", "ixor", "imatmul"):
    setattr(Value, f"__{_name}__", _augmented(_name))  # fx would record x += y as x = x + y
del _name


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, whether fused or not."""
    return getattr(type(module), "_fused_act_original", type(module))


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_patched(module: nn.Module) -> bool:
    """Whether the instance has a forward of its own in the place of its class's."""
    return "forward" in vars(module)


def is_sequential(module: nn.Module) -> bool:
    return original_class(module).forward is nn.Sequential.forward


def _is_own(module: nn.Module) -> bool:
    """Whether a module's forward is traced through: where it is the user's and holds no layers. A run may then cross
    its boundary: an activation written as a module, a layer scale, a stochastic depth."""
    if is_patched(module):
        return False
    if is_sequential(module):
        return True
    if original_class(module).__module__.partition(".")[0] in ("torch", "fused_act"):
        return False
    return not any(child._parameters for child in module.modules() if child is not module)


class _Sides:
    """What tracing must not change: attributes of the modules and the states of random number generators."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.attributes = [(m, dict(vars(m)), {k: self._contents(v) for k, v in vars(m).items()}) for m in modules]

    @staticmethod
    def _contents(value: Any) -> Any:
        if isinstance(value, dict):
            return dict(value)
        return value.copy() if isinstance(value, (list, set)) else None

    def restore(self) -> bool:
        """Undoes changes; whether there were any."""
        changed = False
        for module, before, contents in self.attributes:
            now = vars(module)
            if now.keys() != before.keys() or any(now[k] is not v for k, v in before.items()):
                changed = True
                now.clear()
                now.update(before)
            for key, old in contents.items():
                if old is None:
                    continue
                value = before[key]
                same = len(value) == len(old) and (
                    all(k in value and value[k] is v for k, v in old.items())
                    if isinstance(old, dict)
                    else all(a is b for a, b in zip(value, old))
                )
                if not same:
                    changed = True
                    value.clear()
                    value.extend(old) if isinstance(old, list) else value.update(old)
        return changed


class _Generators:
    def __init__(self) -> None:
        self.numpy = sys.modules.get("numpy")
        self.states = self._read()

    def _read(self) -> tuple:
        state = self.numpy.random.get_state(legacy=True) if self.numpy else None
        return torch.random.get_rng_state(), random.getstate(), state

    def restore(self) -> bool:
        (torch_, python, numpy_), (torch_now, python_now, numpy_now) = self.states, self._read()
        changed = not torch.equal(torch_, torch_now) or python != python_now
        if numpy_ is not None:
            changed |= numpy_[2:] != numpy_now[2:] or (numpy_[1] != numpy_now[1]).any()
        if changed:
            torch.random.set_rng_state(torch_)
            random.setstate(python)
            if numpy_ is not None:
                self.numpy.random.set_state(numpy_)
        return bool(changed)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, call: Callable[[_Tracer], Any]) -> None:
        super().__init__()
        self.traced_call = call
        self.inlined: list[tuple[str, nn.Module]] = []

    def proxy(self, node: fx.Node) -> Value:
        return Value(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list]:
        return lambda: self.traced_call(self), []

    def create_arg(self, a: Any) -> Any:
        if type(a) is not Value and isinstance(a, Tensor):
            for kind in (self.root.named_parameters(), self.root.named_buffers()):
                for name, tensor in kind:
                    if tensor is a:
                        return self.create_node("get_attr", name, (), {})
            if self.submodule_paths is not None:  # a copy of the module would go on reading this tensor
                raise Untraceable("it reads a tensor that is no argument, no parameter and no buffer")
            return self.create_node("call_function", Constant(a), (), {})
        return super().create_arg(a)

    def path_of_module(self, mod: nn.Module) -> str:
        if self.submodule_paths is None:  # the trace of a function
            for name, module in self.root.named_children():
                if module is mod:
                    return name
            name = f"module_{len(self.root._modules)}"
            self.root.add_module(name, mod)
            return name
        return super().path_of_module(mod)

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        path = self.path_of_module(m)
        if self.submodule_paths is not None and not has_hooks(m) and _is_own(m):
            last, depth = next(iter(reversed(self.graph.nodes)), None), len(self.inlined)
            self.inlined.append((path, m))
            sides = _Sides([m])
            try:
                result = original_class(m).forward(m, *args, **kwargs)
            except Exception:
                sides.restore()
            else:
                if not sides.restore():
                    return result
            del self.inlined[depth:]
            for node in reversed(list(self.graph.nodes)):
                if node is last:
                    break
                if node.op != "get_attr":  # fx remembers those and uses them again
                    self.graph.erase_node(node)
        return self.create_proxy("call_module", path, args, kwargs)


def _plain(result: Any) -> Any:
    """fx makes a dict of every kind of mapping, so the function would return another type."""
    if isinstance(result, (tuple, list, dict)) and type(result) is not Value:
        if type(result) not in (tuple, list, dict):
            raise Untraceable(f"it returns a {type(result).__name__}")
        for item in result.values() if isinstance(result, dict) else result:
            _plain(item)
    elif not isinstance(result, (fx.Proxy, Tensor, *CONSTANTS)):
        raise Untraceable(f"it returns a {type(result).__name__}")
    return result


_A_TENSOR = torch.empty(0)


def _isinstance(value: Any, kinds: Any, asked: Callable[[Any, Any], bool] = isinstance) -> bool:
    """What traced code is told: a stand-in for a tensor is one. (Not by a ``__class__`` of Value: torch's C++ would
    believe it too.) fx's own questions are about the stand-in."""
    if type(value) is not Value or sys._getframe(1).f_globals.get("__name__", "").startswith(("torch.", "fused_act.")):
        return asked(value, kinds)
    if value.node.meta.get("tensor"):
        return asked(_A_TENSOR, kinds)
    raise Untraceable("the type of a value is asked for")


class _Patches:
    """Attributes of torch replaced while a trace runs."""

    def __init__(self, tracer: _Tracer) -> None:
        self.patches: list[tuple[Any, str, Any]] = []
        for name in _FACTORIES:
            self.patches.append((torch, name, self._recorded(tracer, getattr(torch, name))))
        for owner, name in _STATE:
            self.patches.append((owner, name, self._refused(f"grad mode, autocast or saved tensors ({name}) are used")))
        self.patches.append((builtins, "isinstance", _isinstance))
        refused = self._refused("a torch.autograd.Function is applied, whose backward a trace does not see")
        self.patches.append((torch.autograd.Function, "apply", refused))

    @staticmethod
    def _recorded(tracer: _Tracer, factory: Callable) -> Callable:
        return lambda *args, **kwargs: tracer.create_proxy("call_function", factory, args, kwargs)

    @staticmethod
    def _refused(reason: str) -> Callable:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise Untraceable(reason)

        return refuse

    def __enter__(self) -> None:
        self.before = [(owner, name, vars(owner)[name]) for owner, name, _ in self.patches]
        for owner, name, value in self.patches:
            # isinstance looks at its caller, and no other thread has a Value to ask about.
            setattr(owner, name, value if owner is builtins else self._of_this_thread(value, vars(owner)[name]))

    @staticmethod
    def _of_this_thread(patch: Callable, original: Any) -> Any:
        """Other threads, which run while this one traces, find what they always did."""
        thread = threading.get_ident()
        if isinstance(original, classmethod):

            class Bound:
                def __get__(self, instance: Any, owner: type) -> Callable:
                    return patch if threading.get_ident() == thread else original.__get__(instance, owner)

            return Bound()

        def call(*args: Any, **kwargs: Any) -> Any:
            return (patch if threading.get_ident() == thread else original)(*args, **kwargs)

        return call

    def __exit__(self, *error: Any) -> None:
        for owner, name, value in self.before:
            setattr(owner, name, value)


def trace(
    function: Callable, module: nn.Module | None, arguments: Callable[[Callable[[], Value]], tuple[tuple, dict]]
) -> tuple[fx.Graph, nn.Module, list[tuple[str, nn.Module]]]:
    """The graph of ``function(*args, **kwargs)``.

    Args:
        function: for a module, its class's ``forward``.
        module: the module whose forward it is, or None.
        arguments: makes args and kwargs from a function that makes the next tensor.

    Returns:
        The graph, the module that its paths start from, and the modules traced through, with their paths.

    Raises:
        Untraceable: with the reason.
    """

    def call(tracer: _Tracer) -> Any:
        count = iter(range(sys.maxsize))

        def tensor() -> Value:
            proxy = tracer.create_proxy("placeholder", f"input_{next(count)}", (), {})
            proxy.node.meta["tensor"] = True
            return proxy

        args, kwargs = arguments(tensor)
        with _Patches(tracer):
            return _plain(function(*args, **kwargs) if module is None else function(module, *args, **kwargs))

    tracer = _Tracer(call)
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sides, generators = _Sides([module] if module is not None else []), _Generators()
        try:
            graph = tracer.trace(module if module is not None else lambda: None)
        except Untraceable:
            raise
        except Exception as error:
            raise Untraceable(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
        finally:
            changed, drawn = sides.restore(), generators.restore()
        if changed:
            raise Untraceable("it changes attributes of its module")
        if drawn:
            raise Untraceable("it draws random numbers outside of the operations on its tensors")
    return graph, tracer.root, tracer.inlined
