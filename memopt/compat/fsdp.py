"""FSDP2 (`fully_shard`): the groups of parameters that are gathered together, and how they exchange."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from memopt.compat.host import is_on_host
from memopt.compat.modules import modules_of
from memopt.compat.tensors import is_sharded
from passes.compat import private, replaced

PRIVATE_NAMES = private("""
    torch.distributed.fsdp: FSDPModule._get_fsdp_state
    torch.distributed.fsdp._fully_shard._fsdp_state: FSDPState._fsdp_param_groups? [since 2.13]
    torch.distributed.fsdp._fully_shard._fsdp_state: FSDPState._fsdp_param_group? [until 2.11]
    torch.distributed.fsdp._fully_shard._fsdp_param_group: FSDPParamGroup._all_gather_comm? ._reduce_scatter_comm?
        ._partial_reduce_output?
    torch.distributed.fsdp._fully_shard._fsdp_param: FSDPParam._unsharded_param? .unsharded_accumulated_grad?
        .is_dtensor?
""")


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model or a part of it."""
    # This import takes a second; a program that shards by it has imported it, and begun a process group.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not torch.distributed.is_initialized():
        return False
    return bool([one for one in modules_of(model) if isinstance(one, fsdp.FSDPModule)])


def groups_of(model: nn.Module, *, recurse: bool = True) -> list[Any]:
    """The groups of parameters (`FSDPParamGroup`) that FSDP2 made of the model's modules, in the order of the modules;
    without `recurse`, those of the model's own module only."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    found: dict[int, Any] = {}
    modules: Iterable[Any] = model.modules() if recurse else (model,)
    for module in modules:
        if isinstance(module, fsdp.FSDPModule):
            state = module._get_fsdp_state()
            one = getattr(state, "_fsdp_param_groups", None)
            groups = [state._fsdp_param_group] if one is None else one
            found |= {id(group): group for group in groups if group is not None}
    return list(found.values())


def _parameters(model: nn.Module) -> list[Any]:
    return [parameter for group in groups_of(model) for parameter in group.fsdp_params]


def is_sharded_otherwise(model: nn.Module) -> bool:
    """Whether any parameter of the model is distributed over ranks by something other than `fully_shard`, such as
    tensor parallelism (`parallelize_module`), or by both."""
    own = _parameters(model)
    shards = {id(parameter.sharded_param) for parameter in own}
    others = (parameter for parameter in model.parameters() if id(parameter) not in shards)
    return any(parameter.is_dtensor for parameter in own) or any(map(is_sharded, others))


def sharding_in_words(model: nn.Module) -> str:
    """A text that is equal on two ranks if their collectives match: the number of parameter groups, and a digest of
    their shapes, resharding and mixed precision."""
    facts = []
    for group in groups_of(model):
        shapes = [tuple(parameter.sharded_param.shape) for parameter in group.fsdp_params]
        facts.append((shapes, group.post_forward_mesh_info is not None, str(group.mp_policy)))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    return f"{len(facts)} groups of parameters" + (f" ({digest})" if facts else "")


def _stage(tensor: torch.Tensor) -> None:
    """Allocate and free the buffer that gloo uses in an exchange on the CPU: a copy of the larger tensor, given here.
    Nothing is done for tensors on a card."""
    if is_on_host(tensor):
        torch.empty_like(tensor)


class Exchange:
    """Takes the place of FSDP2's exchange `usual`: allocates the same tensors, but calls `run`, with the arguments that
    `usual` would get, to exchange them."""

    def __init__(self, usual: Any, run: Callable[..., None]) -> None:
        self.usual, self.allocate, self.run = usual, usual.allocate, run

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.run(*args, **kwargs)


def _own_gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    """An all-gather without communication: every rank's part of the output is this rank's shard."""
    _stage(output_tensor)
    for place in output_tensor.view(-1, input_tensor.numel()):
        if place.data_ptr() != input_tensor.data_ptr():
            place.copy_(input_tensor)


class _WholeGradients:
    """The gradients that earlier backwards have left unsharded in a group of parameters, removed while a forward and
    backward runs on this rank alone (`Gathered.without_exchange`). A real backward would add to them, so they count
    until this one has made gradients in their place."""

    def __init__(self, group: Any) -> None:
        self.group, self.bytes = group, _whole_gradient_bytes(group)
        self.are_reduced = False
        self._taken = 0

    def reduce(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        """A reduce-scatter without communication: the output is the first part of this rank's input."""
        self.are_reduced = True
        _stage(input_tensor)
        output_tensor.copy_(input_tensor[: output_tensor.numel()])

    @property
    def waiting_bytes(self) -> int:
        """The bytes of these gradients in whose place no new one has been made yet; 0 once the group has reduced."""
        if self.are_reduced or not self.bytes:
            return 0
        self._taken = max(self._taken, _whole_gradient_bytes(self.group))
        return max(0, self.bytes - self._taken)


class Gathered:
    """The parameters of a model that `fully_shard` gathers before use and frees after it. Its truth value is False if
    there are none; `tensor in` it tells whether a tensor is such a gathered parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._groups = groups_of(model)
        self._parameters = _parameters(model)
        self._whole: list[_WholeGradients] = []

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return any(getattr(parameter, "_unsharded_param", None) is tensor for parameter in self._parameters)

    @property
    def gradient_bytes(self) -> int:
        """The bytes of unsharded gradients on this rank, left by backwards without `set_requires_gradient_sync`."""
        return sum(map(_whole_gradient_bytes, self._groups))

    @property
    def waiting_bytes(self) -> int:
        """The bytes of the gradients that `without_exchange` has set aside and that a real step would still hold now,
        as the running backward has not made others in their place; 0 outside of `without_exchange`."""
        return sum(gradients.waiting_bytes for gradients in self._whole)

    def memory(self) -> Iterator[torch.Tensor]:
        """The tensors into which the parameters are gathered; their storages have 0 bytes between uses."""
        for parameter in self._parameters:
            yield from parameter.all_gather_outputs

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """A context for a forward and backward on this rank alone: gathers, which repeat this rank's shard, and
        reductions allocate what they always do, but do not communicate. Gradients are removed for the block."""
        self._whole = list(map(_WholeGradients, self._groups))
        with ExitStack() as stack:
            stack.callback(self._whole.clear)
            for group, whole in zip(self._groups, self._whole, strict=True):
                gather, reduce = group._all_gather_comm, group._reduce_scatter_comm
                stack.enter_context(replaced(group, "_all_gather_comm", Exchange(gather, _own_gather)))
                stack.enter_context(replaced(group, "_reduce_scatter_comm", Exchange(reduce, whole.reduce)))
                stack.enter_context(replaced(group, "all_reduce_grads", False))
                stack.enter_context(replaced(group, "_partial_reduce_output", None))
            for parameter in self._parameters:
                stack.enter_context(replaced(parameter, "unsharded_accumulated_grad", None))
                stack.enter_context(replaced(parameter.sharded_param, "grad", None))
                stack.callback(_set_whole_gradient, parameter, _set_whole_gradient(parameter, None))
            try:
                yield
            except BaseException:
                parts: Iterable[Any] = self.model.modules()
                for root in (one for one in parts if hasattr(one, "reset_iter_state")):
                    root.reset_iter_state()  # so that another iteration can begin; that of the root is for all parts
                    break
                raise


NOTHING_GATHERED = Gathered(nn.Module())


def exchange_in_words(model: nn.Module) -> str:
    """The state of gradient accumulation as text: for each parameter group whether it reduces its gradients in the next
    backward (see `set_requires_gradient_sync`), and the bytes of gradients that earlier backwards have left unsharded.
    "" for a model that is not sharded."""
    groups = groups_of(model)
    return str([(group.reduce_grads, _whole_gradient_bytes(group)) for group in groups]) if groups else ""


def _whole_gradient_bytes(group: Any) -> int:
    """The bytes of the gradients of a group's parameters that are not reduced yet and so are unsharded."""
    found = [parameter.unsharded_accumulated_grad for parameter in group.fsdp_params]
    found += [getattr(getattr(one, "_unsharded_param", None), "grad", None) for one in group.fsdp_params]
    return sum(gradient.nbytes for gradient in found if gradient is not None)


def _set_whole_gradient(parameter: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Set the `.grad` of a gathered parameter and return the one before; nothing is done, and None returned, for a
    parameter that was never gathered."""
    whole = getattr(parameter, "_unsharded_param", None)
    if whole is None:
        return None
    before, whole.grad = whole.grad, gradient
    return before
