"""The lever that holds the optimizer's state in host memory."""

from __future__ import annotations

from functools import partial

from memopt.levers.lever import Lever, OptimizerChange
from memopt.optimizers import OffloadedOptimizer, Where, check_update

_CHANGES = {"device": "brought to the device piece by piece", "host": "and stepped there"}
_EXACTNESS = {
    "device": "bitwise that of the same optimizer stepped parameter by parameter",
    "host": "the same arithmetic, rounded as the host's units do",
}


def offload_optimizer(update: Where = "device") -> Lever:
    """The lever with a place where parameters are stepped: see `OffloadedOptimizer`."""
    return Lever(
        OffloadedOptimizer.title,
        "The optimizer's state is held in host memory and copied piece by piece for its step.",
        "bitwise",
        "host memory and the time of the copies (but for rounding where the host steps); needs memopt.wrap_optimizer; "
        "not on a CPU",
        optimizer=OptimizerChange(
            partial(OffloadedOptimizer, update=update),
            f"the optimizer's state in the host's memory, {_CHANGES[update]}",
            _EXACTNESS[update],
            check=partial(check_update, update=update),
            offloads=update,
        ),
    )


OFFLOAD_OPTIMIZER = offload_optimizer()
