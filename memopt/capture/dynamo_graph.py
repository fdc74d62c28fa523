"""Changes of Dynamo's graph of a region before it is traced, and notes on where the trace departs from eager mode.

The graph of a region whose code takes derivatives itself (forces, penalties, physics) is prepared for a backward that
differentiates these derivatives."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.dynamo import GraphBreak
from memopt.compat.fakes import unknown_numbers
from memopt.compat.fsdp import is_fully_sharded
from memopt.compat.host import is_on_host
from memopt.compat.operators import (
    SETS_GRAD_MODE,
    HigherOrderOperator,
    begins_transform,
    custom_function,
    requiring_grad,
    takes_derivative,
    tree_leaves,
)
from memopt.compat.symbols import fix_float, fixed_float, has_unknown_float
from memopt.compat.tensors import has_no_storage, is_sharded, storage_key, with_memory
from memopt.errors import CaptureError
from passes.compat import depends_on_data
from passes.graphs.node_facts import graph_results

AUTHOR_CHECKPOINT = "memopt_author_checkpoint"
"""The entry of `node.meta["custom"]` that marks what the author computes under `torch.utils.checkpoint`."""
_DRAWS = ("dropout", "bernoulli", "rand", "multinomial", "normal", "uniform")
"""Parts of the names of functions that draw random numbers."""


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether parameters of the model are split over ranks, or repeated on them, otherwise than by `fully_shard`."""
    return any(map(is_sharded, model.parameters())) and not is_fully_sharded(model)


def graphs_within(graph_module: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph module and those within it, such as blocks under `torch.utils.checkpoint`; outer ones come first."""
    return [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]


def nodes_within(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph and of all graphs within it."""
    return (node for inner in graphs_within(graph_module) for node in inner.graph.nodes)


def result_values(graph_module: fx.GraphModule) -> list[Any]:
    """The example values that Dynamo stored for the results of a graph; None for a result that is no node."""
    results = graph_results(graph_module.graph)
    return [node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in results]


def check_shards(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a recorded region reads parameters that are spread over ranks (`DTensor`).

    Raises `CaptureError` where an output, or an input that is no parameter, is a `DTensor`, and where random numbers
    are drawn for one on a GPU: there each rank gets other numbers in eager mode than the captured graph would draw."""
    spread = [value for value in inputs if isinstance(value, torch.Tensor) and is_sharded(value)]
    if not all(isinstance(value, nn.Parameter) for value in spread):
        raise CaptureError(
            "an input of the model, or one of its buffers, is a DTensor, but memopt plans only parameters as DTensors; "
            "give the model this rank's local tensor instead (its to_local())"
        )
    if any(isinstance(value, torch.Tensor) and is_sharded(value) for value in result_values(graph_module)):
        raise CaptureError(
            "the model returns a DTensor, as under loss_parallel or with use_local_output=False; have it return this "
            "rank's local tensor (to_local), or the whole one (full_tensor)"
        )
    drawing = next((node for node in graph_module.graph.nodes if _draws_shards(node)), None)
    if drawing is not None:
        raise CaptureError(
            f"{drawing.name} draws random numbers for a DTensor on a GPU, where a captured graph would draw others "
            "than eager mode; run dropout on this rank's local tensor (use_local_output=True)"
        )
    return bool(spread)


def _draws_shards(node: fx.Node) -> bool:
    """Whether a call draws random numbers for a value that is spread over ranks on a GPU."""
    value = node.meta.get("example_value")
    if node.op == "placeholder" or not isinstance(value, torch.Tensor) or not is_sharded(value):
        return False
    name = str(getattr(node.target, "__name__", node.target))
    return not is_on_host(value) and any(word in name for word in _DRAWS)


def inline_nested_regions(graph_module: fx.GraphModule) -> None:
    """Replace calls of nested regions (`torch.compiler.nested_compile_region`) by the operators in them, here and in
    the graphs of other higher-order operators.

    Edits the graph."""
    for inner in reversed(graphs_within(graph_module)):
        calls = [node for node in inner.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
        for call in calls:
            _inline(inner, call)
        if calls:
            inner.delete_all_unused_submodules()
            inner.recompile()


def _inline(graph_module: fx.GraphModule, call: fx.Node) -> None:
    """Replace one call by copies of the nodes in its region."""
    graph = graph_module.graph
    source, _, *operands = call.args
    assert isinstance(source, fx.Node)
    region: Any = graph_module.get_submodule(str(source.target))
    copies: dict[fx.Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                copies[node].target = _adopted(graph_module, region, str(node.target))
    results = graph_results(region.graph)
    for user in list(call.users):
        assert user.target is operator.getitem, (
            "a graph reads the tuple of a nested region's results otherwise than by element"
        )
        result = results[user.args[1]]  # type: ignore[index]
        user.replace_all_uses_with(copies[result] if isinstance(result, fx.Node) else result)
        graph.erase_node(user)
    graph.erase_node(call)
    if not source.users:
        graph.erase_node(source)


def _adopted(graph_module: fx.GraphModule, region: fx.GraphModule, name: str) -> str:
    """Give a graph module the attribute `name` of one of its regions, under a name that is free; returns that name."""
    value = getattr(region, name)
    number, free = 0, name
    while getattr(graph_module, free, value) is not value:
        number += 1
        free = f"{name}_{number}"
    setattr(graph_module, free, value)
    return free


def settle_numbers(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Replace inputs that are numbers by their values, where Dynamo has a guard on the value, or where operators of the
    graph need the value; in the second case a guard is added. Dynamo turns a number of the code into an input once it
    has changed since the model was recorded. To be called inside a Dynamo backend.

    Edits the graph. The tracer that runs later does not know the values, and would fail at a comparison with one."""
    if _inline_guarded(graph_module) and _needs_numbers(graph_module, inputs):
        for number in _inline_guarded(graph_module):
            fix_float(number)
        _inline_guarded(graph_module)


def _inline_guarded(graph_module: fx.GraphModule) -> list[torch.SymFloat]:
    """Replace each `item()` of a number input, and each product or the like of it, on whose value Dynamo has a guard.
    Returns the numbers that remain inputs."""
    left: list[torch.SymFloat] = []
    for inner in graphs_within(graph_module):
        changed = False
        for node in reversed(inner.graph.nodes):
            value = node.meta.get("example_value")
            is_input = node.target == "item" and node.args[0].op == "placeholder"
            if not (isinstance(value, torch.SymFloat) and (is_input or node.op == "call_function")):
                continue
            if (number := fixed_float(value)) is None:
                left += [value] * is_input
                continue
            node.replace_all_uses_with(number)
            inner.graph.erase_node(node)
            changed = True
        if changed:
            inner.recompile()
    return left


def _needs_numbers(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether operators of a region, or of its backward, compare a number among its inputs, or make sizes of it; found
    by a run on fake tensors."""
    try:
        with unknown_numbers(inputs) as fakes, torch.enable_grad():
            run = _WatchingSizes(graph_module)
            results = tree_leaves(run.run(*fakes))
            roots = [one.sum() for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
            leaves = [one for one in fakes if isinstance(one, torch.Tensor) and one.requires_grad]
            if roots and leaves:
                torch.autograd.grad(roots, leaves, allow_unused=True)
    except Exception as error:  # the trace that follows raises any other
        return depends_on_data(error)
    return run.sized


class _WatchingSizes(fx.Interpreter):
    """Runs a region and sets `sized` where the shape of a result depends on a number among the inputs."""

    sized = False

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.sized |= any(map(has_unknown_float, tree_leaves(result)))
        return result


_OUT_OF_PLACE = "its gates are computed out of place, which rounds in another way"

DEPARTURES: Mapping[str, str] = {
    "lstm": "it runs as the operators of its cells, while oneDNN's single operator sums in another order",
    "gru": _OUT_OF_PLACE,
    "gru_cell": _OUT_OF_PLACE,
    "prod": "eager mode has a shorter formula for its gradient where no factor is zero, and a trace never takes it",
    "masked_fill": "the gradient of its argument value, if that is a tensor, is summed in another order",
    "bernoulli_": "for a tensor that is not contiguous it draws random numbers in another order",
}
"""For each operator of torch, by name, why its traced form departs from eager mode."""

BITS_DEPART = "does not give the same bits as in eager mode"

BUFFERS_WRITTEN_ONCE = (
    "buffers that are written inside of torch.utils.checkpoint are written once a step; in eager mode the block runs "
    "again in the backward and writes them twice (running statistics of BatchNorm move twice as far)"
)

ATTRIBUTES_BEFORE_BLOCKS = (
    f"torch.utils.checkpoint {BITS_DEPART}: an attribute such as x.mT that the block reads from its input x is "
    "computed before the block, so that the gradients of x are summed in another order"
)

BETWEEN_REGIONS = (
    "gradients that pass from one region to another may round otherwise than in eager mode: a region takes them in "
    "contiguous memory, and sums over a tensor run in the order of its memory"
)


RETURNED_WITHOUT_GRADIENT = (
    "a value on which the code calls requires_grad_(), to differentiate by it, is returned or kept without its .grad"
)


def departures(graphs: Iterable[fx.GraphModule]) -> tuple[str, ...]:
    """Notes for the plan, one for each kind of operator in Dynamo's graphs that makes the loss or gradients differ from
    those of eager mode."""
    graphs = tuple(graphs)
    found = dict.fromkeys(_departing(node) for graph_module in graphs for node in nodes_within(graph_module))
    notes = tuple(f"{name} {BITS_DEPART}: {DEPARTURES[name]}" for name in found if name)
    notes += (ATTRIBUTES_BEFORE_BLOCKS,) * any(map(_takes_attributes_before_blocks, graphs))
    notes += (RETURNED_WITHOUT_GRADIENT,) * any(map(_returns_a_leaf, graphs))
    return notes + (BUFFERS_WRITTEN_ONCE,) * any(_writes(node) for graph in graphs for node in _checkpointed(graph))


def _returns_a_leaf(graph_module: fx.GraphModule) -> bool:
    """Whether a value that the code calls `requires_grad_()` on is returned."""
    results = graph_results(graph_module.graph)
    return any(node.target is requiring_grad and node.args[0] in results for node in nodes_within(graph_module))


def _departing(node: fx.Node) -> str:
    """The name in `DEPARTURES` of the operator that a node calls, where this call departs from eager mode; else ""."""
    name = _name(node)
    if name in ("masked_fill", "masked_fill_"):
        value = _tensor(node.kwargs.get("value", node.args[-1]))
        return "masked_fill" if value is not None and value.requires_grad else ""
    if name == "bernoulli_":
        value = _tensor(node.args[0])
        return name if value is not None and not value.is_contiguous() else ""
    return name if name in DEPARTURES else ""


def mark_checkpoints(graph_module: fx.GraphModule) -> None:
    """Set the entry `AUTHOR_CHECKPOINT` in the metadata of the nodes that the author runs under
    `torch.utils.checkpoint`; tracers copy it to everything traced from them."""
    for node in _checkpointed(graph_module):
        node.meta["custom"] = {**node.meta.get("custom", {}), AUTHOR_CHECKPOINT: True}


def _checkpointed(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of blocks under `torch.utils.checkpoint`."""
    calls = [node for node in nodes_within(graph_module) if _name(node) == "tag_activation_checkpoint"]
    blocks = (getattr(node.graph.owning_module, str(node.args[0].target)) for node in calls)  # type: ignore[union-attr]
    return (node for block in blocks if isinstance(block, fx.GraphModule) for node in nodes_within(block))


def _takes_attributes_before_blocks(graph_module: fx.GraphModule) -> bool:
    """Whether an attribute of a value with several uses is an input of a block under `torch.utils.checkpoint` and of
    nothing else: torch 2.13's Dynamo moves the attributes that a block takes out of it, torch 2.15's does not."""
    blocks = [node for node in nodes_within(graph_module) if _name(node) == "tag_activation_checkpoint"]
    inputs = [(block, value) for block in blocks for value in block.all_input_nodes if value.target is getattr]
    return any(set(value.users) == {block} and len(value.all_input_nodes[0].users) > 1 for block, value in inputs)


def _writes(node: fx.Node) -> bool:
    """Whether a call in Dynamo's graph writes to an input of the graph, as normalisation by batch statistics does."""
    if not node.op.startswith("call"):
        return False
    written = _storages(_written(node))
    to_inputs = bool(written) and not written.isdisjoint(_storages(node.graph.find_nodes(op="placeholder")))
    return to_inputs or _name(node) == "batch_norm" or _moves_statistics(node)


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call in Dynamo's graph writes to: the first ones where it returns no tensor, else those that
    it returns, if anything writes to them."""
    value, name = _tensor(node), _name(node)
    if value is None:
        written: list[fx.Node] = []
        if name == "setitem" or (name.endswith("_") and not name.endswith("__")):
            fx.map_arg(node.args[:1], written.append)
        return written
    return [one for one in node.all_input_nodes if _tensor(one) is value and value._version > 0]


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    values = [value for node in nodes if (value := _tensor(node)) is not None]
    return {storage_key(part) for part in with_memory(values) if not has_no_storage(part)}


def _moves_statistics(node: fx.Node) -> bool:
    """Whether a node is an instance norm with running statistics."""
    given = [*node.args[1:2], node.kwargs.get("running_mean")]
    return _name(node) == "instance_norm" and any(isinstance(value, fx.Node) for value in given)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _tensor(argument: object) -> torch.Tensor | None:
    value = argument.meta.get("example_value") if isinstance(argument, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


DIFFERENTIATED = "create_graph=True asks for gradients of gradients, which a captured backward does not have"
TAKEN_WITHIN = (
    "take the derivative in a loss_fn of (model, batch) that you give to optimize, or call memopt.remove(model)"
)


def takes_derivatives(graph_module: fx.GraphModule) -> bool:
    """Whether the code of a region takes derivatives itself, by `torch.autograd.grad` or a transform of torch.func."""
    return any(takes_derivative(node.target) for node in nodes_within(graph_module))


def prepare_derivatives(graph_module: fx.GraphModule) -> frozenset[int]:
    """Prepare a region's graph, whose code may take derivatives itself, to be differentiated; returns the numbers of
    the inputs that must require a gradient when the region runs, because its code calls `requires_grad_` on them.

    Edits the graph: calls of `requires_grad_` and of an `autograd.Function` are replaced. Raises `GraphBreak` where the
    graph would lose derivatives that the plain model computes."""
    derives = takes_derivatives(graph_module)
    found = _take_requires_grad(graph_module, derives=derives)
    if derives:
        _replace_functions(graph_module)
    return found


def forward_of(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """A function that runs the forward of a region, to be called with gradients disabled. The function enables
    gradients where the region's own code takes derivatives."""
    return torch.enable_grad()(graph_module.forward) if takes_derivatives(graph_module) else graph_module.forward


def _take_requires_grad(graph_module: fx.GraphModule, *, derives: bool) -> frozenset[int]:
    """Remove the calls of `value.requires_grad_()` whose results nothing reads; returns the numbers of the inputs that
    have such calls.

    Where the value is an input, operators before the call read it detached. Where it is an intermediate value and
    `derives` says that the region takes derivatives itself, operators after the call read a leaf in its place;
    otherwise no gradient of a parameter depends on the call.

    Raises `GraphBreak` where the region returns an intermediate value, since its `.grad` can be read after the
    backward. If the code itself takes the derivative by that value, it is returned as it was before the call instead.
    """
    inputs = graph_module.graph.find_nodes(op="placeholder")
    found: set[int] = set()
    for inner in graphs_within(graph_module):
        graph = inner.graph
        calls = [node for node in graph.find_nodes(op="call_method", target="requires_grad_") if not node.users]
        returned = set(graph.output_node().all_input_nodes)
        for call in calls:
            value: Any = call.args[0]
            nodes = list(graph.nodes)
            at = nodes.index(call)
            if value in inputs:
                found.add(inputs.index(value))
                _read_apart(value, torch.detach, [node for node in nodes[:at] if node in value.users])
            elif value in returned and not any(user.target is torch.autograd.grad for user in value.users):
                raise GraphBreak(
                    "the model returns or keeps a value on which it has called requires_grad_(); return a value "
                    "computed from it instead"
                )
            elif derives:
                users = [node for node in nodes[at + 1 :] if node in value.users and node.op != "output"]
                _read_apart(value, requiring_grad, users)
                value.meta["example_value"] = value.meta["example_value"].detach()
            graph.erase_node(call)
        if calls:
            inner.recompile()
    return frozenset(found)


def _read_apart(value: fx.Node, by: Callable[[torch.Tensor], torch.Tensor], users: Sequence[fx.Node]) -> None:
    """Have `users` of a value, which are in the order of the graph, read `by(value)` in its place."""
    if not users:
        return
    with value.graph.inserting_before(users[0]):
        apart = value.graph.call_function(by, (value,))
    apart.meta = {**value.meta, "example_value": by(value.meta["example_value"])}
    for user in users:
        user.replace_input_with(value, apart)


def _replace_functions(graph_module: fx.GraphModule) -> None:
    """Have each `autograd.Function` run such that its backward is differentiated again. Raises `GraphBreak` for one
    within a transform of torch.func, and for other operators that hold graphs: torch's derivatives of their derivatives
    are not known to be right."""
    nodes = [(inner, node) for inner in graphs_within(graph_module) for node in inner.graph.nodes]
    calls = [(inner, node) for inner, node in nodes if isinstance(node.target, HigherOrderOperator)]
    transforms = any(begins_transform(node.target) for _, node in nodes)
    for inner, call in calls:
        if call.target is torch.ops.higher_order.tag_activation_checkpoint:
            continue
        is_function = call.target is torch.ops.higher_order.autograd_function_apply
        name = "an autograd.Function" if is_function else str(call.target)
        if transforms or not is_function or not _can_run_again(inner, call):
            raise GraphBreak(f"the model takes second derivatives through {name}, which a captured graph would lose")
        forward, backward, *arguments = call.args
        for node in _grad_modes(_body(inner, backward)):
            node.graph.erase_node(node)
        _body(inner, backward).recompile()
        call.target = custom_function
        call.args = (forward, backward, call.kwargs["non_differentiable_idx"], *arguments)
        call.kwargs = {}
    for inner in {inner for inner, _ in calls}:
        inner.recompile()


def _body(inner: fx.GraphModule, node: Any) -> Any:
    """The graph module that a `get_attr` node of the graph module `inner` reads."""
    return inner.get_submodule(str(node.target))


def _grad_modes(body: fx.GraphModule) -> list[fx.Node]:
    return [node for node in body.graph.nodes if node.target is SETS_GRAD_MODE]


def _can_run_again(inner: fx.GraphModule, call: fx.Node) -> bool:
    """Whether an `autograd.Function` writes to none of its inputs, and its backward sets the grad mode only around all
    of it, as Dynamo does."""
    if "saved_for_backward_idx" not in call.kwargs or call.kwargs.get("dirty_idx"):
        return False
    modes = [node.args[0] for node in _grad_modes(_body(inner, call.args[1]))]
    return modes in ([], [False, True])
