"""The optimised models that train side by side on one device: what they will hold, and whose steps run while a forward
of another one waits for its backward."""

from __future__ import annotations

import weakref
from operator import attrgetter

import torch

from memopt.account.account import distinct_bytes
from memopt.compat.tensors import weak_storages
from memopt.errors import BudgetError
from memopt.run.entry import Entry, Waiting
from memopt.run.seen import Alone, AsPlain, Overlap, breadth

_TRAINS = 1024
"""A model no longer counts as trained once this many forwards have begun since its latest one."""
_GUESSED = 1.25
"""A model that was not called yet is guessed to need this many times as much as its `breadth` suggests."""
_MARGIN = 64
"""A budget that is named for the steps of several models is raised by its bytes divided by this."""


class ModelsOnDevice:
    """The optimised models on one device, each with its `Entry`. The base of `Ledger`, which counts everything on the
    device."""

    def __init__(self) -> None:
        self.entries: weakref.WeakSet[Entry] = weakref.WeakSet()

    def others_training(self, entry: Entry) -> list[Entry]:
        """The entries of other optimised models on the device that are being trained, one for each model. Empty where
        the user gave a fixed number of bytes that are no part of the step (`elsewhere_gb`)."""
        found: dict[int, Entry] = {}
        if len(self.entries) == 1 or entry.fixed_bytes is not None:
            return []
        latest = max(other.number for other in self.entries)
        for other in self.entries:
            trains = not other.number or latest - other.number <= _TRAINS
            if other.optimised and trains and other.model is not entry.model:
                before = found.get(id(other.model))
                found[id(other.model)] = other if before is None or other.number > before.number else before
        return list(found.values())

    def lasting(self, entry: Entry) -> tuple[int, list[torch.Tensor]]:
        """The bytes of gradients and optimizer states that other optimised models hold or will hold from step to step,
        without what they share with this model; and the list of such tensors that exist now. Both include the
        gradients of parameters that this model's optimizer steps although they belong to no model."""
        others, beside = self.others_training(entry), () if entry.fixed_bytes is not None else entry.stepped_beside()
        if not others and not beside:
            return 0, []
        steppers = [entry.optimizer]
        if beside and others:
            theirs = {id(parameter) for other in others for parameter in other.model.parameters()}
            beside = tuple(one for one in beside if id(one) not in theirs)
        nbytes, now = distinct_bytes(beside), [one.grad for one in beside if one.grad is not None]
        for other in others:
            nbytes += other.gradients_expected(entry)
            now += other.gradients_now(entry)
            if not isinstance(other.optimizer, torch.optim.Optimizer) or other.optimizer not in steppers:
                nbytes += other.state_expected()
                now += other.state_now()
            steppers.append(other.optimizer)
        return max(nbytes, sum([tensor.nbytes for tensor in now])), now

    def begins(self, forward: Waiting) -> None:
        """Record that a forward begins while forwards of other models wait for their backward."""
        if len(self.entries) == 1:
            return
        waiting = [one for one in self._waiting() if one is not forward]
        for position, other in enumerate(waiting):
            if other.entry.model is not forward.entry.model:
                between = [one for one in waiting[position + 1 :] if one.entry.model is not other.entry.model]
                other.overlaps.add(
                    Overlap(tuple(weakref.ref(one.entry) for one in between), weakref.ref(forward.entry))
                )

    def backward_begins(self, forward: Waiting) -> None:
        """Record that the backward of a forward begins: which steps of other models ran since the forward, and which of
        their forwards still wait."""
        later = self.begun_since(forward)
        for other in later:
            other.overlaps.add(Overlap((), weakref.ref(forward.entry), begun_before=True))
        entry = forward.entry
        entry.seen_meanwhile.append(frozenset(forward.overlaps))
        entry.seen_later.append(Overlap(tuple(weakref.ref(other.entry) for other in later)))
        entry.seen_models.update(other.model for other in self.others_training(entry))

    def begun_since(self, forward: Waiting) -> list[Waiting]:
        """The waiting forwards of other models that began after `forward`."""
        if len(self.entries) == 1:
            return []
        waiting = [other for other in self._waiting() if other.entry.model is not forward.entry.model]
        return [other for other in waiting if other.number > forward.number]

    def knows(self, entry: Entry) -> bool:
        """Whether a backward of this model has shown for each other model whether the other runs between this model's
        forward and backward."""
        return all(other.model in entry.seen_models for other in self.others_training(entry))

    def wanted(self, entry: Entry) -> tuple[int, float]:
        """The bytes that steps of other models need between the forward and the backward of this model, with nothing
        recomputed. The second number stands for models that were not called yet, whose bytes are unknown: the sum of
        their `breadth`s divided by this model's. If it is known which models run in between (`knows`), only those
        count, and the second number is 0; else all other models count."""
        if self.knows(entry):
            return max((overlap.held_bytes(least=False) for overlap in entry.overlaps), default=0), 0.0
        needs = [(other, other.step_bytes) for other in self.others_training(entry)]
        wanted = sum(one.peak for _, one in needs if one is not None)
        return wanted, sum(breadth(other.model) for other, one in needs if one is None) / breadth(entry.model)

    def intervening_backward_bytes(self, entry: Entry) -> int:
        """The bytes that the backward of another model needs beyond what its forward holds, where one was seen to run
        between the forward and the backward of this model; 0 where none was."""
        before = [overlap.runs() for overlap in entry.overlaps if overlap.begun_before and overlap.runs]
        found = [(other, one) for other in self.entries if other in before for one in other.waiting()]
        return max((other.peak_above_lasting(one.plan) - one.held_bytes for other, one in found), default=0)

    def goes_on(self, entry: Entry) -> bool:
        """Whether a step of a model that exceeds its budget runs nevertheless, with a warning. Two things must hold: a
        parameter was updated before (`Entry.stepped`); and either forwards were seen to differ in their number of
        operators, or gradients of any model on the device were differentiated (`create_graph=True`), so that the first
        step does not show what later ones need."""
        return entry.stepped and (entry.paths_vary or any(one.differentiated for one in self.entries))

    def _waiting(self) -> list[Waiting]:
        """The forwards of all models that wait for their backward, in the order in which they began."""
        return sorted([one for entry in self.entries for one in entry.all_waiting()], key=attrgetter("number"))

    def for_whole_step(self, entry: Entry, refused: BudgetError, plain: AsPlain = lambda _: None) -> BudgetError:
        """The error to raise for a call in place of `refused`: it names a budget in which the steps of the other
        optimised models fit too, at the same time.

        Each of these steps counts as by its plan that holds least, or is guessed where it has no plan yet. Models whose
        backward has run before, and that hold nothing now, are left out, as their steps run at another time; `refused`
        is returned if no other model is left. `plain` takes a budget and returns what the call holds without a plan;
        where it returns something, no larger budget is named than all steps need with nothing recomputed."""
        others = [other for other in self.others_training(entry) if other.held_bytes or not other.trained]
        if not others:
            return refused
        own = entry.step_bytes
        lasting = entry.gradients_expected() + entry.state_expected()
        lasting += distinct_bytes((*entry.model.parameters(), *entry.model.buffers()))
        elsewhere = entry.found.other + self.lasting(entry)[0]
        peak = own.least_peak if own else max(0, refused.smallest_bytes - lasting - elsewhere)
        further = sum(
            max(0, needs.least_peak - other.held_bytes)
            if (needs := other.step_bytes)
            else int(_GUESSED * peak * breadth(other.model) / breadth(entry.model))
            for other in others
        )
        works = self.with_margin(refused.smallest_bytes + further)
        if (alone := plain(works)) is not None:
            least = refused.smallest_bytes + entry.notable_bytes  # less appears without being noticed
            works = min(works, max(least, self._nothing_recomputed(entry, others, alone)))
        names = ", ".join(type(other.model).__name__ for other in others)
        reason = f"{refused.dominated_by}, and for the steps of {len(others)} more optimised models ({names})"
        return BudgetError(refused.budget_bytes, works, reason, least=False, further=refused.notes, ways=refused.ways)

    def with_margin(self, nbytes: int) -> int:
        """The budget to name for the steps of several models that were counted to need `nbytes`: these and a margin."""
        return nbytes + nbytes // _MARGIN

    def _nothing_recomputed(self, entry: Entry, others: list[Entry], alone: Alone) -> int:
        """The smallest budget for the steps of all optimised models with nothing recomputed. It has room for the
        forwards that wait now and, in addition, for the larger of the call's own peak and the peak of another model's
        step while the call waits. Models without a plan yet are guessed by their breadth. `alone` is the call as it
        runs plain."""
        waiting, peak = 0, alone.peak_bytes
        for other in others:
            needs = other.step_bytes
            if needs is None:
                peak = max(peak, alone.held_bytes + int(alone.peak_bytes * breadth(other.model) / breadth(entry.model)))
                continue
            own = needs.peak
            if other.held_bytes:  # the bytes that it holds now are in the call's budget already
                waiting += max(0, needs.held - other.held_bytes)
                own -= needs.held
            peak = max(peak, alone.held_bytes + own)
        return alone.budget_bytes - alone.peak_bytes + peak + waiting

    def addresses(self, entry: Entry) -> frozenset[int]:
        """The addresses of storages that are counted already: those saved by waiting planned forwards of all models
        (without inputs, parameters and buffers); the outputs of all waiting forwards and of this model's latest
        forward; and gradients and optimizer states of other models."""
        forwards = [forward for one in self.entries for forward in one.waiting()]
        outputs = [*(one.outputs for one in forwards), *(one.outputs for of in self.entries for one in of.plain)]
        returned = [storage.address for storages in outputs for storage in storages]
        models = {id(forward.entry.model): forward.entry.model for forward in forwards}.values()
        lying = weak_storages(tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
        left_out = {storage.address for storage in (*lying, *(one for forward in forwards for one in forward.given))}
        held = weak_storages(tensor for forward in forwards for tensor in forward.held())
        saved = [storage for storage in held if storage.address not in left_out]
        lasting = weak_storages(self.lasting(entry)[1])
        return frozenset((*returned, *(storage.address for storage in (*saved, *lasting, *entry.latest_outputs))))
