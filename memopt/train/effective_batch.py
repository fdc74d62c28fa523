"""The microbatches between two optimizer steps. Their gradients and losses are summed over all ranks, each weighted by
the number of terms in its mean loss. Batches are split where the step would not fit its budget."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from memopt.capture.dynamo_graph import is_tensor_parallel
from memopt.capture.inputs import call_signature
from memopt.compat.ddp import unwrapped
from memopt.compat.host import is_on_host
from memopt.compat.tensors import is_sharded
from memopt.errors import BudgetError, CaptureError
from memopt.levers.all import MICROBATCH
from memopt.lru import LruCache
from memopt.microbatch import is_series, samples_of, split
from memopt.run.session import session_of


def groups_of(model: nn.Module) -> list[Any]:
    """The process groups whose ranks train the model: one under DDP, one for each mesh dimension of sharded parameters,
    and none for a model on one device."""
    if isinstance(model, DistributedDataParallel):
        return [model.process_group]
    sharded: Any = next(filter(is_sharded, model.parameters()), None)
    return [] if sharded is None else list(sharded.device_mesh.get_all_groups())


def check_split(model: nn.Module) -> None:
    """Raise `ValueError` for a model that `parallelize_module` has split: torch neither clips nor unscales gradients
    some of which are sharded and others not."""
    if is_tensor_parallel(model):
        raise ValueError(
            f"TrainStep does not train {type(model).__name__}, which is split by parallelize_module (tensor "
            "parallelism); call its loss.backward() and optimizer.step() yourself, planned by memopt.optimize"
        )


def is_parallel(model: nn.Module) -> bool:
    """Whether several ranks train the model: it is in `DistributedDataParallel`, or its parameters are sharded."""
    return bool(groups_of(model))


def gradients_kept_here(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which backwards of `DistributedDataParallel` do not exchange gradients (`no_sync`); the next one
    outside exchanges their sum. It does nothing for sharded parameters, whose gradients would be held unsharded."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def mean_over_ranks(values: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """The mean of each element of `values` over the ranks that train `model`; `values` themselves on one rank."""
    for group in groups_of(model):
        total = values.clone()
        distributed.all_reduce(total, group=group)
        values = total / distributed.get_world_size(group)
    return values


IGNORED = -100
"""The target that torch's cross entropy and Hugging Face's losses ignore."""
SHIFTING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Parts of the names of Hugging Face's loss types, or models, whose loss compares position t with label t + 1."""

Count = Callable[[Any], Any]


def count_of(batch: Any, model: nn.Module, count: Count | None, *, with_targets: bool) -> int | float | torch.Tensor:
    """The number of terms in the mean loss of `batch`, as a tensor on the device if it is computed from tensors there.

    If `count` is given, it is called. Otherwise integer labels other than -100 are counted: `labels` or `shift_labels`
    of a dict, or, `with_targets`, the targets of a pair `(inputs, targets)`. In a causal Hugging Face model the first
    label of each sequence is left out, since nothing predicts it. Without such labels the samples are counted.

    Raises:
        ValueError: samples are counted, but the tensors have different numbers of them; or `count` returns a negative
            or infinite number; or the batch has a normalisation of its own (`num_items_in_batch`).
        TypeError: `count` returns neither a number nor a tensor of one element.
    """
    if count is not None:
        return _checked(count(batch))
    if isinstance(batch, Mapping):
        if batch.get("num_items_in_batch") is not None:
            raise ValueError(
                "the batch holds num_items_in_batch, by which the model divides the loss before TrainStep weights it; "
                "leave it out, or divide it by the number of microbatches and have count= return 1 for each of them"
            )
        if _is_labels(batch.get("shift_labels")):
            return _valid(batch["shift_labels"])
        if _is_labels(batch.get("labels")):
            labels: torch.Tensor = batch["labels"]
            return _valid(labels[..., 1:] if labels.dim() > 1 and shifts_labels(model) else labels)
    elif with_targets and isinstance(batch, tuple) and len(batch) == 2 and _is_labels(batch[1]):
        return _valid(batch[1])
    return samples_of(batch)


def shifts_labels(model: nn.Module) -> bool:
    """Whether this is a Hugging Face model whose loss shifts labels against logits, as decoders do; encoder-decoders
    shift the decoder's inputs instead."""
    plain: Any = unwrapped(model)
    config = getattr(plain, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False
    kind = getattr(plain, "loss_type", None) or type(plain).__name__
    return any(name in kind for name in SHIFTING)


def _is_labels(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype is not torch.bool


def _valid(labels: torch.Tensor) -> torch.Tensor:
    return (labels != IGNORED).sum()


def _checked(value: Any) -> int | float | torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(f"count must return one number for a batch, not a tensor of shape {tuple(value.shape)}")
        return value.detach().reshape(())
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"count must return a number or a tensor of one element, not {value!r}")
    if not math.isfinite(float(value)) or float(value) < 0:
        raise ValueError(f"count must return the number of terms in the mean loss, zero or more, not {value!r}")
    return value if isinstance(value, (int, float)) else float(value)


@dataclass(frozen=True)
class EffectiveBatch:
    """The sums of tokens (terms of the mean loss) and of weighted losses over the calls since the last optimizer step.
    All tensors are 0-dimensional and on one device.

    The backward of microbatch i with n_i tokens and mean loss l_i is that of l_i · n_i / `reference`. Once all tokens
    are known, gradients and loss are multiplied by `reference` / `tokens`, which makes them exactly those of the mean
    over all tokens. The reference is the expected number of tokens: that of all microbatches where they come in one
    call, else that of the first call times the number of calls. So the number of tokens need not be known ahead,
    gradients have about their final size in fp16, and k microbatches of equal counts have weights of exactly 1 / k.
    """

    calls: int
    reference: torch.Tensor
    tokens: torch.Tensor
    loss: torch.Tensor
    """The sum of the weighted losses."""

    @classmethod
    def empty(cls, device: torch.device) -> EffectiveBatch:
        """An effective batch without any microbatch yet: sums of 0."""
        # Apple's GPU has no float64; float32 counts exactly up to 16 million.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        nothing = torch.zeros((), dtype=dtype, device=device)
        return cls(0, nothing, nothing, nothing)

    def expecting(self, counts: Sequence[torch.Tensor], calls: int, model: nn.Module) -> EffectiveBatch:
        """The effective batch at the beginning of a further call whose microbatches have `counts` tokens, each added by
        `plus` when it has run. The first call with any token sets `reference`, by which losses are divided: the sum of
        `counts`, averaged over the ranks that train `model`, times `calls`, the number of calls in an effective
        batch."""
        expected = calls * mean_over_ranks(torch.stack(list(counts)).sum(), model)
        return replace(self, calls=self.calls + 1, reference=torch.where(self.reference > 0, self.reference, expected))

    def weighted(self, loss: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """The mean loss of a microbatch of `count` tokens times its weight `count` / `reference`; 0 for a microbatch
        without tokens, whose mean loss is NaN."""
        weight = count / torch.where(self.reference > 0, self.reference, 1)
        weight = weight if loss.dtype is torch.float64 else weight.float()
        return torch.where(count > 0, loss * weight, 0)

    def plus(self, weighted_loss: torch.Tensor, count: torch.Tensor) -> EffectiveBatch:
        """The effective batch with a further microbatch: its `count` tokens, and its loss as `weighted` returns it."""
        return replace(self, tokens=self.tokens + count, loss=self.loss + weighted_loss.detach())

    def over_ranks(self, model: nn.Module) -> EffectiveBatch:
        """The effective batch with tokens and loss averaged over the ranks that train `model`, as gradients are."""
        tokens, loss = mean_over_ranks(torch.stack((self.tokens, self.loss)), model)
        return replace(self, tokens=tokens, loss=loss)

    @property
    def correction(self) -> torch.Tensor:
        """The factor `reference` / `tokens` by which gradients and loss are multiplied at the end of the effective
        batch: exactly 1 where the reference is the number of tokens, and infinite without tokens."""
        return self.reference / self.tokens

    @property
    def mean_loss(self) -> torch.Tensor:
        """The mean loss over the tokens of all microbatches that `plus` has added; NaN without any token."""
        return self.loss * self.correction


def as_count(count: int | float | torch.Tensor, like: EffectiveBatch) -> torch.Tensor:
    """`count` as a 0-dimensional tensor like `like.tokens`, in dtype and device, without waiting for that device."""
    home = like.tokens
    if isinstance(count, torch.Tensor) and count.device == home.device:
        return count.to(home.dtype)
    # `full` writes a number from the host without waiting, unlike a copy. A count on another device has to be copied.
    value = count.item() if isinstance(count, torch.Tensor) and is_on_host(count) else count
    if isinstance(value, torch.Tensor):
        return value.to(home.device, home.dtype, non_blocking=True)
    return torch.full((), float(value), dtype=home.dtype, device=home.device)


MOST_SIGNATURES = 256
"""The number of batch signatures for which the number of pieces is remembered."""


class Splitting:
    """The number of equal pieces into which batches of each signature (shapes and dtypes) are split: `microbatches`; if
    that is None, 1 until a batch of that signature is refused, then what `more` has found."""

    def __init__(self, model: nn.Module, microbatches: int | None) -> None:
        self.model, self.fixed = model, microbatches
        self._pieces: LruCache[str, int] = LruCache(MOST_SIGNATURES)

    def pieces(self, batch: Any) -> int:
        """The number of pieces into which `batch` is split: `microbatches`, or what `more` has found, or 1."""
        return self.fixed or (self._pieces.get(_signature_of(batch)) if self._pieces else None) or 1

    def more(self, batch: Any, refused: BudgetError) -> int:
        """The smallest number of pieces, above the present one, with which the step fits; found by planning, and
        remembered for the signature of `batch`. Raises `refused` where the model is not optimised, the user has set the
        number or passes a list of microbatches, or the lever "microbatch" is not allowed. Raises a `BudgetError` that
        says so where the model has batch statistics, which each piece would compute separately, and where not even
        single samples fit, the error that names the smallest budget."""
        planned = session_of(self.model)
        if planned is None or self.fixed or is_series(batch) or MICROBATCH.name not in planned.options.allow:
            raise refused
        least = refused
        for number in range(self.pieces(batch) + 1, (samples := samples_of(batch)) + 1):
            if samples % number:
                continue
            try:  # as a later piece, with the gradients of earlier ones
                plan = planned.plan(split(batch, number)[0], gradients_held=True, advise=False)
            except BudgetError as error:
                least = min(least, error, key=lambda refusal: refusal.smallest_bytes)
                continue
            except CaptureError:  # the model does not accept batches this small
                break
            assert plan.captured is not None
            if any(region.has_batch_statistics for region in plan.captured.regions):
                raise refused.adding(
                    f"{number} microbatches would fit, but batch normalisation would see each by itself: give "
                    f"TrainStep microbatches={number} if that is what you want"
                ) from None
            self._pieces[_signature_of(batch)] = number
            warnings.warn(
                f"a batch of {samples} samples does not fit {refused.budget_gb:.6g} GB and is trained in "
                f"{number} microbatches, each weighted by the number of terms in its loss; a loss that compares "
                "samples with each other would differ: give TrainStep microbatches=1 to get a BudgetError instead",
                stacklevel=4,
            )
            return number
        raise least


def _signature_of(batch: Any) -> str:
    return call_signature(((batch,), {}))
