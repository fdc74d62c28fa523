"""Which 8-bit Adam serves: torchao's where it is installed and fits, else our own."""

from __future__ import annotations

import importlib
from typing import Any, Literal, get_args

from torch import optim

from memopt.optimizers.block_quantization import BLOCK
from memopt.optimizers.low_bit_optimizer import LEAST_ELEMENTS, LowBitOptimizer

Backend = Literal["auto", "own", "torchao"]
# The options that torchao's Adam has; of others it has torch's defaults.
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad")


def use_low_bit_optimizer(optimizer: optim.Optimizer, backend: Backend = "auto") -> optim.Optimizer:
    """Adam or AdamW with its moments in 8 bits.

    Args:
        optimizer: what it steps by.
        backend: "own" for `LowBitOptimizer`, which goes on from what `optimizer` has learned; "torchao" for that
            library's, whose learning rate is a tensor, set by schedulers and by `group["lr"].fill_(rate)`; "auto" for
            torchao's where it is installed, has all that is asked, and the parameters are on CUDA, else our own.

    Raises:
        TypeError, ValueError: for another optimiser or backend, and for "torchao" where it is not installed or lacks
            what is asked.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, not {backend!r}")
    library = None if backend == "own" else _torchao()
    if backend == "auto" and (library is None or _lacking(optimizer) or not _on_cuda(optimizer)):
        library = None
    elif backend == "torchao" and library is None:
        raise ValueError("torchao is not installed; install it (pip install torchao), or give backend='own'")
    if library is None:
        return LowBitOptimizer(optimizer)
    lacking = _lacking(optimizer)
    if lacking:
        raise ValueError(f"torchao's 8-bit Adam has {lacking}; give backend='own'")
    make = library.AdamW8bit if type(optimizer) is optim.AdamW else library.Adam8bit
    return make(
        [{name: group[name] for name in ("params", *_OPTIONS)} for group in optimizer.param_groups], block_size=BLOCK
    )


def _torchao() -> Any:
    """torchao's optimisers; None where there are none."""
    try:
        return importlib.import_module("torchao.optim")
    except ImportError:
        return None


def _lacking(optimizer: optim.Optimizer) -> str:
    """Why torchao's 8-bit Adam cannot take the optimiser's place; empty where it can."""
    if type(optimizer) not in (optim.Adam, optim.AdamW):
        return f"no place for what {type(optimizer).__name__} does"
    if optimizer.state:
        return "no way to go on from the state that there is"
    for group in optimizer.param_groups:
        asked = [name for name in ("maximize", "capturable", "differentiable") if group.get(name)]
        if asked:
            return f"no {asked[0]}=True"
        for parameter in group["params"]:
            if parameter.numel() >= LEAST_ELEMENTS and parameter.numel() % BLOCK:
                return f"float32 state for a parameter of shape {tuple(parameter.shape)}, which {BLOCK} does not divide"
    return ""


def _on_cuda(optimizer: optim.Optimizer) -> bool:
    return all(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"])
