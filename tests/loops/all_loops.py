"""All loops by name."""

from __future__ import annotations

from tests.loops import contrastive, generative, graphs, language, science, sequences, trainers, vision
from tests.loops.loop import Loop

_ALL = (
    Loop(generative.dcgan),
    Loop(generative.vae_gan),
    Loop(generative.vq_vae, quick=("default third",)),
    Loop(generative.ddpm),
    Loop(contrastive.clip, quick=("exact third",)),
    Loop(contrastive.simclr),
    Loop(contrastive.contrastive_pairs),
    Loop(language.nanogpt),
    Loop(language.word_lstm),
    Loop(language.distillation),
    Loop(language.mixture_of_experts, quick=("exact half",)),
    Loop(sequences.tagging),
    Loop(sequences.speech_ctc),
    Loop(sequences.times_net),
    Loop(sequences.mamba),
    Loop(graphs.gin, quick=("exact half",)),
    Loop(graphs.gat),
    Loop(graphs.gcn_sparse),
    Loop(vision.segmentation),
    Loop(vision.detection),
    Loop(vision.mean_teacher),
    Loop(vision.multi_task),
    Loop(science.fno),
    Loop(science.pinn),
    Loop(science.ft_transformer),
    Loop(science.ppo),
    Loop(trainers.trl_dpo),
    Loop(trainers.trl_grpo),
    Loop(trainers.sentence_pairs),
)
LOOPS = {loop.name: loop for loop in _ALL}
