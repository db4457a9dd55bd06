"""Runs of pointwise operations in a graph, and the functions that they become."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from . import _C, _pointwise
from ._lower import Builder, Unlowerable, leaves, lower, walk
from ._pointwise import Expr, Operation
from ._program import encode
from ._table import OPERATORS
from ._trace import has_hooks, is_patched, original_class

_MAX_DIMS = 16  # that the kernels walk where no dimensions lie together in memory
_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_TENSORS = frozenset((Tensor, nn.Parameter, FakeTensor, FunctionalTensor))
_WITH_CUDA = torch._C._dispatch_has_kernel_for_dispatch_key("fused_act::relu", "CUDA")


def admits(x: Tensor, *operands: Tensor) -> bool:
    """Whether eager's result has the shape and dtype of x, and the kernels take these tensors."""
    dtype = x.dtype
    if type(x) not in _TENSORS or dtype not in _FLOATS or x.layout != torch.strided or x.is_nested:
        return False
    if x.ndim > _MAX_DIMS:
        return False
    if not (x.is_cpu or (x.is_cuda and _WITH_CUDA) or x.is_meta):
        return False
    if operands:
        shape = x.shape
        for o in operands:
            if type(o) not in _TENSORS or o.layout != torch.strided or o.is_nested:
                return False
            if o.dtype != dtype and (o.ndim or not shape or o.dtype not in _FLOATS):
                return False
            if o.device != x.device and (o.ndim or not o.is_cpu):
                return False
            sizes = o.shape
            if sizes != shape:
                lead = len(shape) - len(sizes)
                if lead < 0:
                    return False
                for k, size in enumerate(sizes, lead):
                    if size != 1 and size != shape[k]:
                        return False
    return True


def same_dtype(*tensors: Tensor) -> bool:
    return all([t.dtype == tensors[0].dtype for t in tensors])


def cannot_be_saved(*tensors: Tensor) -> bool:
    """Whether autograd would refuse to keep one, which eager may not ask for."""
    return any([t.is_inference() for t in tensors]) and torch.is_grad_enabled()


@dataclass
class Run:
    """Nodes that become one kernel.

    Attributes:
        nodes: in the order of the graph; the last one is the value.
        inputs: what the nodes read from outside.
        kernels: that eager launches for them.
        programs: for each input that may have the shape of the result: it, the steps, the operands.
        names: of the operations.
        kernel: the operator called, with its steps.
        saved: what training keeps.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    kernels: int
    programs: list[tuple[fx.Node, list[tuple], list[fx.Node]]]
    names: list[str] = field(default_factory=list)
    kernel: str = ""
    saved: str = ""
    reads_before: int = 0
    reads_after: int = 0


@dataclass(frozen=True)
class Analysis:
    """A graph with its runs replaced.

    Attributes:
        graph: the graph.
        runs: what was fused.
        left: pointwise operations that stay, with the reason.
        kernels: pointwise kernels of eager.
        fused_away: paths of modules whose forward is not called any more.
        conv: those among them whose bias has to be there.
        batch_norms: those among them that must be in eval mode.
    """

    graph: fx.Graph
    runs: list[Run]
    left: list[tuple[str, str]]
    kernels: int
    fused_away: list[str]
    conv: set[str]
    batch_norms: set[str]

    def only_kernel(self) -> Callable[..., Tensor] | None:
        """The ``remembered`` of the kernel that is all there is between the arguments and the result."""
        *inputs, kernel, output = self.graph.nodes
        alone = (
            len(self.runs) == 1
            and all(node.op == "placeholder" for node in inputs)
            and tuple(inputs) == kernel.args
            and output.args == (kernel,)
        )
        return kernel.target.remembered if alone else None


def _saved(main: fx.Node, steps: list[tuple], operands: list[fx.Node]) -> str:
    bits, inputs = _C._saved(*encode(steps), len(operands))
    tensors = ", ".join([main, *operands][n].name for n in inputs) or "nothing"
    if bits:
        return f"{bits} bit{'s' * (bits > 1)} an element; in float64 and below {_C._coded_from} elements {tensors}"
    return tensors


def _small(node: fx.Node) -> bool:
    """Whether a value is a parameter or a constant, which no result has the shape of."""
    return (
        node.op == "get_attr"
        or node.op == "call_function"
        and (
            node.target in (_pointwise.channel_bias, _pointwise.slope_for)
            or node.target in (operator.getitem,)
            and isinstance(node.args[0], fx.Node)
            and node.args[0].target is folded
            or isinstance(node.target, _pointwise.Constant)
            or getattr(node.target, "__name__", "") in ("tensor", "as_tensor")
        )
    )


def folded(bn: nn.Module, dimensions: int) -> tuple[Tensor, Tensor]:
    """Scale and shift of a BatchNorm in eval mode, for a result with that many dimensions after C."""
    from .nn import fold_batchnorm

    scale, shift = fold_batchnorm(bn)
    shape = (-1,) + (1,) * dimensions
    return scale.view(shape), shift.view(shape)


_BATCH_NORMS = {nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}


class _Analyser:
    def __init__(self, graph: fx.Graph, root: nn.Module, fold_batchnorm: bool) -> None:
        self.graph, self.root = graph, root
        self.split: dict[fx.Node, tuple[fx.Node, list[fx.Node]]] = {}
        self.overwrites: set[fx.Node] = set()  # in-place operations that stay
        self.modules_away: list[str] = []  # paths of modules that are functions now
        self._ask_inputs_for_devices()
        graph.eliminate_dead_code(is_impure_node=self._is_impure)
        self._shape_slopes()
        # A convolution's own kernel for its bias counts, and a BatchNorm's, where it is to be folded.
        self._split_layers(fold_batchnorm)

    def _is_impure(self, node: fx.Node) -> bool:
        if node.op in ("placeholder", "output"):
            return True
        if node.op == "get_attr":
            return False
        op = _pointwise.operation(node, self.root)
        if op is not None:
            return op.in_place
        return not (_pointwise._is_shape(node) or _pointwise.constant(node) is not None)

    def _ask_inputs_for_devices(self) -> None:
        """`x.device` of an operation's result is that of its only tensor, so it need not be made for that."""
        for node in self.graph.nodes:
            if node.op != "call_function" or node.target is not getattr or node.args[1] != "device":
                continue
            source = self._origin(node.args[0], lambda n: False)
            node.replace_input_with(node.args[0], source)

    def _shape_slopes(self) -> None:
        """A PReLU's weight lies along dimension 1 of x: it is shaped by a value with as many dimensions as x, the first
        of those that x is computed from, so that those need not be made for that."""
        for node in list(self.graph.nodes):
            if node.op == "call_module":
                module = self.root.get_submodule(node.target)
                usable = original_class(module) is nn.PReLU and not (has_hooks(module) or is_patched(module))
                x, weight = (node.args[0] if node.args else None), None
            else:
                usable = (node.op, node.target) in (("call_function", torch.prelu), ("call_method", "prelu"))
                x, weight = node.args if len(node.args) == 2 else (None, None)
            if not usable or node.kwargs or not isinstance(x, fx.Node):
                continue
            source = self._origin(x, self._keeps_dimensions)
            with self.graph.inserting_before(node):
                if node.op == "call_module":
                    weight = self.graph.get_attr(f"{node.target}.weight")
                    self.modules_away.append(node.target)
                slope = self.graph.call_function(_pointwise.slope_for, (weight, source))
                node.replace_all_uses_with(self.graph.call_function(_pointwise.prelu_by, (x, slope)))
            self.graph.erase_node(node)

    def _origin(self, node: fx.Node, through: Callable[[fx.Node], bool]) -> fx.Node:
        """What a value is computed from by pointwise operations of one tensor, and by others that ``through`` names."""
        while (_pointwise.operation(node, self.root) or through(node)) and len(node.all_input_nodes) == 1:
            [node] = node.all_input_nodes
        return node

    def _keeps_dimensions(self, node: fx.Node) -> bool:
        """Whether a layer's result has as many dimensions as its input."""
        layers = (*_pointwise.CONVOLUTIONS, nn.Linear, *_BATCH_NORMS)
        return node.op == "call_module" and original_class(self.root.get_submodule(node.target)) in layers

    def _split_layers(self, fold_batchnorm: bool) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
                continue
            layer = self.root.get_submodule(node.target)
            kind = original_class(layer)
            if has_hooks(layer) or is_patched(layer):
                continue
            with self.graph.inserting_after(node):
                if kind in _pointwise.CONVOLUTIONS and layer.bias is not None:
                    module = self.graph.get_attr(node.target)
                    with self.graph.inserting_after(module):
                        bare = self.graph.call_function(_pointwise.convolve, (module, node.args[0]))
                    with self.graph.inserting_after(bare):
                        bias = self.graph.call_function(_pointwise.channel_bias, (module,))
                    with self.graph.inserting_after(bias):
                        result = self.graph.call_function(_pointwise.add_bias, (bare, bias))
                    made = [result, bias, bare, module]
                elif (
                    fold_batchnorm
                    and kind in _BATCH_NORMS
                    and not layer.training
                    and layer.running_mean is not None
                    and layer.running_var is not None
                ):
                    module = self.graph.get_attr(node.target)
                    with self.graph.inserting_after(module):
                        pair = self.graph.call_function(folded, (module, _BATCH_NORMS[kind]))
                    with self.graph.inserting_after(pair):
                        scale = self.graph.call_function(operator.getitem, (pair, 0))
                    with self.graph.inserting_after(scale):
                        shift = self.graph.call_function(operator.getitem, (pair, 1))
                    with self.graph.inserting_after(shift):
                        arguments = (node.args[0], scale, shift)
                        result = self.graph.call_function(_pointwise.scale_and_shift, arguments)
                    made = [result, shift, scale, pair, module]
                else:
                    continue
            node.replace_all_uses_with(result)
            self.split[result] = node, made

    def _order(self) -> None:
        """Makes in-place operations on memory that nothing else sees plain ones, and counts the others, which no run
        may be moved over."""
        self.ops: dict[fx.Node, Operation] = {}
        self.unsafe: dict[fx.Node, str] = {}
        self.segment: dict[fx.Node, int] = {}
        self.fresh: set[fx.Node] = set()
        fences = 0
        position = self.position = {node: k for k, node in enumerate(self.graph.nodes)}
        for node in list(self.graph.nodes):
            op = _pointwise.operation(node, self.root)
            if op is not None:
                self.ops[node] = op
            if op is None:
                if node.op not in ("placeholder", "output", "get_attr"):
                    if _pointwise.is_fresh(node, self.root):
                        self.fresh.add(node)
                    elif _pointwise.is_fence(node, self.root):
                        fences += 1
            elif op.in_place and isinstance(node.args[0], fx.Node):
                target = node.args[0]
                others = [user for user in target.users if user is not node]
                before = [u for u in others if position[u] < position[node]]
                if node not in self.overwrites and target in self.fresh and all(u in self.fresh for u in before):
                    for user in others:
                        if position[user] > position[node]:
                            user.replace_input_with(target, node)
                    self.fresh.add(node)
                else:
                    del self.ops[node]
                    self.unsafe[node] = "in place, and others may see the tensor that it overwrites"
                    fences += 1
            elif op.kernels:
                self.fresh.add(node)
            self.segment[node] = fences

    # -----------------------------------------------------------------------------------------------------------------

    def _expression(self, nodes: set[fx.Node], root: fx.Node) -> Expr:
        build, memo = Builder(), {}

        def value(node: fx.Node) -> Expr:
            if node not in memo:
                if node in nodes:
                    memo[node] = build(self.ops[node].expression(value))
                else:
                    memo[node] = build(_pointwise._leaf(node))
            return memo[node]

        return value(root)

    def _programs(self, nodes: set[fx.Node], root: fx.Node) -> list:
        """Programs for each input that may have the result's shape."""
        e = self._expression(nodes, root)
        if e.is_mask or any(leaf.is_mask for leaf in leaves(e)):
            raise Unlowerable("a boolean tensor would enter or leave the kernel")
        inputs = [leaf.node for leaf in leaves(e)]
        candidates = [n for n in inputs if not _small(n)] + [n for n in inputs if n.op == "get_attr"]
        for node in nodes:
            if self.ops[node].in_place and len(node.all_input_nodes) > 1:  # what is overwritten is not enlarged
                target = node.all_input_nodes[0]
                own = {leaf.node for leaf in leaves(self._expression(nodes, target))} if target in nodes else {target}
                candidates = [n for n in candidates if n in own]
        if not candidates:
            raise Unlowerable("it has no input")
        return [(main, *lower(e, main)) for main in candidates[:3]]

    def _producers(self, nodes: set[fx.Node], segment: int) -> list[fx.Node]:
        return [
            p
            for p in reversed(list(self.graph.nodes))
            if p in self.ops
            and p not in nodes
            and p not in self.taken
            and self.segment[p] == segment
            and p.users
            and all(user in nodes for user in p.users)
        ]

    def _grow(self, root: fx.Node) -> tuple[set[fx.Node], list]:
        segment, nodes = self.segment[root], {root}
        while more := self._producers(nodes, segment):
            nodes.update(more)
        try:
            return nodes, self._programs(nodes, root)
        except Unlowerable as error:
            self.reasons[root] = str(error)
        nodes, programs, refused = {root}, None, set()
        try:
            programs = self._programs(nodes, root)
        except Unlowerable:
            programs = None  # erf alone, say
        while True:
            producer = next((p for p in self._producers(nodes, segment) if p not in refused), None)
            if producer is None:
                break
            try:
                programs = self._programs(nodes | {producer}, root)
            except Unlowerable:
                refused.add(producer)
            else:
                nodes.add(producer)
        if programs is None:
            raise Unlowerable(self.reasons[root])
        return nodes, programs

    def run(self) -> Analysis:
        runs = self._form()
        if apart := [result for result in self.split if result not in self.taken]:
            for result in apart:  # nothing follows that the bias could go into: the layer keeps it
                layer, made = self.split.pop(result)
                result.replace_all_uses_with(layer)
                for node in made:
                    self.graph.erase_node(node)
            runs = self._form()
        hidden = ("identity", "add_bias", "scale_and_shift")
        left = [(op.name, self.reasons[n]) for n, op in self.ops.items() if n not in self.taken]
        left = [(name, why) for name, why in left if name not in hidden]
        left += [(_describe(n), why) for n, why in self.unsafe.items()]
        others = [n for n in self.graph.nodes if n not in self.ops and n not in self.unsafe and _is_pointwise(n)]
        left += [(_describe(n), "no step computes it with these arguments") for n in others]
        kernels = sum(op.kernels for op in self.ops.values()) + len(self.unsafe) + len(others)
        return self._replace(runs, left, kernels)

    def _form(self) -> list[Run]:
        """The runs. What writes in place and is in none of them overwrites a tensor after all, so that no run may be
        moved over it: then once more with that known."""
        while True:
            runs = self._form_once()
            stay = {n for n, op in self.ops.items() if op.in_place and n not in self.taken}
            if not stay:
                return runs
            self.overwrites |= stay

    def _form_once(self) -> list[Run]:
        self._order()
        self.taken: dict[fx.Node, Run] = {}
        self.reasons: dict[fx.Node, str] = {}
        runs: list[Run] = []
        for root in reversed(list(self.graph.nodes)):
            if root not in self.ops or root in self.taken:
                continue
            try:
                nodes, programs = self._grow(root)
            except Unlowerable as error:
                self.reasons[root] = str(error)
                continue
            kernels = sum(self.ops[n].kernels for n in nodes)
            if kernels < 2 or not programs[0][1]:
                self.reasons[root] = "one kernel already"
                continue
            ordered = [n for n in self.graph.nodes if n in nodes]
            inputs = list(dict.fromkeys(a for n in ordered for a in n.all_input_nodes if a not in nodes))
            if any(n.args[0] in inputs and self.position[n] > self.position[root] for n in self.unsafe):
                self.reasons[root] = "a tensor that its gradient would be computed from is overwritten"
                continue
            run = Run(ordered, inputs, kernels, programs)
            run.names = [self.ops[n].name + "_" * self.ops[n].in_place for n in ordered]
            run.reads_before = sum(sum(not _small(a) for a in n.all_input_nodes) for n in ordered) + kernels
            run.reads_after = sum(not _small(a) for a in inputs) + 1
            runs.append(run)
            for n in nodes:
                self.taken[n] = run
        return runs

    def _replace(self, runs: list[Run], left: list, kernels: int) -> Analysis:
        away, conv, norms = list(self.modules_away), set(), set()
        for result, (layer, _) in self.split.items():
            away.append(layer.target)
            (conv if result.target is _pointwise.add_bias else norms).add(layer.target)
            self.graph.erase_node(layer)
        for run in runs:
            root = run.nodes[-1]
            away += [n.target for n in run.nodes if n.op == "call_module"]
            function = self._function(run)
            with self.graph.inserting_after(root):
                fused = self.graph.call_function(function, tuple(run.inputs))
            root.replace_all_uses_with(fused)
            for node in reversed(run.nodes):
                self.graph.erase_node(node)
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op != "get_attr")
        return Analysis(self.graph, runs[::-1], left, kernels, list(dict.fromkeys(away)), conv, norms)

    def _function(self, run: Run) -> Callable:
        """``kernel(*inputs)``: one operator where the inputs allow it, the original operations elsewhere. Its attribute
        ``remembered`` is the same for tensors like those that were admitted before, NotImplemented for others."""
        names = {node: f"x{k}" for k, node in enumerate(run.inputs)}
        arguments = ", ".join(names.values())
        scope: dict[str, Any] = {
            "admits": admits, "original": self._original(run), "is_compiling": torch.compiler.is_compiling,
            "same_dtype": same_dtype, "cannot_be_saved": cannot_be_saved,
        }  # fmt: skip
        # A trace of torch.compile takes the way through torch.ops.
        lines = [
            f"def kernel({arguments}):",
            "    traced = is_compiling()",
            "    if not traced:",
            f"        result = remembered({arguments})",
            "        if result is not NotImplemented:",
            "            return result",
            f"        if cannot_be_saved({arguments}):",
            f"            return original({arguments})",
        ]
        calls = []
        e = self._expression(set(run.nodes), run.nodes[-1])
        of_masks = _only_in_masks(e)
        # Eager's kernel of F.hardswish, and so the step, holds 1/6 in float32 on CUDA; x * relu6(x + 3) / 6 does not.
        approximate = any(self.ops[n].name == "relu6" for n in run.nodes)
        scope["float64"] = torch.float64
        for k, (main, steps, operands) in enumerate(run.programs):
            exact = ""
            if approximate and any(name == "Hardswish" for name, _, _ in steps):
                exact = f" and not ({names[main]}.is_cuda and {names[main]}.dtype is float64)"
            # A layer adds its own bias in the dtype of its result, whatever the bias has.
            checked = [names[o] for o in run.inputs if o is not main and not self._belongs_to_layer(o)]
            call = _Call(main, steps, operands, of_masks)
            guard = ""
            strict = [names[n] for n in _typed(e, main) if not self._belongs_to_layer(n)]
            if strict:
                guard += f" and same_dtype({', '.join(dict.fromkeys([names[main], *strict]))})"
            if any(self.ops[n].promoted for n in run.nodes):
                scope["autocasts"] = torch.is_autocast_enabled
                guard += f" and not autocasts({names[main]}.device.type)"  # which would return another dtype
            run.kernel = run.kernel or call.description
            run.saved = run.saved or _saved(main, steps, operands)
            calls.append(call.open(run.inputs))
            lines += [
                f"    if admits({', '.join([names[main], *checked])}){guard}{exact}:",
                "        if not traced:",
                f"            remember({k}, {arguments})",
                f"        return {call.source(k, names, scope)}",
            ]
        lines.append(f"    return original({arguments})")
        scope["remembered"], scope["remember"] = _C._kernel(calls)
        exec(compile("\n".join(lines), "<fused_act.fuse>", "exec"), scope)
        kernel = scope.pop("kernel")
        kernel.__module__ = "fused_act"
        kernel.remembered = scope["remembered"]
        return kernel

    def _belongs_to_layer(self, node: fx.Node) -> bool:
        return node.op == "call_function" and (
            node.target is _pointwise.channel_bias or (node.target is operator.getitem and _small(node))
        )

    def _original(self, run: Run) -> Callable:
        graph = fx.Graph()
        copies = {node: graph.placeholder(f"x{k}") for k, node in enumerate(run.inputs)}
        for node in run.nodes:
            op, target, args, kwargs = _pointwise.as_function(self.ops[node], node)
            args, kwargs = fx.node.map_arg((args, kwargs), copies.__getitem__)
            if self.ops[node].in_place and node.all_input_nodes[0] in run.inputs:
                # Another run may still read it: what the fused code does not overwrite this does not either.
                args = (graph.call_method("clone", args[:1]), *args[1:])
            copies[node] = graph.create_node(op, target, args, kwargs)
        graph.output(copies[run.nodes[-1]])
        return compiled(graph, has_self=False)


def compiled(graph: fx.Graph, has_self: bool = True) -> Callable:
    """The graph as a function of its placeholders, and of ``self`` first."""
    code = graph.python_code("self")
    # Without a module's name in its globals, TorchDynamo takes the globals as they are.
    scope = {k: v for k, v in code.globals.items() if k != "__name__"}
    source = code.src if has_self else code.src.replace("forward(self, ", "forward(", 1).replace("(self)", "()", 1)
    exec(compile(source, "<fused_act.fuse>", "exec"), scope)
    return scope["forward"]


def _is_pointwise(node: fx.Node) -> bool:
    """Whether PyTorch says so of the operation that a node calls by its name."""
    if node.op not in ("call_function", "call_method") or _pointwise._is_shape(node):
        return False
    packet = getattr(torch.ops.aten, _describe(node).strip("_"), None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in overloads)


def _describe(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _only_in_masks(root: Expr) -> set[fx.Node]:
    """Tensors that are compared and nothing else: no gradient goes to them, and in eager nothing depends on whether
    they require one."""
    valued = {e.node for e in walk(root, lambda e: not e.is_mask) if not e.step}
    return {leaf.node for leaf in leaves(root)} - valued


def _typed(root: Expr, main: fx.Node) -> list[fx.Node]:
    """Tensors that must have x's dtype, those of no dimensions too: what is compared, and what is computed of them
    before ``main`` is reached, eager computes in their own. And the weight of a PReLU, which it does not promote."""
    found: list[fx.Node] = []
    for e in walk(root):
        if not e.step:
            continue
        below = [leaf.node for leaf in leaves(e)]
        if e.is_mask:
            return [leaf.node for leaf in leaves(root)]
        if main not in below:
            found += below
        if e.step == "PRelu":
            found += [leaf.node for leaf in leaves(e.args[1])]
    return list(dict.fromkeys(found))


# Operators of the catalogue by their steps. Compiled, so faster than a program in half precision.
_NAMED = {op.steps: op.name for op in OPERATORS if op.steps}


def _named(steps: list[tuple]) -> str | None:
    """The operator of the catalogue that is exactly these steps."""
    sources = [source for _, source, _ in steps if source is not None]
    in_order = sources == [("operand", k) for k in range(len(sources))]
    return _NAMED.get(tuple(name for name, _, _ in steps)) if in_order else None


class _Call:
    """A call of the operator that computes some steps, its arguments in order: a node, a list of those, or a value."""

    def __init__(self, x: fx.Node, steps: list[tuple], operands: list[fx.Node], detached: set[fx.Node]) -> None:
        named = _named(steps)
        self.name = named or "chain"
        self.detached = detached
        if named:
            self.description = named
            self.arguments: list[Any] = [x]
            for _, source, scalars in steps:
                self.arguments += [operands[source[1]]] if source else scalars
            if operands:
                self.arguments.append(-1)  # dim, where one dimension broadcasts to
        else:
            self.description = f"chain({', '.join(_shown(steps))})"
            self.arguments = [x, operands, *encode(steps)]

    def source(self, k: int, names: dict[fx.Node, str], scope: dict[str, Any]) -> str:
        """The source, which finds the operator and the values in ``scope``."""
        scope[f"operator_{k}"] = getattr(torch.ops.fused_act, self.name).default
        given = []

        def tensor(node: fx.Node) -> str:
            return f"{names[node]}.detach()" if node in self.detached else names[node]

        for n, a in enumerate(self.arguments):
            if isinstance(a, fx.Node):
                given.append(tensor(a))
            elif n == 1 and self.name == "chain":
                given.append(f"[{', '.join(map(tensor, a))}]")
            else:
                scope[f"value_{k}_{n}"] = a
                given.append(f"value_{k}_{n}")
        return f"operator_{k}({', '.join(given)})"

    def open(self, inputs: list[fx.Node]) -> tuple[str, list[Any]]:
        """The operator's name and its arguments, with {k} for input k, frozenset({k}) where it is detached."""

        def place(a: Any) -> Any:
            if not isinstance(a, fx.Node):
                return a
            return (frozenset if a in self.detached else set)([inputs.index(a)])

        return self.name, [
            [place(o) for o in a] if n == 1 and self.name == "chain" else place(a) for n, a in enumerate(self.arguments)
        ]


def _shown(steps: list[tuple]) -> list[str]:
    return [name + (f"({', '.join(f'{s:g}' for s in scalars)})" if scalars else "") for name, _, scalars in steps]


def analyse(graph: fx.Graph, root: nn.Module, fold_batchnorm: bool = False) -> Analysis:
    """Replaces the runs of a graph by calls of one kernel each. The graph is changed."""
    return _Analyser(graph, root, fold_batchnorm).run()
