"""`DistributedDataParallel` (DDP): the wrapper that runs, its buckets, and its hooks on gradients."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from memopt.compat.autograd import current_backward, when_backward_ends
from memopt.compat.tensors import is_view
from passes.compat import private

# DDP's own mixed precision calls the reducer's hooks from Python.
PRIVATE_NAMES = private("""
    torch.nn.parallel.distributed: DistributedDataParallel._get_active_ddp_module ._build_params_for_reducer
        ._get_ddp_logging_data ._delay_all_reduce_all_params? ._use_python_reducer? ._ddp_sink_clone?
        ._static_graph_delay_allreduce_enqueued? ._join_config?
    torch._C._distributed_c10d: Reducer._autograd_hook ._remove_autograd_hooks
    torch.distributed.distributed_c10d: _get_default_store
""")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of `DistributedDataParallel`; any other model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def shared_store() -> Any | None:
    """The key-value store that all ranks of the default process group share; None without such a group."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def active_wrapper() -> DistributedDataParallel | None:
    """The DDP wrapper whose forward is running; None outside of one."""
    return _DDP._get_active_ddp_module()


_DDP: Any = DistributedDataParallel


def check_wrapper(wrapper: Any) -> None:
    """Raise `ValueError` for options of a DDP wrapper that memopt cannot plan for: its own mixed precision, an
    all-reduce that is delayed for all parameters, and the Python reducer."""
    if wrapper.mixed_precision is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=…) trains copies of the parameters in 16 bits, which no plan "
            "counts; leave it out, and give memopt.optimize a precision"
        )
    if wrapper._delay_all_reduce_all_params:
        raise ValueError(
            "DistributedDataParallel(delay_all_reduce_named_params=…) with all parameters runs the model's forward "
            "without its plan; leave the option out"
        )
    if wrapper._use_python_reducer:
        raise ValueError(
            "torch._dynamo.config.optimize_ddp = 'python_reducer' exchanges gradients by compiled autograd, which a "
            "planned model does not use; leave the setting at its default when DistributedDataParallel is made"
        )


def clones_outputs(wrapper: Any) -> bool:
    """Whether the next forward returns clones of the tensors that the module returns."""
    sinks = defers_exchange(wrapper) or (wrapper.find_unused_parameters and not wrapper.static_graph)
    return sinks and wrapper._ddp_sink_clone


def defers_exchange(wrapper: Any) -> bool:
    """Whether the next backward exchanges all gradients at its end, as the first one of a static graph does."""
    return wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued


def takes_uneven_inputs(wrapper: Any) -> bool:
    """Whether ranks may run different numbers of forwards, as under `wrapper.join()`."""
    return bool(wrapper._join_config.enable)


class ReducerHooks:
    """The hooks that notify a wrapper's reducer of each accumulated gradient, in Python in place of DDP's own in C++;
    the reducer then does what it does for DDP's own. `ready` notifies the reducer in the middle of a backward; the hook
    then does nothing for that parameter in that backward."""

    def __init__(self, wrapper: Any) -> None:
        facts = wrapper._get_ddp_logging_data()
        self.nbytes = int(facts["total_parameter_size_bytes"])
        """The bytes of all buckets."""
        self.reducer = weakref.ref(wrapper.reducer)
        self._parameters: list[nn.Parameter] = wrapper._build_params_for_reducer()[0]
        if len(self._parameters) != int(facts["num_parameter_tensors"]):  # some were frozen since: numbers have changed
            self._parameters = []
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._ready: dict[int, int] = {}
        """For the number of a parameter, the backward (`current_backward`) in which `ready` was called for it."""
        self._addresses: dict[int, int] = {}
        """For the number of a parameter, the address of the bucket that its latest gradient became a view of."""
        self._noted: int | None = None
        """The backward (`current_backward`) at whose end all these addresses are looked up."""
        self._moved = False
        at_once = wrapper.gradient_as_bucket_view and not getattr(wrapper, "batched_grad_copy", False)
        self.views = at_once and bool(self._numbers)
        """Whether a gradient becomes a view of its bucket as soon as the reducer is notified of it."""

    @property
    def addresses(self) -> frozenset[int]:
        """The addresses of the buckets that gradients were found to be views of. An address stays in the set after the
        gradient is freed, since Python may still hold the view."""
        return frozenset(self._addresses.values())

    def takes(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter is one of the reducer's, so that `ready` may be called for it."""
        return id(parameter) in self._numbers

    def ready(self, parameter: torch.Tensor) -> None:
        """Put the parameter's `.grad` into its bucket now, in the running backward."""
        number = self._numbers[id(parameter)]
        self._ready[number] = current_backward()
        self._tell(number)

    def take_over(self) -> None:
        """Replace the reducer's own hooks by those of this object. Nothing is done at later calls, and where parameters
        were frozen since DDP wrapped the model. To be called outside of a backward."""
        if self._moved or not self._parameters:
            return
        reducer: Any = self.reducer()
        reducer._remove_autograd_hooks()
        self._moved = True
        for number, parameter in enumerate(self._parameters):
            accumulate: Any = torch.autograd.graph.get_gradient_edge(parameter).node
            accumulate.register_hook(partial(_after_accumulation, weakref.ref(self), number))

    def _tell(self, number: int) -> None:
        reducer: Any = self.reducer()
        if reducer is not None:
            reducer._autograd_hook(number)
            self._note(number)

    def note_at_end(self) -> None:
        """Record the addresses of the buckets (`addresses`) when the running backward ends. In the first backward of a
        static graph, all gradients become views only then, by a callback that DDP has queued earlier."""
        if self.views and self._noted != current_backward():
            self._noted = current_backward()
            when_backward_ends(self._note_all)

    def _note(self, number: int) -> None:
        gradient = self._parameters[number].grad if self.views else None
        if gradient is not None and is_view(gradient):  # gradients that autograd makes are no views
            self._addresses[number] = gradient.untyped_storage().data_ptr()

    def _note_all(self) -> None:
        for number in range(len(self._parameters)):
            self._note(number)


def _after_accumulation(hooks: weakref.ref[ReducerHooks], number: int, *_: Any) -> None:
    """Notify the reducer that its parameter `number` has its gradient, unless `ready` did so in this backward."""
    found = hooks()
    if found is not None and found._ready.pop(number, None) != current_backward():
        found._tell(number)


_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, ReducerHooks] = weakref.WeakKeyDictionary()
"""Owned by the wrappers: an entry lives as long as its wrapper."""


def reducer_hooks(wrapper: DistributedDataParallel) -> ReducerHooks:
    """The hooks of a wrapper, cached; new ones once the wrapper has another reducer."""
    hooks = _hooks.get(wrapper)
    if hooks is None or hooks.reducer() is not wrapper.reducer:
        hooks = _hooks[wrapper] = ReducerHooks(wrapper)
    return hooks
