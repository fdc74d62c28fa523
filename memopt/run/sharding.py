"""Models whose parameters are sharded over ranks (`fully_shard`, `parallelize_module`): which of them can be planned,
how their ranks agree, and which blocks stay gathered."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import distributed, nn

from memopt.capture.captured_call import CapturedCall
from memopt.capture.dynamo_graph import is_tensor_parallel
from memopt.compat.exchanges import ALL, Resharding, settle_gloo
from memopt.compat.fsdp import is_fully_sharded, is_sharded_otherwise, sharding_in_words
from memopt.compat.modules import modules_of, parameters_in
from memopt.compat.tensors import is_sharded, ranks_of
from memopt.errors import BudgetError, CaptureError, RankError
from memopt.levers import DEFAULT_LEVERS
from memopt.levers.all import PLAIN
from memopt.lru import LruCache
from memopt.planning.plan import Plan
from memopt.planning.terms import ModelTerms
from memopt.run.executable import Executable
from memopt.run.ranks import Ranks


class Sharded:
    """The ranks over which `fully_shard` or `parallelize_module` has sharded a model's parameters; none for other
    models.

    Every forward exchanges parameters or activations, which all ranks have to do together. So each rank plans first, by
    itself, and the forward begins once all ranks have a plan that fits."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._ranks: Ranks | None = None
        self._open = self._settled = self._begun = False
        """Whether a forward is under way, whether all ranks have agreed to run it, and whether it has begun."""

    @property
    def there(self) -> bool:
        """Whether the model is sharded. Once it was, its parameters are not looked at again: within a forward they are
        unsharded."""
        if self._ranks is not None or not (distributed.is_available() and distributed.is_initialized()):
            return self._ranks is not None
        return any(map(is_sharded, parameters_in(modules_of(self.model))))

    @property
    def settled(self) -> bool:
        """Whether the ranks have agreed to run or to refuse the current forward, so that no rank may try it with
        another plan."""
        return self._open and self._settled

    @contextmanager
    def together(self, terms: Callable[[], Mapping[str, str]]) -> Iterator[None]:
        """A context for a forward, or for planning it earlier, that raises on all ranks if it raises on one of them
        before `begin` is called. The first such context checks that all ranks have the same `terms`."""
        if self._ranks is None:
            self._ranks = Ranks(next(ranks_of(value) for value in self.model.parameters() if is_sharded(value)))
            sharding = f"{sharding_in_words(self.model)}{placements_in_words(self.model)}"
            self._ranks.check_terms({**terms(), "the sharding": sharding})
            settle_gloo(self.model)
        self._open, self._settled, self._begun = True, False, False
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self._settled:  # other ranks may have gone on; they notice when this process ends
                raise
            failure = error
        finally:
            self._open = False
        if not self._settled:
            self._ranks.settle(failure)

    def agree(self, offer: Callable[[int], int]) -> None:
        """Wait until all ranks can begin the forward and have chosen the same number, for instance of blocks that stay
        gathered. `offer(most)` returns the number that this rank chooses, `most` at most; it is called again with the
        smallest number of all ranks until all choose the same. Raises the error of the first rank that cannot begin."""
        offered = offer(ALL)
        if not self._open or self._ranks is None:
            return
        while True:
            self._settled = True  # if this raises, it raises on all ranks
            least, most = self._ranks.settle(None, offered)
            if least == most:
                return
            self._settled = False
            offered = offer(least)

    def begin(self, exchanges: int = 0) -> None:
        """Called when the forward begins; waits until all ranks can begin it. `exchanges` is a digest of the
        collectives that its plan runs (`Emitted.exchanges`), 0 without a plan. Raises the error of the first rank that
        cannot begin, and `RankError` on all ranks where they would run different collectives."""
        if not self._open or self._ranks is None:
            return
        if self._begun:
            raise RankError(
                f"the forward of {type(self.model).__name__} runs another branch than when it was planned, which would "
                "need a new plan, but other ranks have gone on with this forward: run the same branch in each step"
            )
        if not self._settled:
            self._settled = True  # if this raises, it raises on all ranks
            least, most = self._ranks.settle(None, exchanges)
            if least != most:
                raise RankError(
                    f"the ranks would exchange values in different orders in the step of {type(self.model).__name__}, "
                    "and all of them stop; give all ranks batches of the same shapes"
                )
        self._begun = True


def check_sharding(model: nn.Module) -> None:
    """Raise `ValueError` for a model that is sharded by other means than `fully_shard` alone, or `parallelize_module`
    alone over a mesh of one dimension."""
    name = type(model).__name__
    # This import takes a second; a model sharded by it has imported it already.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            f"{name} is sharded by FullyShardedDataParallel, which memopt does not plan; shard it by "
            "torch.distributed.fsdp.fully_shard, and then call memopt.optimize"
        )
    if is_fully_sharded(model) and is_sharded_otherwise(model):
        raise ValueError(
            f"{name} is sharded by fully_shard and split by parallelize_module (tensor parallelism), which memopt does "
            "not plan together; use one of the two"
        )
    if is_tensor_parallel(model):
        check_placements(model)


Planned = Callable[[Plan | None], Executable]
"""Plans a forward in which those blocks stay gathered that `Keeping` has set when this is called. Its argument is the
plan that frees all blocks; None to make that plan."""

_MOST_PLANS = 64
_TRIES = 3
"""The number of counts of kept blocks that are tried besides 0: each needs a capture and a plan."""


class Keeping:
    """Decides for each planned forward how many of the last FSDP2 blocks it keeps: their parameters then stay gathered
    from their forward to their backward, which saves a gather for each of them.

    Every rank plans with all blocks freed after their forward, then keeps as many as fit into the bytes that this plan
    leaves free, if that adds no recomputation. All ranks use the smallest of these numbers, since their gathers must
    match."""

    def __init__(self, resharding: Resharding, sharded: Sharded) -> None:
        self.resharding, self.sharded = resharding, sharded
        self._found: LruCache[tuple[Executable, int], int] = LruCache(_MOST_PLANS)
        """The chosen numbers of blocks, by the plan that frees all blocks and the largest number allowed."""

        self.freed: CapturedCall | None = None
        """The capture of the latest call with all blocks freed."""

    @property
    def kept(self) -> tuple[tuple[str, int], ...]:
        """The path and the bytes of each block that stays gathered at present."""
        return self.resharding.in_use

    def decide(self, planned: Planned) -> None:
        """Decide which blocks the forward that begins now keeps gathered, the same on all ranks. `planned` is called
        for each choice of blocks that is tried, after that choice was set, and plans the forward with it.

        Raises on all ranks the `BudgetError` of a rank whose forward does not fit with all blocks freed."""
        if self.sharded.there:
            self.sharded.agree(lambda most: self._choose(planned, most))

    def _choose(self, planned: Planned, most: int) -> int:
        """Set, and return, the number of last blocks whose parameters this rank keeps gathered until their backward. It
        is the largest one found, at most `most`, with which the plan that `planned` makes fits and recomputes no longer
        than with all blocks freed."""
        self.resharding.keep(0)
        freed = planned(None)
        self.freed = freed.captured
        most = min(most, len(self.resharding.blocks))
        if (freed, most) not in self._found:
            self._found[freed, most] = self._search(planned, freed.plan, most)
        self.resharding.keep(self._found[freed, most])
        return self.resharding.count

    def _search(self, planned: Planned, freed: Plan, most: int) -> int:
        """The largest number of blocks found with which the forward fits and recomputes no longer than `freed`."""
        # One more than there is room for: it is not gathered at the same time as the block before it in the backward.
        room_bytes = freed.budget_bytes - freed.ceiling_bytes
        gathered = accumulate(block.gathered_bytes for block in reversed(self.resharding.blocks))
        first = min(most, sum(nbytes <= room_bytes for nbytes in gathered) + 1)
        for count in range(first, max(0, first - _TRIES), -1):
            self.resharding.keep(count)
            try:
                plan = planned(freed).plan
            except BudgetError:
                continue
            if plan.added_seconds <= freed.added_seconds:
                return count
        return 0


def placements_in_words(model: nn.Module) -> str:
    """A text that is equal on two ranks exactly if tensor parallelism splits their models alike; "" for other
    models."""
    if not is_tensor_parallel(model):
        return ""
    split: list[tuple[str, Any]] = [(name, value) for name, value in model.named_parameters() if is_sharded(value)]
    facts = [(name, str(value.placements), tuple(value.shape)) for name, value in split]
    return f"{len(split)} split parameters ({hashlib.sha256(repr(facts).encode()).hexdigest()[:8]})"


def check_placements(model: nn.Module) -> None:
    """Raise `ValueError` for a model whose tensor parallelism uses a mesh of several dimensions, or different ranks for
    different parameters, or that is still on the device "meta"."""
    name = type(model).__name__
    split: list[Any] = [value for value in model.parameters() if is_sharded(value)]
    if any(value.device_mesh.ndim > 1 for value in split):
        raise ValueError(
            f"{name} is split over a device mesh of several dimensions, of which memopt plans one; give "
            "parallelize_module a mesh of one dimension, such as mesh['tp']"
        )
    if len({tuple(ranks_of(value)) for value in split}) > 1:
        raise ValueError(f"{name} has parameters that are split over different ranks; use one device mesh for all")
    if any(value.is_meta for value in split):
        raise ValueError(
            f"{name} is split by parallelize_module and still on the device 'meta', where memopt does not plan it; "
            "move it to a device first (model.to_empty(device=…)), or plan the model before it is split, with "
            "mesh={'tp': …}"
        )


def check_terms(model: nn.Module, terms: ModelTerms) -> None:
    """Raise `ValueError` for options that do not work for a model split by tensor parallelism."""
    if not is_tensor_parallel(model):
        return
    options, name = terms.options, f"{type(model).__name__} is split by parallelize_module (tensor parallelism), and"
    if terms.fuses:
        raise ValueError(f"{name} is planned for plain operators only; give backend='aten'")
    if terms.rewriting.autocast is not None:
        raise ValueError(f"{name} is planned in fp32 only; give precision='fp32'")
    if further := sorted(options.allow - DEFAULT_LEVERS - {PLAIN.name}):
        raise ValueError(f"{name} the lever {further[0]!r} cannot be used there; leave that lever out of allow")
    if options.passes:
        raise ValueError(f"{name} your own passes cannot rewrite its graphs; leave out the argument passes")
    if options.outputs == "all":
        raise ValueError(f"{name} only its loss is differentiated; leave out outputs='all'")
    if options.dynamic is not None:
        raise ValueError(
            f"{name} is captured anew for each size of a batch, so that no size can be declared as changing; leave out "
            "the argument dynamic"
        )
    if options.forwards > 1:
        raise ValueError(f"{name} is planned for one forward before each backward; leave out the argument forwards")


def check_unbroken(model: nn.Module, reason: str) -> None:
    """Raise `CaptureError` for a model split by tensor parallelism whose forward is not one graph, for `reason`: eager
    code between graphs would have to run while planning, and exchange values with ranks that do not plan."""
    if is_tensor_parallel(model):
        raise CaptureError(
            f"the forward of {type(model).__name__}, which is split by parallelize_module, is not one graph, as a plan "
            f"for it needs: {reason}; change the model there, or add 'plain' to allow to run it unplanned"
        )


def check_model(model: nn.Module) -> None:
    """Raise `TypeError` for an object that is no module, and `ValueError` for a model without trainable parameters,
    with TorchScript modules, with parameters on several devices, or that `check_sharding` refuses."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no trainable parameters, so there is no training step to plan; "
            "set requires_grad=True on those to train"
        )
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise ValueError(
            f"{type(model).__name__} has TorchScript modules (the first of {len(scripted)}: "
            f"{scripted[0] or 'the model itself'}), whose operators cannot be recorded: build it without "
            "torch.jit.script and torch.jit.trace (e3nn: e3nn.set_optimization_defaults(jit_script_fx=False); mace: "
            "mace.tools.compile.prepare)"
        )
    check_sharding(model)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the parameters of {type(model).__name__} are on several devices ({names}); move them to one")
