"""Exchanges among ranks: which gathered parameters FSDP2 keeps between forward and backward, exchanges by gloo that
hold no memory once they return, and the stages, order and loss of schedules of `torch.distributed.pipelining`.

gloo's threads drop their references to an exchange's tensors some time after it is over, so that the memory is freed
late, and unseen by this thread's profiler: a step would hold, or seem to hold, up to two exchanges more than planned.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from memopt.compat.fsdp import Exchange, groups_of
from memopt.compat.host import HOST
from memopt.compat.tensors import users_of
from passes.compat import private

PRIVATE_NAMES = private("""
    torch.distributed.fsdp._fully_shard._fsdp_state: FSDPState._is_root? ._auto_reshard_after_forward?
    torch.distributed.fsdp._fully_shard._fsdp_param_group: FSDPParamGroup.post_forward_mesh_info? .mesh_info?
        ._all_gather_process_group?
    torch.distributed.fsdp._fully_shard._fsdp_param: FSDPParam._sharded_param_data?
    torch.distributed.pipelining.schedules: _PipelineSchedule _PipelineSchedule._n_microbatches? ._loss_fn?
        ._has_backward? ._split_inputs? PipelineScheduleSingle._stage? PipelineScheduleMulti._stages?
""")

ALL = sys.maxsize
"""A number of blocks that is larger than any model's."""


@dataclass(frozen=True)
class _Block:
    """A part of a model whose parameters FSDP2 gathers together, and by itself reshards after its forward."""

    path: str
    module: Any
    gathered_bytes: int
    """Bytes of its parameters once they are gathered."""


class Resharding:
    """Keeps the parameters of a model's last blocks, whose backward comes first, gathered from their forward to their
    backward (`keep`), where `fully_shard` would free (reshard) them after the forward. Blocks whose
    `reshard_after_forward` the user has set to False or to a number of ranks are not changed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.count = 0
        """The number of blocks, from the last, that stay gathered now."""
        self._automatic: list[bool] = []

    @cached_property
    def blocks(self) -> tuple[_Block, ...]:
        """The blocks that `fully_shard` frees after their forward, in the order of the model's modules; the root is not
        among them. To be read after the model's first forward, in which FSDP2 finds out which part is the root."""
        found: dict[int, _Block] = {}
        for path, module in self.model.named_modules():
            groups = groups_of(module, recurse=False)
            if groups and _state(module)._is_root is False and all(map(_frees, groups)):
                # Several modules may be one block: `fully_shard([norm, head])`.
                found.setdefault(id(_state(module)), _Block(path, module, sum(map(_gathered_bytes, groups))))
        return tuple(found.values())

    def keep(self, count: int) -> None:
        """Make the last `count` blocks stay gathered from their forward to their backward, and the others be freed."""
        if count == self.count:
            return
        if not self._automatic:
            self._automatic = [_state(block.module)._auto_reshard_after_forward for block in self.blocks]
        for number, block in enumerate(reversed(self.blocks)):
            if (number < count) != (number < self.count):
                block.module.set_reshard_after_forward(number >= count, recurse=False)
        self.count = count

    def restore(self) -> None:
        """Undo `keep`: FSDP2 decides again when each block is freed, as before."""
        if self.count:
            self.keep(0)
        for block, automatic in zip(self.blocks, self._automatic, strict=True) if self._automatic else ():
            _state(block.module)._auto_reshard_after_forward = automatic
        self._automatic = []

    @property
    def in_use(self) -> tuple[tuple[str, int], ...]:
        """The path and the gathered bytes of each block that stays gathered now."""
        kept = self.blocks[len(self.blocks) - self.count :] if self.count else ()
        return tuple((block.path, block.gathered_bytes) for block in kept)


def _state(module: Any) -> Any:
    return module._get_fsdp_state()


def _frees(group: Any) -> bool:
    """Whether a group frees its parameters after the forward, and its backward gathers them from all ranks again."""
    after = group.post_forward_mesh_info
    return after is not None and after == group.mesh_info


def _gathered_bytes(group: Any) -> int:
    ranks, computed = group.mesh_info.shard_mesh_size, group.mp_policy.param_dtype
    return sum(
        ranks * parameter._sharded_param_data.numel() * (computed or parameter.sharded_param.dtype).itemsize
        for parameter in group.fsdp_params
    )


LONGEST_S = 1.0
"""How many seconds an exchange waits for gloo's threads at most."""


def settle_gloo(model: nn.Module) -> None:
    """Make the modules that `fully_shard` was applied to wait for gloo's threads after each exchange, so that its
    memory is free when it returns. Those with another backend, or a custom exchange of the user's, are not changed."""
    for group in groups_of(model):
        if group.device.type == HOST.type and "gloo" in str(distributed.get_backend(group._all_gather_process_group)):
            gather, reduce = group._all_gather_comm, group._reduce_scatter_comm
            if type(gather).__name__ == "DefaultAllGather":
                group._all_gather_comm = Exchange(gather, partial(_gather, gather))
            if type(reduce).__name__ == "DefaultReduceScatter":
                group._reduce_scatter_comm = Exchange(reduce, reduce_scatter)


def unsettle_gloo(model: nn.Module) -> None:
    """Undo `settle_gloo`: the sharded modules communicate by FSDP2's defaults again."""
    for group in groups_of(model):
        for name in ("_all_gather_comm", "_reduce_scatter_comm"):
            if isinstance(exchange := getattr(group, name), Exchange):
                setattr(group, name, exchange.usual)


def gather_of(module: nn.Module) -> Any:
    """The callable with which a module that `fully_shard` was applied to gathers its own parameters."""
    return groups_of(module, recurse=False)[0]._all_gather_comm


def _gather(usual: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
    """FSDP2's all-gather `usual`, and a wait until gloo's threads have dropped both tensors."""
    with settling(output_tensor), settling(input_tensor):
        usual(output_tensor, input_tensor, group=group, async_op=False)


def reduce_scatter(output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
    """Reduce `input_tensor` over the ranks of `group` by `op`, and write this rank's part to `output_tensor`; both have
    one dimension. Like gloo's own reduce-scatter this reduces a copy of the whole input, but one of this thread, which
    waits until gloo's threads have dropped it. `async_op` is ignored."""
    copy = input_tensor.clone()
    with settling(copy):
        distributed.all_reduce(copy, op, group=group)
    output_tensor.copy_(copy.view(distributed.get_world_size(group), -1)[distributed.get_rank(group)])


@contextmanager
def settling(tensor: torch.Tensor) -> Iterator[None]:
    """A context at whose end this thread waits until other threads hold no more references to the tensor than before
    the block, for `LONGEST_S` seconds at most."""
    users = _users(tensor)
    yield
    latest = time.monotonic() + LONGEST_S
    while _users(tensor) > users and time.monotonic() < latest:
        time.sleep(1e-5)


def _users(tensor: torch.Tensor) -> int:
    """The number of references to a tensor: those in C++, of which Python's are one, and those in Python."""
    return users_of(tensor) + sys.getrefcount(tensor)


_FORWARD, _BACKWARD = "F", "B"


def is_schedule(value: Any) -> bool:
    """Whether a value is a schedule of `torch.distributed.pipelining`."""
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    return isinstance(value, _PipelineSchedule)


def stages_of(schedule: Any) -> list[Any]:
    """The stages of a pipeline schedule that this rank holds, in their order."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def microbatches_of(schedule: Any) -> int:
    """The number of microbatches into which a pipeline schedule splits a batch."""
    return int(schedule._n_microbatches)


def loss_of(schedule: Any) -> Callable[..., Any] | None:
    """The function by which a pipeline schedule computes a microbatch's loss; None for one that does not train."""
    return schedule._loss_fn


def set_loss(schedule: Any, loss_fn: Callable[..., Any] | None) -> None:
    """Replace the function by which a pipeline schedule computes losses."""
    schedule._loss_fn = loss_fn


def trains(schedule: Any) -> bool:
    """Whether a step of a pipeline schedule runs the backward: not while the schedule evaluates."""
    return bool(schedule._has_backward)


def in_flight(schedule: Any) -> list[tuple[int, dict[int, int]]]:
    """For each forward and backward that this rank runs in a step of a pipeline schedule, in order: the index of its
    stage, and for that of each stage of this rank the number of microbatches in flight while it runs: those whose
    forward has begun and whose backward is not over."""
    waiting = {stage.stage_index: 0 for stage in stages_of(schedule)}
    found = []
    for stage, kind in _actions(schedule):
        waiting[stage] += kind == _FORWARD
        if kind in (_FORWARD, _BACKWARD):
            found.append((stage, dict(waiting)))
        waiting[stage] -= kind == _BACKWARD
    return found


def splits_backward(schedule: Any) -> bool:
    """Whether a pipeline schedule computes the gradients of inputs and those of weights at different times."""
    kinds = {kind for _, kind in _actions(schedule)}
    return not kinds <= {_FORWARD, _BACKWARD, "REDUCE_GRAD"}


def sends_kept(schedule: Any) -> int:
    """The most microbatches whose tensors stay on the device after they were sent, in each direction of the pipeline.
    1F1B holds the handles of its latest two exchanges; all other schedules hold all of them to the end of a step."""
    from torch.distributed.pipelining import Schedule1F1B

    many = microbatches_of(schedule)
    return min(2, many) if isinstance(schedule, Schedule1F1B) else many


def ranks_of_pipeline(schedule: Any) -> list[int]:
    """The global ranks that hold the stages of the pipeline."""
    group = stages_of(schedule)[0].group
    return list(distributed.get_process_group_ranks(group or distributed.group.WORLD))


def first_microbatch(schedule: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The positional arguments of the first microbatch, the largest, into which a pipeline schedule splits a batch."""
    return tuple(schedule._split_inputs(args, {})[0][0])


def _actions(schedule: Any) -> list[tuple[int, str]]:
    """This rank's actions in a step, in order: the index of the stage and the kind, such as "F" or "B"."""
    order = schedule.pipeline_order[stages_of(schedule)[0].group_rank]
    parts = (part for action in order if action is not None for part in action.sub_actions or (action,))
    return [(part.stage_index, part.computation_type.value) for part in parts]
