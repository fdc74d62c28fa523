"""All loops by name."""

from __future__ import annotations

from tests.loops import (
    contrastive,
    generative,
    graphs,
    language,
    science,
    sequences,
    several_forwards,
    trainers,
    vision,
)
from tests.loops.loop import Loop

LOSS_OUTSIDE = "the budget that a refusal names leaves no room for what the loss outside of the model holds"
BETWEEN_REGIONS = "a batch with more words is refused: more is held in the packed nn.LSTM, and its plain step would fit"
DERIVED = "no plan has the derivatives: what is named is the plain step with a reserve of 2%, or lacks what follows"
SPARSE = "a step on sparse tensors is the plain one, and each graph that is larger than before is refused once more"
SECOND_SIDE = "the gradients of the other side's backward are seen in the first one: two budgets are named in one step"

_EACH = "exact half", "exact third", "default half", "default third"

_ALL = (
    Loop(generative.dcgan),
    Loop(generative.vae_gan),
    Loop(generative.vq_vae),
    Loop(generative.ddpm),
    Loop(generative.critic_penalty, faults=dict.fromkeys(_EACH, DERIVED)),
    Loop(contrastive.clip),
    Loop(contrastive.simclr),
    Loop(
        contrastive.contrastive_pairs,
        unforeseen="the gradients of a second forward",
        faults={"exact third": SECOND_SIDE},
    ),
    # Its loss comes close to zero in five steps: under torch.autocast it is off by 5% of the first one.
    Loop(several_forwards.triplets, loss_tolerance=0.15),
    Loop(several_forwards.four_views),
    Loop(several_forwards.preferences),
    Loop(language.nanogpt),
    Loop(language.word_lstm),
    Loop(language.distillation),
    Loop(language.mixture_of_experts),
    Loop(
        sequences.tagging,
        faults=dict.fromkeys(_EACH, BETWEEN_REGIONS),
    ),
    Loop(sequences.speech_ctc, faults={"exact third": LOSS_OUTSIDE}),
    Loop(sequences.times_net),
    Loop(sequences.mamba),
    Loop(graphs.gin),
    Loop(graphs.gat, unforeseen="larger graphs than the first, which is the smallest"),
    Loop(graphs.gcn_sparse, faults=dict.fromkeys(_EACH, SPARSE)),
    Loop(vision.segmentation),
    Loop(vision.without_forgetting, quick=("exact third",)),
    Loop(vision.detection),
    Loop(vision.mean_teacher),
    Loop(vision.multi_task, faults={"exact third": LOSS_OUTSIDE}),
    Loop(vision.feature_hooks),
    Loop(science.fno),
    Loop(science.pinn),
    Loop(science.burgers, faults=dict.fromkeys(_EACH, DERIVED)),
    Loop(science.ft_transformer),
    Loop(science.ppo),
    Loop(trainers.trl_dpo),
    Loop(trainers.trl_grpo),
    Loop(trainers.sentence_pairs),
)
LOOPS = {loop.name: loop for loop in _ALL}
