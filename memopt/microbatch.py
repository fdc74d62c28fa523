"""Microbatches: those that the user gives, or equal pieces of one batch along its first dimension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def as_microbatches(batch: Any, microbatches: int = 1) -> list[Any]:
    """The microbatches of one call, at least one, each as the model takes it.

    Args:
        batch: microbatches, given as a list or an iterator of batches; or one batch: a tuple, a dict, a tensor, or a
            list that contains a tensor, which is how a `DataLoader` collates tuples.
        microbatches: the number of pieces to split one batch into; 1 where microbatches are given.

    Raises:
        TypeError: `batch` is none of these.
        ValueError: the batch is empty, or cannot be split into that many equal pieces; or microbatches are given, and
            `microbatches` is not 1.
    """
    if not is_series(batch):
        return split(batch, microbatches)
    if microbatches != 1:
        raise ValueError(
            f"microbatches={microbatches} splits one batch, but a {type(batch).__name__} of microbatches is given; "
            "give one batch, or leave microbatches at 1"
        )
    series = list(batch)
    if not series:
        raise ValueError("the list of microbatches is empty; give at least one")
    return [piece for one_batch in series for piece in split(one_batch, 1)]


def split(batch: Any, pieces: int) -> list[Any]:
    """The batch as `pieces` batches with equal numbers of samples, which are views of it: every tensor is split along
    its first dimension; scalars and other values go to every piece. Raises `ValueError` if the batch is empty, if its
    tensors have different first dimensions, or if these are no multiple of `pieces`; `TypeError` if it is not a
    batch."""
    if isinstance(batch, list):
        batch = tuple(batch)
    if not isinstance(batch, (Mapping, tuple, torch.Tensor)):
        raise TypeError(
            f"a batch must be a tuple (positional), a dict (keywords) or a tensor, not a {type(batch).__name__}; "
            "loop over a loader and give one batch a call"
        )
    sizes = dict(_sizes(batch))
    if (not isinstance(batch, torch.Tensor) and not batch) or (sizes and not any(sizes.values())):
        raise ValueError(f"the batch is empty ({_listed(sizes) or 'it holds nothing'}); give at least one sample")
    if pieces == 1:
        return [batch]
    samples = samples_of(batch)
    if samples % pieces:
        raise ValueError(
            f"{samples} samples cannot be split into {pieces} equal microbatches; choose a divisor of {samples} "
            "(and drop_last=True in the loader)"
        )
    size = samples // pieces
    return [_cut(batch, slice(at, at + size)) for at in range(0, samples, size)]


def samples_of(batch: Any) -> int:
    """The size of the first dimension of the batch's tensors. Raises `ValueError` if there is none or they differ."""
    sizes = dict(_sizes(batch))
    if not sizes:
        raise ValueError(
            "the batch has no tensor with a first dimension, so its number of samples is unknown; give tensors whose "
            "first dimension is the batch, or give a list of microbatches, and TrainStep the option count="
        )
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the tensors of the batch disagree in the first dimension ({_listed(sizes)}), so its number of samples is "
            "unknown; give all of them the batch as first dimension, or give a list of microbatches, and TrainStep the "
            "option count="
        )
    return next(iter(sizes.values()))


def is_series(batch: Any) -> bool:
    """Whether `batch` is a list or an iterator of microbatches, rather than one batch."""
    if isinstance(batch, list):
        return not any(isinstance(element, torch.Tensor) for element in batch)
    return isinstance(batch, Iterator)


def _sizes(batch: Any, path: str = "batch") -> Iterator[tuple[str, int]]:
    """The path and the size of the first dimension of every tensor in the batch that is not a scalar."""
    if isinstance(batch, torch.Tensor):
        if batch.dim():
            yield path, batch.shape[0]
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _sizes(value, f"{path}[{key!r}]")
    elif isinstance(batch, (tuple, list)):
        for number, value in enumerate(batch):
            yield from _sizes(value, f"{path}[{number}]")


def _cut(batch: Any, samples: slice) -> Any:
    """The batch with only these samples of every tensor that is not a scalar. Mappings become dicts."""
    if isinstance(batch, torch.Tensor):
        return batch[samples] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: _cut(value, samples) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        cut = [_cut(value, samples) for value in batch]
        return type(batch)(*cut) if hasattr(batch, "_fields") else type(batch)(cut)
    return batch


def _listed(sizes: Mapping[str, int]) -> str:
    """Paths and sizes as one line of text."""
    return ", ".join(f"{path}: {size}" for path, size in sizes.items())
