"""The whole state of a run for `torch.distributed.checkpoint`: each rank saves its part, for any number of ranks."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from memopt.compat.ddp import unwrapped
from memopt.optimizers.parameterwise import Parameterwise
from memopt.train.effective_batch import groups_of
from memopt.train.step_state import StateDict, check_built_alike, generators_of, loop_state, set_loop_state

if TYPE_CHECKING:
    from memopt.train.train_step import TrainStep

MODEL, OPTIMIZERS, LOOP = "model", "optimizers", "loop"


class RunState:
    """The state of a `TrainStep` with its model and optimizers, for `torch.distributed.checkpoint`.

    `dcp.save({"run": RunState(step)}, checkpoint_id=folder)` and `dcp.load({"run": RunState(step)},
    checkpoint_id=folder)`, called on all ranks, save and restore a run under FSDP2, `DistributedDataParallel` or on one
    device. It may be resumed on another number of ranks, or with another wrapper: parameters and the optimizers' state
    are stored by the names of parameters. On the same number of ranks each rank's random generators are restored too,
    and the run is bitwise as if it had never stopped; on another number each rank keeps its current generators.

    Raises `ValueError` if it is saved or loaded within an effective batch, for a state of another run, and for
    optimizers that levers have wrapped."""

    def __init__(self, step: TrainStep) -> None:
        if changed := next((one for one in step.optimizers if isinstance(one, Parameterwise)), None):
            raise ValueError(
                f"the state of {type(changed).__name__} cannot be divided among ranks; save step.state_dict() and the "
                "model's on each rank with torch.save, or leave the levers on the optimizer out"
            )
        self.step = step

    def state_dict(self) -> StateDict:
        """The state to save or to load into: model and optimizers, sharded as on the ranks, and the loop's."""
        from torch.distributed.checkpoint.state_dict import get_state_dict  # it takes a second to import

        if calls := self.step.effective_batch.calls:
            raise ValueError(
                f"the run is within an effective batch, after {calls} of {self.step.accumulate} calls: save and load "
                "after a call whose result is complete"
            )
        self.step.settle()
        model, optimizers = get_state_dict(unwrapped(self.step.model), list(self.step.optimizers))
        file = io.BytesIO()  # one value, so that the names do not depend on the number of ranks
        torch.save({**loop_state(self.step), "generators": self._generators()}, file)
        return {MODEL: model, OPTIMIZERS: optimizers, LOOP: file.getvalue()}

    def load_state_dict(self, state: StateDict) -> None:
        """Set model, optimizers and loop to a state that `torch.distributed.checkpoint` has loaded."""
        from torch.distributed.checkpoint.state_dict import set_state_dict  # it takes a second to import

        saved = state[LOOP]
        if not isinstance(saved, bytes):
            raise ValueError(
                f"the checkpoint has a {type(saved).__name__} in place of the state of a TrainStep; load one that was "
                "saved with RunState"
            )
        loop = torch.load(io.BytesIO(saved), weights_only=True)
        generators = loop.pop("generators")
        check_built_alike(self.step, loop, ("schedulers",))
        set_state_dict(
            unwrapped(self.step.model),
            list(self.step.optimizers),
            model_state_dict=state[MODEL],
            optim_state_dict=state[OPTIMIZERS],
        )
        self.step.follow_up.forget()
        rank, ranks = self._place()
        set_loop_state(self.step, {**loop, "generators": generators[rank] if len(generators) == ranks else None})

    def _generators(self) -> list[Any]:
        """The states of the random generators of all ranks."""
        found: list[Any] = [generators_of(self.step)]
        for group in groups_of(self.step.model):
            gathered: list[Any] = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(gathered, found, group=group)
            found = [one for of_rank in gathered for one in of_rank]
        return found

    def _place(self) -> tuple[int, int]:
        """The position of this rank's generators in `_generators`, and the number of ranks."""
        position, ranks = 0, 1
        for group in groups_of(self.step.model):
            size = distributed.get_world_size(group)
            position += ranks * distributed.get_rank(group)
            ranks *= size
        return position, ranks
