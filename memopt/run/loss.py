"""The loss of a batch, from a plain or an optimised model, checked before its backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memopt.capture.dynamo import plain_loss_call
from memopt.capture.inputs import batch_call, takes_model
from memopt.run.session import session_of

LossFunction = Callable[..., Any]


def batch_loss(model: nn.Module, batch: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    """The mean loss of `batch`, a scalar with its graph.

    With a loss function (the one that the model was optimised with, else `loss_fn`) the batch is the pair `(inputs,
    targets)`, or whatever a loss function that takes the model expects. Without one the batch is the model's input, and
    the model returns the loss.

    Raises:
        TypeError: the batch is no pair, or the model's output has no loss.
        ValueError: the loss is no scalar or has no gradient; the two loss functions differ; the model is optimised and
            in eval mode, in which it would run plain and exceed its budget.
    """
    planned = session_of(model)
    if planned is not None and not planned.model.training:
        raise ValueError(f"this {type(planned.model).__name__} is in eval mode, which runs plain; call model.train()")
    if planned is not None and planned.with_loss is not None:
        if loss_fn is not None and loss_fn is not planned.options.loss_fn:
            raise ValueError(
                f"this TrainStep has the loss_fn {loss_fn!r}, but its model was optimised with "
                f"{planned.options.loss_fn!r}; leave the loss_fn of the TrainStep out"
            )
        return scalar_loss(planned.loss(batch, model))
    args, kwargs = batch_call(batch, loss_fn)
    if loss_fn is not None and isinstance(args[0], Mapping) and not takes_model(loss_fn):
        args = (dict(args[0]), args[1])
    return scalar_loss(plain_loss_call(model, loss_fn)(*args, **kwargs))


def has_loss_function(model: nn.Module, loss_fn: LossFunction | None) -> bool:
    """Whether a batch of this model is a pair `(inputs, targets)`, because a loss function of outputs and targets was
    given: to `memopt.optimize`, or here as `loss_fn`."""
    planned = session_of(model)
    own = planned.options.loss_fn if planned is not None else None
    return (loss_fn or own) is not None and not takes_model(loss_fn or own)


def scalar_loss(output: Any) -> torch.Tensor:
    """The 0-dimensional loss in a model's output: the output itself, its `.loss`, its item "loss", or the first of a
    tuple.

    Raises `TypeError` where there is none, `ValueError` where it is no scalar or has no gradient.
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, (tuple, list)):
        loss = output[0] if output else None
    elif not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"there is no loss in the {type(output).__name__} that the model returned; have it return the loss or an "
            "object with .loss (Hugging Face's do when the batch has labels), or give a loss_fn"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"the loss must be a scalar, but its shape is {tuple(loss.shape)}; take its mean, or give a loss_fn if "
            "this is the model's prediction"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient; call the step outside of torch.no_grad(), with parameters that require "
            "gradients, and do not detach the loss"
        )
    return loss.reshape(())
