"""The price of an optimiser in the backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from memopt.budget.optimizer_trial import OptimizerLike
from memopt.pricing.hardware_table import Hardware
from memopt.proposals.optimizer_in_backward import OptimizerInBackward
from memopt.proposals.proposal import Proposal, StepBytes
from memopt.proposals.step_price import difference, nbytes, prices_of_each, step_price, trained


def propose_optimizer_in_backward(
    parameters: Iterable[torch.Tensor],
    optimizer: OptimizerLike,
    hardware: Hardware,
    *,
    together: Sequence[Sequence[torch.Tensor]] | None = None,
    shared: Sequence[torch.Tensor] = (),
) -> Proposal:
    """What `OptimizerInBackward` changes where autograd itself runs the backward; a backward that is one graph of
    AOTAutograd gives all its gradients at its end, and saves nothing. Nothing of the model runs.

    Gradients and temporaries of `after` are those at the worst moment, which is now within the backward, beside the
    activations that are still held then.

    Args:
        parameters: all of the model's, each once.
        optimizer, hardware: as for `propose_bf16_parameters`.
        together: parameters whose gradients come at once, those of a module (`gradients_together`); each alone if None.
        shared: those used at several places (`shared_parameters`), whose gradient waits for the last.
    """
    given = list(parameters)
    learning = trained(given)
    plain = step_price(optimizer, learning, hardware)
    each = prices_of_each(optimizer, learning, hardware, OptimizerInBackward)
    temporaries = {id(parameter): price.temporary_bytes for parameter, price in zip(learning, each, strict=True)}
    gradients, stepping = _worst_moment(learning, temporaries, together, trained(shared))
    return Proposal(
        "optimizer_in_backward",
        "each parameter is stepped as soon as the backward has its gradient, which is freed; no clipping by the norm "
        "of all gradients, no GradScaler, no accumulation",
        StepBytes(nbytes(given), nbytes(learning), plain.state_bytes, plain.temporary_bytes),
        StepBytes(nbytes(given), gradients, sum(price.state_bytes for price in each), stepping),
        host_bytes=0,
        added_seconds=difference(sum(price.seconds for price in each), plain.seconds),
        exactness="bitwise that of the same optimizer stepped parameter by parameter",
    )


def _worst_moment(
    learning: Sequence[torch.Tensor],
    temporaries: dict[int, int],
    together: Sequence[Sequence[torch.Tensor]] | None,
    shared: Sequence[torch.Tensor],
) -> tuple[int, int]:
    """Bytes of gradients and of a step's temporaries when their sum is largest."""
    waiting, held = nbytes(shared), {id(each) for each in shared}
    moments = [(waiting, temporaries[id(each)]) for each in shared]
    for group in together or [[each] for each in learning]:
        alone = [each for each in trained(group) if id(each) not in held]
        if alone:
            moments.append((waiting + nbytes(alone), max(temporaries[id(each)] for each in alone)))
    return max(moments, key=sum, default=(0, 0))


def gradients_together(model: nn.Module) -> list[list[nn.Parameter]]:
    """Module by module the parameters whose gradients one operator may make at once."""
    return [found for module in model.modules() if (found := list(module.parameters(recurse=False)))]


def shared_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that stand at several places of the model, as tied embeddings do."""
    places = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
    return [each for each in model.parameters() if places[id(each)] > 1]
