"""A batch as microbatches: those that the user gives, or equal pieces of one batch along the samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def as_microbatches(batch: Any, microbatches: int = 1) -> list[Any]:
    """The microbatches of one call, at least one, each as the model takes it.

    Args:
        batch: a list or an iterator of batches is taken as the microbatches that it holds. All else is one batch: a
            tuple, a dict, a tensor, and a list with a tensor in it, which is how a `DataLoader` collates tuples.
        microbatches: how many pieces to split one batch into.

    Raises:
        TypeError: this is no batch.
        ValueError: nothing is in it, or it cannot be split so.
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
    return [piece for each in series for piece in split(each, 1)]


def split(batch: Any, pieces: int) -> list[Any]:
    """`pieces` batches with equal numbers of samples: every tensor is cut along its first dimension, however nested.

    What is no tensor, or has no dimension, goes to every piece. The pieces are views.

    Raises `ValueError` where the batch is empty, its tensors disagree in the first dimension or that is no multiple of
    `pieces`.
    """
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
    """The first dimension that all tensors of the batch have in common. Raises `ValueError` where they disagree."""
    sizes = dict(_sizes(batch))
    if not sizes:
        raise ValueError("the batch holds no tensor with a first dimension, so its samples are not known")
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the tensors of the batch disagree in the first dimension ({_listed(sizes)}), so its samples are not "
            "known; give all of them the batch as first dimension, or a list of microbatches with count="
        )
    return next(iter(sizes.values()))


def is_series(batch: Any) -> bool:
    """Whether this is a list or an iterator of microbatches, rather than one batch."""
    if isinstance(batch, list):
        return not any(isinstance(each, torch.Tensor) for each in batch)
    return isinstance(batch, Iterator)


def _sizes(batch: Any, path: str = "batch") -> Iterator[tuple[str, int]]:
    """The first dimension of every tensor that has one, by its place in the batch."""
    if isinstance(batch, torch.Tensor):
        if batch.dim():
            yield path, batch.shape[0]
    elif isinstance(batch, Mapping):
        for key, each in batch.items():
            yield from _sizes(each, f"{path}[{key!r}]")
    elif isinstance(batch, (tuple, list)):
        for number, each in enumerate(batch):
            yield from _sizes(each, f"{path}[{number}]")


def _cut(batch: Any, samples: slice) -> Any:
    """The batch with these samples of every tensor that has a dimension; mappings become dicts."""
    if isinstance(batch, torch.Tensor):
        return batch[samples] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: _cut(each, samples) for key, each in batch.items()}
    if isinstance(batch, (tuple, list)):
        cut = [_cut(each, samples) for each in batch]
        return type(batch)(*cut) if hasattr(batch, "_fields") else type(batch)(cut)
    return batch


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{path}: {size}" for path, size in sizes.items())
