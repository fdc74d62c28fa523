"""What happens when a backward arrives at the outputs of a region: the forward is notified (`PendingForward`), and a
second forward computes gradients that the plan does not compute."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from memopt.capture.dynamo_graph import DIFFERENTIATED, TAKEN_WITHIN
from memopt.capture.inner_outputs import InnerOutputs, TensorKind, is_written, run_from
from memopt.capture.region import RecordedRegion
from memopt.compat.autograd import is_batched, keeps_graph, note_reached
from memopt.compat.host import device_among
from memopt.compat.tensors import storage_key
from memopt.errors import UnplannedGradientError
from memopt.run.on_demand import Later
from memopt.run.pending import PendingForward
from memopt.run.second_run import WeakInputs, as_before
from memopt.training_state import generators_before


class Replay:
    """Runs a second forward of one call, from the state in which the first one began (`forward.before`), for gradients
    that the plan does not compute. Hardly any work is done before one is needed.

    `weak` has the inputs of the region without keeping the caller's tensors alive. `prevented` says in words why a
    second forward cannot give the gradients, and is empty if it can. `only_read` has the positions of inputs that
    the region reads without autograd, so that they get no gradient. `noted` is called after gradients of outputs that
    the plan does not differentiate were computed; `forward` is notified of each second forward.
    """

    def __init__(
        self,
        region: RecordedRegion,
        inputs: Sequence[Any],
        weak: WeakInputs | None,
        forward: PendingForward,
        prevented: str,
        only_read: Collection[int],
        noted: Callable[[], None],
    ) -> None:
        self.region, self.forward, self.noted, self.before = region, forward, noted, forward.before
        tensors = {number: value for number, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        self.prevented, self._only_read = prevented, only_read
        self._inputs = None if prevented else weak
        self._present: Sequence[Any] = ()
        """The inputs, set when a second forward is about to run."""
        self._copies: Mapping[int, torch.Tensor] = {}
        """Copies of inputs from before the first forward, by the numbers of the inputs; set with `_present`."""
        differentiated = [one for number, one in tensors.items() if one.requires_grad and number not in only_read]
        self.leaves: Sequence[torch.Tensor] = () if prevented else differentiated
        """The region's inputs that require gradients; empty where there is no second forward."""
        self.device = device_among(list(tensors.values())) if self.before is None else self.before.device
        self.generators = generators_before(self.before, self.device)
        kind = self.device.type
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def release(self) -> None:
        """Free what the second forward needs, and drop the references to the model: a model that keeps an output keeps
        this object through the output's autograd node, and the two would form a reference cycle."""
        self._inputs, self._present, self.leaves, self._copies = None, (), (), {}
        for name in ("region", "forward", "noted", "before"):
            vars(self).pop(name, None)

    def gradients(self, of: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """The gradients of the inputs that require one, in the order of the inputs. `of` has the given gradients of
        outputs, by output position; None stands for an input from which none of these outputs is computed.

        Raises `UnplannedGradientError` where no second forward can give them."""
        shape = tuple(next(iter(of.values())).shape)
        what = f"a gradient flows into an output of shape {shape}, but the plan differentiates only the loss"
        self._check(what, mend := "optimise with outputs='all' to plan for the gradients of all outputs")
        leaves, outputs = self._second_forward(detach=True)
        found = _gradients_of(outputs, of, leaves)
        self.noted()
        self.forward.replayed()
        warnings.warn(
            f"{what}; that gradient is computed by a second run of the plain forward, in memory outside of the "
            f"budget, and from the next call on all outputs are planned for; {mend} from the first call on",
            stacklevel=2,
        )
        return found

    def derivatives(self, of: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """The gradients that `gradients` returns, with an autograd graph, so that they can be differentiated again.

        Raises `UnplannedGradientError` where no second forward can give them. Before the model's first optimizer step
        it also raises `BudgetError` where a plain forward does not fit the budget beside this one, and
        `UnplannedGradientError` where it is not known whether it fits."""
        leaves, outputs = self._differentiable()
        return _gradients_of(outputs, of, leaves, differentiable=True)

    def derivative_by(self, position: int, given: Mapping[int, torch.Tensor], own: torch.Tensor | None) -> torch.Tensor:
        """The gradient of the output at `position`, computed now by a second forward, with an autograd graph. `given`
        has the gradients of other outputs, by position; `own` is the gradient that the caller's code passes to that
        output itself, or None. Raises the errors of `derivatives`."""
        _, outputs = self._differentiable()
        (found,) = _gradients_of(outputs, given, [outputs[position]], differentiable=True)
        assert found is not None
        return found if own is None else found + own

    def _differentiable(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The leaves and the outputs of a second forward whose gradients can be differentiated again."""
        self.forward.check_differentiated(UnplannedGradientError(f"{DIFFERENTIATED}; {TAKEN_WITHIN}"))
        self._check(DIFFERENTIATED, TAKEN_WITHIN)
        found = self._second_forward(detach=False)
        self.forward.replaced()
        warnings.warn(
            f"{DIFFERENTIATED}: a second run of the plain forward computes them, in memory outside of the budget, in "
            f"each step that needs them; to avoid that, {TAKEN_WITHIN}",
            stacklevel=2,
        )
        return found

    def _second_forward(self, *, detach: bool) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Run the forward again; returns the inputs that require gradients, as `_arguments` made them, and the
        outputs."""
        arguments = self._arguments(require_grad=True, detach=detach)
        assert self.region.plain is not None
        with torch.enable_grad(), as_before(self.generators, self.device, self.autocast):
            outputs = self.region.plain(*arguments)
        return [one for one in arguments if isinstance(one, torch.Tensor) and one.requires_grad], outputs

    def gradient_by(
        self, position: int, kind: TensorKind, given: Mapping[int, torch.Tensor], own: torch.Tensor | None
    ) -> torch.Tensor:
        """The gradient of the output at `position`, a tensor of this kind that a second forward computes when the
        tensor is first read. `own` is the part that the caller's code passes to that output itself, or None; the rest
        flows to it through other outputs, whose gradients `given` has by position. Reading the tensor raises
        `UnplannedGradientError` where no second forward can give it."""
        strides = torch.empty(kind.shape, device="meta").stride()
        later = _InnerGradient(self, position, kind, given if own is None else {position: own, **given})
        return later.on_demand(0, kind.shape, strides, kind.dtype, kind.device)

    def gradient_at(self, position: int, kind: TensorKind, given: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The gradient of the output at `position`, computed now by a second forward; `given` has the gradients of
        outputs by position, this one's included. Raises `UnplannedGradientError` where no second forward can give
        it."""
        what = (
            "a hook, retain_grad() or torch.autograd.grad() reads the gradient of an output of shape "
            f"{tuple(kind.shape)}, from which the model computes other outputs; the plan does not have that gradient"
        )
        self._check(what, "return that output alone and compute the others from it outside of the model")
        region = self.region
        assert region.plain is not None
        # Gradients of parameters are needed only if the graph behind the output is.
        arguments = self._arguments(require_grad=region.takes_derivatives or is_written(region.plain, position))
        with torch.enable_grad(), as_before(self.generators, self.device, self.autocast):
            outputs, leaf = run_from(region.plain, position, arguments)
        (found,) = _gradients_of(outputs, given, [leaf])
        assert found is not None
        self.forward.replayed()
        warnings.warn(
            f"{what}; it is computed by a second run of the plain forward, in memory outside of the budget",
            stacklevel=2,
        )
        return found

    def _check(self, what: str, mend: str) -> None:
        if prevented := self.prevented or self._changed():
            raise UnplannedGradientError(f"{what}; a second forward cannot help, since {prevented}; {mend}")

    def _changed(self) -> str:
        """The reason why no second forward can run, as a text; empty if one can run."""
        if self._inputs is None:
            return "its forward was differentiated before without retain_graph=True"
        self._present = self._inputs.present(self.forward.held)
        copies = self.before.values.copies() if self.before else {}
        self._copies = {number: copies[id(one)] for number, one in enumerate(self._present) if id(one) in copies}
        if any(number not in self._copies for number in self.region.written):
            return "the forward writes to a large buffer or an input"
        if self._inputs.are_gone(self._present):
            return "an input of its forward was freed, which has to be held until the backward"
        changed = self._inputs.have_changed(self._present, but=self._copies)
        return "the weights or inputs have changed since its forward" if changed else ""

    def _arguments(self, require_grad: bool, *, detach: bool = True) -> list[Any]:
        """The inputs, with the values from before the first forward for those that it wrote to. Tensors that require
        gradients are detached from their graphs, and require gradients again if `require_grad`; without `detach` they
        are views, through which gradients flow on."""
        arguments = list(self._present)
        for number, value in enumerate(arguments):
            if number in self._only_read:
                arguments[number] = value.detach()
            elif isinstance(value, torch.Tensor) and value.requires_grad:
                arguments[number] = value.detach().requires_grad_(require_grad) if detach else value.view_as(value)
            elif (kept := self._copies.get(number)) is not None:
                arguments[number] = kept.clone()
        return arguments


def _gradients_of(
    outputs: Sequence[torch.Tensor],
    given: Mapping[int, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    *,
    differentiable: bool = False,
) -> Sequence[torch.Tensor | None]:
    """The gradients of `leaves`, given those of outputs, by position, which may have other dtypes than the outputs."""
    results = [outputs[position] for position in given]
    gradients = [gradient.to(result.dtype) for gradient, result in zip(given.values(), results, strict=True)]
    return torch.autograd.grad(results, leaves, gradients, allow_unused=True, create_graph=differentiable)


class _InnerGradient(Later):
    """The gradient of an output from which other outputs are computed."""

    def __init__(self, replay: Replay, position: int, kind: TensorKind, given: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.replay, self.position, self.kind, self.given = replay, position, kind, given

    def compute(self) -> None:
        self.hand_over([self.replay.gradient_at(self.position, self.kind, self.given).to(self.kind.dtype)])


def hand_out(
    outputs: Sequence[Any],
    forward: PendingForward,
    replay: Replay | None = None,
    others: Collection[int] = (),
    feeds: Mapping[int, frozenset[int]] | None = None,
) -> tuple[Any, ...]:
    """Return a region's outputs as its caller gets them, so that `forward` is notified when their backward begins.

    Outputs at the positions in `others`, which the region does not differentiate, require a gradient as in the plain
    model; if a gradient arrives at one, `replay` computes the gradients that follow from it. `feeds`, the result of
    `feeding`, has the outputs from which further outputs are computed. The captured backward lacks the part of their
    gradients that flows to them through those further outputs; `replay` computes it when such a gradient is read.
    Without `replay`, neither is possible, nor a backward with `create_graph=True`.
    """
    handed = dict(enumerate(outputs))
    handled = [at for at, value in handed.items() if isinstance(value, torch.Tensor) and value.requires_grad]
    leaves = () if replay is None else replay.leaves
    if handled:
        hand_out_all: Any = _HandOut.apply
        values = hand_out_all(forward, replay, handled, *[outputs[position] for position in handled], *leaves)
        handed.update(zip(handled, values, strict=True))
    if others:
        beside: Any = _Replayed.apply
        positions = sorted(others)
        leaves = leaves or [outputs[position] for position in handled[:1]]  # makes them require a gradient
        values = beside(replay, positions, *[outputs[position] for position in positions], *leaves)
        handed.update(zip(positions, values, strict=True))
    given = tuple(handed.values())
    if feeds and replay is not None:
        inner = InnerOutputs(given, feeds, replay)
        nodes: set[Any] = {value.grad_fn for value in given if isinstance(value, torch.Tensor)} - {None}
        for node in nodes:
            node.inner = inner
    return given


class _HandOut(torch.autograd.Function):
    """The identity between a region's outputs and the caller's autograd graph. From it, a backward goes on to the
    region; gradients with `create_graph=True` go past the region to the leaves of the second forward."""

    @staticmethod
    def forward(
        ctx: Any, forward: PendingForward, replay: Replay | None, positions: Sequence[int], *values: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.forward, ctx.replay, ctx.positions = forward, replay, positions
        ctx.past = (None,) * (len(values) - len(positions))
        # Detached, because autograd treats returned inputs as views and forbids `loss /= steps` on them. Where outputs
        # share memory it is to forbid that: the others' values would change, but not their gradients.
        outputs = values[: len(positions)]
        keys = list(map(storage_key, outputs))
        given = zip(outputs, keys, strict=True)
        return tuple([one.view_as(one) if keys.count(key) > 1 else one.detach() for one, key in given])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        _check_one_by_one(gradients)
        gradients = _through_hooks(ctx, gradients)
        if torch.is_grad_enabled():
            return None, None, None, *(None for _ in gradients), *_derivatives(ctx, gradients)
        edges = ctx.next_functions[: len(gradients)]
        note_reached([one for one in zip(edges, gradients, strict=True) if one[0][0] is not None])
        if ctx.forward is None:  # torch raises an error for a second backward after the first has freed the graph
            return None, None, None, *gradients, *ctx.past
        ctx.forward.before_backward(_leaves_behind(ctx), gradients)
        if not keeps_graph():
            ctx.forward.after_backward()
            # A model that keeps an output keeps this node, which must not keep the model alive.
            ctx.forward = ctx.inner = None
            if ctx.replay is not None:  # its own backward ran before this one, if at all
                ctx.replay.release()
        return None, None, None, *gradients, *ctx.past


class _Replayed(torch.autograd.Function):
    """The identity on outputs that a region does not differentiate. Made after `_HandOut`, so that a backward through
    both reaches this one first."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, positions: Sequence[int], *values: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.replay, ctx.positions, ctx.others = replay, positions, len(values) - len(positions)
        return tuple([value.detach() for value in values[: len(positions)]])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        _check_one_by_one(gradients)
        gradients = _through_hooks(ctx, gradients)
        if torch.is_grad_enabled():
            found = _derivatives(ctx, gradients)
        else:
            given = _given(ctx, gradients)
            found = ctx.replay.gradients(given) if given else [None] * ctx.others
        return None, None, *(None for _ in ctx.positions), *found


def _given(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """The gradients that are not None, by the positions of their outputs."""
    return {at: one for at, one in zip(ctx.positions, gradients, strict=True) if one is not None}


def _derivatives(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """The gradients of the leaves in a backward with `create_graph=True`. Raises `UnplannedGradientError` where no
    second forward can give them."""
    if ctx.replay is None:
        raise UnplannedGradientError(f"{DIFFERENTIATED}; {TAKEN_WITHIN}")
    return ctx.replay.derivatives(_given(ctx, gradients))


def _check_one_by_one(gradients: Sequence[torch.Tensor | None]) -> None:
    """Raise `UnplannedGradientError` in a backward that runs under torch.func.vmap."""
    if any(map(is_batched, gradients)):
        raise UnplannedGradientError(
            "a captured backward does not run for several gradients at once (is_grads_batched=True, vectorize=True, "
            "torch.func.vmap); ask for one after the other, or call memopt.remove(model)"
        )


def _through_hooks(ctx: Any, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """The gradients after the hooks of inner outputs have run."""
    inner = getattr(ctx, "inner", None)
    return gradients if inner is None else inner.arrived(ctx, gradients)


def _leaves_behind(hand_out: Any) -> list[torch.Tensor]:
    """The leaf tensors that the regions read whose outputs were returned by `hand_out`, the autograd node of a
    `_HandOut`."""
    regions = {edge for edge, _ in hand_out.next_functions[: len(hand_out.positions)] if edge is not None}
    edges = [edge for region in regions for edge, _ in region.next_functions]
    return [edge.variable for edge in edges if hasattr(edge, "variable")]
