"""Loops that train several models in one step, each with its own optimiser, in their authors' manner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, kl_div, log_softmax, mse_loss, softmax

ROWS = 2048
_WIDTH = 128


@dataclass
class Trained:
    """A model with its optimiser."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> Trained:
        return cls(model.train(), kind(model.parameters()))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def mlp(given: int, returned: int, layers: int = 5, width: int = _WIDTH, *, norm: bool = False) -> nn.Module:
    hidden = [
        one
        for _ in range(layers)
        for one in (nn.Linear(width, width), *([nn.BatchNorm1d(width)] if norm else []), nn.GELU())
    ]
    return nn.Sequential(nn.Linear(given, width), *hidden, nn.Linear(width, returned))


def generator_and_critic() -> list[Trained]:
    return [Trained.of(mlp(16, 32, norm=True)), Trained.of(mlp(32, 1))]


def gan(models: list[Trained]) -> torch.Tensor:
    """The discriminator is updated first, as in pytorch/examples' DCGAN: the generator's forward waits meanwhile."""
    generator, critic = models
    ones, zeros = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    critic.model.zero_grad()
    binary_cross_entropy_with_logits(critic.model(torch.randn(ROWS, 32)), ones).backward()
    fake = generator.model(torch.randn(ROWS, 16))
    binary_cross_entropy_with_logits(critic.model(fake.detach()), zeros).backward()
    critic.optimizer.step()
    generator.model.zero_grad()
    loss = binary_cross_entropy_with_logits(critic.model(fake), ones)
    loss.backward()
    generator.optimizer.step()
    return loss.detach()


def gan_generator_first(models: list[Trained]) -> torch.Tensor:
    """As in PyTorch-GAN's `gan.py`."""
    generator, critic = models
    ones, zeros = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    generator.optimizer.zero_grad()
    fake = generator.model(torch.randn(ROWS, 16))
    loss = binary_cross_entropy_with_logits(critic.model(fake), ones)
    loss.backward()
    generator.optimizer.step()
    critic.optimizer.zero_grad()
    real = binary_cross_entropy_with_logits(critic.model(torch.randn(ROWS, 32)), ones)
    made = binary_cross_entropy_with_logits(critic.model(fake.detach()), zeros)
    ((real + made) / 2).backward()
    critic.optimizer.step()
    return loss.detach()


def wgan(models: list[Trained]) -> torch.Tensor:
    """Two steps of the critic, with clipped weights, for each one of the generator."""
    generator, critic = models
    for _ in range(2):
        critic.optimizer.zero_grad()
        fake = generator.model(torch.randn(ROWS, 16)).detach()
        (critic.model(fake).mean() - critic.model(torch.randn(ROWS, 32)).mean()).backward()
        critic.optimizer.step()
        for parameter in critic.model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    generator.optimizer.zero_grad()
    loss = -critic.model(generator.model(torch.randn(ROWS, 16))).mean()
    loss.backward()
    generator.optimizer.step()
    return loss.detach()


def large_generator_and_critic() -> list[Trained]:
    return [Trained.of(mlp(16, 32, layers=9)), Trained.of(mlp(32, 1, layers=1, width=64))]


def wgan_gp(models: list[Trained]) -> torch.Tensor:
    """As StarGAN: the critic's step has three forwards and a gradient penalty, while what the generator has made for it
    never goes back; then the generator's, whose result goes through it once more."""
    generator, critic = models
    real, noise = torch.randn(ROWS, 32), torch.randn(ROWS, 16)
    loss = -critic.model(real).mean()
    fake = generator.model(noise)
    loss = loss + critic.model(fake.detach()).mean()
    between = torch.lerp(real, fake.detach(), torch.rand(ROWS, 1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic.model(between).sum(), between, create_graph=True)
    loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
    for one in models:
        one.optimizer.zero_grad()
    loss.backward()
    critic.optimizer.step()
    fake = generator.model(noise)
    made = mse_loss(generator.model(fake[:, :16]), real) - critic.model(fake).mean()
    for one in models:
        one.optimizer.zero_grad()
    made.backward()
    generator.optimizer.step()
    return loss.detach()


def wgan_gp_through_the_generator(models: list[Trained]) -> torch.Tensor:
    """As PyTorch-GAN's `wgan_gp.py`: the critic's loss goes back through the generator, too."""
    generator, critic = models
    critic.optimizer.zero_grad()
    real, noise = torch.randn(ROWS, 32), torch.randn(ROWS, 16)
    fake = generator.model(noise)
    loss = critic.model(fake).mean() - critic.model(real).mean()
    between = torch.lerp(real, fake.detach(), torch.rand(ROWS, 1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic.model(between).sum(), between, create_graph=True)
    loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
    loss.backward()
    critic.optimizer.step()
    generator.optimizer.zero_grad()
    (-critic.model(generator.model(noise)).mean()).backward()
    generator.optimizer.step()
    return loss  # with its graph, which the loop holds until the next step


def actor_and_critics() -> list[Trained]:
    return [Trained.of(mlp(16, 8)), Trained.of(mlp(24, 1)), Trained.of(mlp(24, 1))]


def wide_actor_and_critics() -> list[Trained]:
    """A new gradient takes a good part of a step, beside those that are there when a forward begins."""
    sizes = ((16, 8), (24, 1), (24, 1))
    return [Trained.of(mlp(given, returned, layers=2, width=512)) for given, returned in sizes]


def two_critics(models: list[Trained]) -> torch.Tensor:
    """As TD3 and SAC: both critics by one loss, then the actor by the first of them."""
    actor, first, second = models
    state, target = torch.randn(ROWS, 16), torch.randn(ROWS, 1)
    both = torch.cat([state, torch.randn(ROWS, 8)], 1)
    loss = mse_loss(first.model(both), target) + mse_loss(second.model(both), target)
    for critic in (first, second):
        critic.optimizer.zero_grad()
    loss.backward()
    for critic in (first, second):
        critic.optimizer.step()
    actor.optimizer.zero_grad()
    (-first.model(torch.cat([state, actor.model(state)], 1)).mean()).backward()
    actor.optimizer.step()
    return loss.detach()


def two_pupils() -> list[Trained]:
    return [Trained.of(mlp(32, 10)), Trained.of(mlp(32, 10, layers=7), torch.optim.AdamW)]


def mutual(models: list[Trained]) -> torch.Tensor:
    """Deep mutual learning: both forwards, then both backwards in the same order."""
    batch, labels = torch.randn(ROWS, 32), torch.randint(0, 10, (ROWS,))
    logits = [one.model(batch) for one in models]
    total = torch.zeros(())
    for number, one in enumerate(models):
        own, other = logits[number], logits[1 - number].detach()
        loss = cross_entropy(own, labels)
        loss = loss + kl_div(log_softmax(own, 1), softmax(other, 1), reduction="batchmean")
        one.optimizer.zero_grad()
        loss.backward()
        total += loss.detach()
    for one in models:
        one.optimizer.step()
    return total


def teacher_trained_too(models: list[Trained]) -> torch.Tensor:
    """The teacher learns from the labels, the pupil from the teacher, by one loss."""
    teacher, pupil = models
    batch, labels = torch.randn(ROWS, 32), torch.randint(0, 10, (ROWS,))
    taught = teacher.model(batch)
    learnt = pupil.model(batch)
    loss = cross_entropy(taught, labels) + mse_loss(learnt, taught.detach())
    loss.backward()
    teacher.step()
    pupil.step()
    return loss.detach()


def halves() -> list[Trained]:
    return [Trained.of(mlp(32, 16, layers=6)), Trained.of(mlp(16, 32, layers=4))]


def encoder_and_decoder(models: list[Trained]) -> torch.Tensor:
    encoder, decoder = models
    batch = torch.randn(ROWS, 32)
    loss = mse_loss(decoder.model(encoder.model(batch)), batch)
    loss.backward()
    encoder.step()
    decoder.step()
    return loss.detach()


def three() -> list[Trained]:
    return [Trained.of(mlp(32, 16)), Trained.of(mlp(16, 32)), Trained.of(mlp(32, 1))]


def autoencoder_and_critic(models: list[Trained]) -> torch.Tensor:
    """A VAE-GAN without sampling: the critic is updated while encoder and decoder wait."""
    encoder, decoder, critic = models
    batch, ones, zeros = torch.randn(ROWS, 32), torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    made = decoder.model(encoder.model(batch))
    critic.optimizer.zero_grad()
    judged = binary_cross_entropy_with_logits(critic.model(made.detach()), zeros)
    (judged + binary_cross_entropy_with_logits(critic.model(batch), ones)).backward()
    critic.optimizer.step()
    loss = mse_loss(made, batch) + 0.1 * binary_cross_entropy_with_logits(critic.model(made), ones)
    encoder.optimizer.zero_grad()
    decoder.optimizer.zero_grad()
    loss.backward()
    encoder.optimizer.step()
    decoder.optimizer.step()
    return loss.detach()


Step = Callable[[list[Trained]], torch.Tensor]
LOOPS: dict[str, tuple[Callable[[], list[Trained]], Step]] = {
    "gan": (generator_and_critic, gan),
    "gan_generator_first": (generator_and_critic, gan_generator_first),
    "wgan": (generator_and_critic, wgan),
    "two_critics": (actor_and_critics, two_critics),
    "wide_critics": (wide_actor_and_critics, two_critics),
    "mutual": (two_pupils, mutual),
    "teacher_trained_too": (two_pupils, teacher_trained_too),
    "encoder_and_decoder": (halves, encoder_and_decoder),
    "autoencoder_and_critic": (three, autoencoder_and_critic),
}
