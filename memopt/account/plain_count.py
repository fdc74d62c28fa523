"""Counts what a step of the plain model holds, by running its forward and backward once without computing them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from memopt.account.account import distinct_bytes
from memopt.account.eager_bytes import (
    EagerBytes,
    RealBytes,
    TensorsTooLarge,
    UncomputedBytes,
    ValueIsRead,
    WorkspaceUnknown,
)
from memopt.capture.dry_run import without_gradients
from memopt.capture.inputs import Call, fake_call, replaced_tensors, tensors_in
from memopt.compat.autograd import (
    FREED,
    Retention,
    depends_on_earlier,
    forget_stopped_backward,
    gradients_kept,
    leaves_of,
    next_node_number,
    not_on_the_way_to,
)
from memopt.compat.fakes import DEPENDS_ON_VALUES, FakeTensorMode, failing_on_fakes, to_fake
from memopt.compat.hooks import has_hooks
from memopt.compat.host import is_on_host, reads_raise, reads_seen, same_memory
from memopt.compat.modules import forward_hook_tables, without_backward_hooks
from memopt.compat.operators import tree_leaves
from memopt.compat.saved_tensors import unseen_by_hooks
from memopt.compat.tensors import is_wrapper, special_kind
from memopt.compat.true_results import correct_strides
from memopt.device import Hardware
from memopt.device.devices import device_here, device_of
from memopt.device.op_call import OpCall
from memopt.device.workspace import call_workspace_bytes
from memopt.saved_values import draws_so_far, values_restored
from memopt.training_state import replaced_parameters, undone, undone_but_parameters

Run: TypeAlias = Callable[..., Any]
"""The forward of a model and its loss."""
READS_MARGIN = 4
"""A step whose code reads values is counted without computing it only if this many times its peak would fit."""
LEFT_OUT_MARGIN = 2
"""A step with kernels that make more bytes than their fake results have, such as those of recurrent layers, is counted
on values only if this many times what is known of it would fit: one such kernel may hold more than all that is left."""

_MOST_RUNS = 24
"""The most runs of a step that is counted on values: one, and one more for each kernel that must be measured first."""


@dataclass(frozen=True)
class PlainStep:
    """The bytes that forward and backward of the plain model hold beyond what is resident: parameters, buffers, inputs,
    optimizer state, and gradients that existed before."""

    peak_bytes: int
    held_bytes: int
    """Held when the forward ends: saved activations and outputs."""
    output_bytes: int
    forward_bytes: int = 0
    """The most held at once within the forward."""
    is_bound: bool = False
    """Whether the workspaces of its kernels are upper bounds, which may be far above what the kernels take."""
    depends_on_values: bool = False
    """Whether other values of the same sizes may hold more, as where the code branches on values."""
    on_values: bool = False
    """Whether it was counted on one batch's values."""
    tangent_bytes: int = 0
    """The gradients with which its backward begins where the loss is outside of the model; 0 where it is inside."""
    reached: frozenset[int] = frozenset()
    """The `id`s of the parameters that have a gradient after its backward, or would after one from other outputs."""
    sparse_bytes: int = 0
    """The bytes by which sparse gradients, such as those of an embedding with `sparse=True`, exceed their parameters:
    they have a row for each time that a row of the parameter was read."""
    calls: Mapping[OpCall, int] = field(default_factory=dict, compare=False, repr=False)
    """How often each kernel runs."""
    graph: Retention = FREED
    """The part of the autograd graph that the step's backward passes, all but the last, keep in memory."""
    derived_bytes: int = 0
    """Held when the last backward begins, where gradients have a graph of their own (`Retention.derived`); else 0."""
    before_last_bytes: int = 0
    """The most held before the last backward begins."""
    nodes: int = 0
    """The number of autograd nodes that its forward makes."""
    draws: bool = False
    """Whether its forward draws random numbers of Python's or numpy's, which may choose the operators that run."""


def count_plain_step(
    model: nn.Module,
    run: Run,
    call: Call,
    card: Hardware,
    *,
    gradients_held: bool,
    most_bytes: float = math.inf,
    graph: Retention = FREED,
    closely: bool = False,
) -> PlainStep | None:
    """Count one step of `run`, the forward of `model` and its loss, without computing it; the model does not change.
    `gradients_held`: the parameters have gradients when the step begins. `graph`: if it is kept (`retain_graph`), the
    backward runs twice; if gradients have graphs of their own (`create_graph`), the last backward is that of the loss
    plus the squares of all gradients. `closely`: kernels whose workspace would be the step's peak are measured, which
    takes longer; else only where their upper bounds exceed `most_bytes`.

    None where the step holds more than `most_bytes`, at which counting stops, or where its bytes cannot be known: `run`
    returns no scalar that requires a gradient, the backward goes on into an earlier graph, or user hooks would see
    tensors without values (forward hooks of modules, backward hooks of leaves that are no parameters of the model).
    Raises `ValueIsRead` where the code branches on values."""
    if not all(_is_of_a_library(hook) for table in forward_hook_tables(model.modules()) for hook in table.values()):
        return None
    how: Any = {"gradients_held": gradients_held, "most_bytes": most_bytes, "graph": graph}
    with torch.enable_grad(), undone_but_parameters(model), without_backward_hooks(model):
        if device_of(card).is_host and not closely:
            try:
                step = _count_uncomputed(model, run, call, **how)
            except TensorsTooLarge:
                return None
            if step is not None:
                return step
        return _count_on_fakes(model, run, call, card, **how)


def _count_uncomputed(
    model: nn.Module, run: Run, call: Call, *, gradients_held: bool, most_bytes: float, graph: Retention = FREED
) -> PlainStep | None:
    """As `count_plain_step`, on tensors whose values are not computed. None where fakes may tell more: where an
    operator cannot be counted so, where only the upper bound of a workspace exceeds `most_bytes`, or where the code
    reads values and the step is not far below `most_bytes`. Raises `TensorsTooLarge` where the tensors of the step
    alone hold more than `most_bytes`."""
    count = UncomputedBytes(most_bytes)
    if not all(map(_is_plain, [*model.parameters(), *model.buffers(), *tensors_in(call)])):
        return None
    try:
        with replaced_parameters(model, same_memory) as parts, reads_raise(ValueIsRead):
            if gradients_held:
                for tensor, part in parts.items():
                    part.grad = tensor.grad
            args, kwargs = replaced_tensors(call, count.stand_in)
            step = _counted(count, parts, tree_leaves((args, kwargs)), lambda: run(*args, **kwargs), graph)
    except TensorsTooLarge:
        if count.reads and any(tensor.is_meta for tensor in tensors_in(call)):
            return None
        raise
    except Exception:  # of any kind: fakes may work
        return None
    finally:
        torch.clear_autocast_cache()
    step = step and replace(step, is_bound=True)
    if step is None or not count.reads:
        return step
    return replace(step, depends_on_values=True) if READS_MARGIN * step.peak_bytes <= most_bytes else None


def _count_on_fakes(
    model: nn.Module, run: Run, call: Call, card: Hardware, *, gradients_held: bool, most_bytes: float, graph: Retention
) -> PlainStep | None:
    """As `count_plain_step`, on fakes on the model's device; for one on "meta" on that which would run it here."""
    home = next(model.parameters()).device
    home = device_here() if home.type == "meta" else home
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    correct_strides(mode)
    try:
        with replaced_parameters(model, lambda tensor: to_fake(mode, tensor, home)) as fakes:
            args, kwargs = fake_call(call, mode, home)
            if gradients_held:
                for fake in fakes.values():
                    fake.grad = torch.empty_like(fake) if fake.requires_grad else None
            count = EagerBytes(card.device_type, home.type, stand_ins=False, most_bytes=most_bytes)
            with mode, failing_on_fakes():
                step = _counted(count, fakes, tree_leaves((args, kwargs)), lambda: run(*args, **kwargs), graph)
            if step is None or not (count.left_out or count.sparse_gradients):
                return step
            if count.left_out and LEFT_OUT_MARGIN * step.peak_bytes > most_bytes:
                return None
            raise ValueIsRead  # its values tell what such kernels make
    except ValueIsRead:
        raise
    except DEPENDS_ON_VALUES:
        raise ValueIsRead from None
    except Exception:  # of any kind: the real call raises it, or the call can be planned nevertheless
        return None
    finally:
        torch.clear_autocast_cache()


def count_on_values(
    model: nn.Module,
    run: Run,
    call: Call,
    card: Hardware,
    most_bytes: int,
    *,
    graph: Retention = FREED,
    checkpoints: bool = False,
) -> PlainStep | None:
    """Count one step on the values of the call, for code that branches on values. What the step changes in the model,
    its gradients, the inputs and the random generators is undone. The user's backward hooks are not called. `graph` is
    as for `count_plain_step`. `checkpoints`: modules run a second time in the backward. The result is then None if the
    forward makes leaf tensors that require gradients, since the second run makes others.

    None where the step holds more than `most_bytes`, at which the run stops, where it cannot run, or where its backward
    would reach leaf tensors other than the model's parameters and the inputs. Where the workspace of a kernel decides
    whether an operator may run, it is measured after all tensors of the step are freed, and the step is run again."""
    for _ in range(_MOST_RUNS):
        unknown = None
        try:
            return _count_once(model, run, call, card, most_bytes, graph=graph, checkpoints=checkpoints)
        except WorkspaceUnknown as raised:
            (unknown,) = raised.args
        except Exception:  # of any kind: the real call raises it
            return None
        finally:
            torch.clear_autocast_cache()
            forget_stopped_backward()
        call_workspace_bytes(unknown, card.device_type)  # outside of the handler, whose frames hold the step's tensors
    return None


def _count_once(
    model: nn.Module, run: Run, call: Call, card: Hardware, most_bytes: int, *, graph: Retention, checkpoints: bool
) -> PlainStep | None:
    home = next(model.parameters()).device
    args, kwargs = replaced_tensors(call, lambda one: one.clone() if is_wrapper(one) else same_memory(one))
    count = RealBytes(card.device_type, home.type, most_bytes=most_bytes)
    with (
        torch.enable_grad(),
        undone(model),
        values_restored(tensors_in(call)),
        without_gradients(model),
        without_backward_hooks(model),
        reads_seen(count.note_read),
    ):
        own = {tensor: tensor for tensor in (*model.parameters(), *model.buffers())}
        leaves = tree_leaves((args, kwargs))
        step = _counted(
            count, own, leaves, lambda: run(*args, **kwargs), graph, others_too=False, made_too=not checkpoints
        )
    count.measure()
    found: Any = {"depends_on_values": count.depends_on_values, "on_values": True}
    return step and replace(step, peak_bytes=count.peak_bytes, **found)


def _counted(
    count: EagerBytes,
    own: Mapping[torch.Tensor, torch.Tensor],
    inputs: list[Any],
    run: Callable[[], Any],
    graph: Retention,
    *,
    others_too: bool = True,
    made_too: bool = True,
) -> PlainStep | None:
    """Count a forward and its backward. The backward begins at the scalars that the forward returns, and at those of
    its other outputs that no scalar was computed from, with gradients that a loss outside would give. `own` maps the
    model's parameters and buffers to what stands for each.

    None where no output requires a gradient, and where the backward would change what is not the step's own: a graph
    that was there before, or leaves that are neither in `own` nor in `inputs`. `others_too` permits such leaves without
    hooks, `made_too` those that the forward makes."""
    tensors = [value for value in (*own.values(), *inputs) if isinstance(value, torch.Tensor)]
    first, drawn = next_node_number(), draws_so_far()
    with count, unseen_by_hooks():
        count.exclude(tensors)
        outputs = run()
        nodes, draws = next_node_number() - first, draws_so_far() != drawn
        differentiable = [
            leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        losses = [leaf for leaf in differentiable if leaf.dim() == 0]
        losses += not_on_the_way_to(losses, differentiable) if losses else differentiable
        if not losses or depends_on_earlier(losses, first):
            return None
        known = set(map(id, tensors))
        others = [leaf for leaf in leaves_of(losses) if id(leaf) not in known]
        others = [leaf for leaf in others if not (made_too and count.has_counted(leaf))]
        if others and (not others_too or any(map(has_hooks, others))):
            return None
        held, in_forward = count.live_bytes, count.peak_bytes
        with gradients_kept(losses):
            given, squares = [torch.ones_like(loss) if loss.dim() else None for loss in losses], []
            if graph.kept:
                torch.autograd.backward(losses, given, retain_graph=True)
            if graph.derived:
                others_own = {id(part) for one, part in own.items() if id(one) not in graph.parameters}
                known_leaves = [leaf for leaf in leaves_of(losses) if id(leaf) in known]
                by = [leaf for leaf in known_leaves if id(leaf) not in others_own] or known_leaves
                gradients = _derived(losses, given, by, graph.derived)
                squares = [one.square().sum() for one in gradients]
            derived, before_last = count.live_bytes if squares else 0, count.peak_bytes
            torch.autograd.backward([*losses, *squares], [*given, *(None for _ in squares)])
            sparse = [(one, one.grad) for one in own.values() if one.grad is not None and one.grad.is_sparse]
            excess = sum(max(0, distinct_bytes([gradient]) - one.nbytes) for one, gradient in sparse)
    ends = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    leaves = set(map(id, leaves_of(ends)))
    reached = [id(one) for one, part in own.items() if id(part) in leaves or part.grad is not None]
    tangents = _bytes_of([loss for loss in losses if loss.dim()])
    found = PlainStep(count.peak_bytes, held, _bytes_of(outputs), reached=frozenset(reached), graph=graph)
    before: Any = {"forward_bytes": in_forward, "derived_bytes": derived, "before_last_bytes": before_last}
    of_gradients: Any = {"tangent_bytes": tangents, "sparse_bytes": excess}
    return replace(found, **before, **of_gradients, calls=count.calls, nodes=nodes, draws=draws)


def _derived(
    losses: Sequence[torch.Tensor], given: Sequence[Any], by: Sequence[torch.Tensor], times: Sequence[int]
) -> list[torch.Tensor]:
    """Gradients with an autograd graph of their own (`create_graph=True`): those of `losses` with respect to `by`,
    computed `times[0]` times; then those of the latest gradients, `times[1]` times, and so on. `given` has the
    gradients of the losses, None for scalars."""
    found, starts, tangents = list[torch.Tensor](), losses, given
    for number in times:
        latest = list[torch.Tensor]()
        for _ in range(number):
            latest = [
                one
                for one in torch.autograd.grad(starts, by, tangents, create_graph=True, materialize_grads=True)
                if one.requires_grad
            ]
            found += latest
        if not latest:
            break
        starts, tangents = [one.sum() for one in latest], [None for _ in latest]
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of torch's own classes, and lies on the CPU or on "meta"."""
    own = type(tensor) in (torch.Tensor, nn.Parameter) and not special_kind(tensor)
    return own and (is_on_host(tensor) or tensor.is_meta)


def _is_of_a_library(hook: Callable[..., Any]) -> bool:
    """Whether a forward hook is of a library whose hooks keep nothing: transformers, peft, torch's parametrisations."""
    module = getattr(hook, "__module__", "")
    return module.partition(".")[0] in ("torch", "transformers", "peft")


def _bytes_of(outputs: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
