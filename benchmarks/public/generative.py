"""Drivers of public programs that train generators: adversarial ones, flows and diffusion."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.public.program import Log, Optimize, batches, definitions, epochs, imported, package


def wgan_gp(optimize: Optimize, log: Log) -> None:
    """implementations/wgan_gp/wgan_gp.py: a gradient penalty, the generator's step after every fifth of the critic."""
    settings = SimpleNamespace(latent_dim=100)
    names = definitions(
        "PyTorch-GAN",
        "implementations/wgan_gp/wgan_gp.py",
        opt=settings,
        img_shape=(1, 28, 28),
        Tensor=torch.FloatTensor,
    )
    generator, discriminator = names.Generator(), names.Discriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.0002, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.0002, betas=(0.5, 0.999))
    optimize(generator, optimizer=optimizer_g)
    optimize(discriminator, optimizer=optimizer_d)
    for step, (imgs,) in enumerate(epochs(batches(torch.rand(700, 1, 28, 28) * 2 - 1, size=128), 11)):
        optimizer_d.zero_grad()
        z = torch.randn(len(imgs), 100)
        fake = generator(z)
        real_validity, fake_validity = discriminator(imgs), discriminator(fake)
        penalty = names.compute_gradient_penalty(discriminator, imgs.data, fake.data)
        d_loss = -torch.mean(real_validity) + torch.mean(fake_validity) + 10 * penalty
        d_loss.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        if step % 5 == 0:
            g_loss = -torch.mean(discriminator(generator(z)))
            g_loss.backward()
            optimizer_g.step()
        log(d=d_loss)


def cyclegan(optimize: Optimize, log: Log) -> None:
    """implementations/cyclegan: two generators under one optimizer, each called three times before the backward, two
    discriminators, a buffer of earlier images."""
    models = imported("PyTorch-GAN", "models", within="implementations/cyclegan")
    buffer = definitions("PyTorch-GAN", "implementations/cyclegan/utils.py").ReplayBuffer
    shape = 3, 64, 64
    g_ab, g_ba = models.GeneratorResNet(shape, 2), models.GeneratorResNet(shape, 2)
    d_a, d_b = models.Discriminator(shape), models.Discriminator(shape)
    for one in (g_ab, g_ba, d_a, d_b):
        one.apply(models.weights_init_normal)
    betas = 0.5, 0.999
    optimizer_g = torch.optim.Adam(itertools.chain(g_ab.parameters(), g_ba.parameters()), lr=0.0002, betas=betas)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.0002, betas=betas) for one in (d_a, d_b)]
    adversarial, cycle, identity = nn.MSELoss(), nn.L1Loss(), nn.L1Loss()
    optimize(g_ab, optimizer=optimizer_g)
    optimize(g_ba, optimizer=optimizer_g)
    optimize(d_a, optimizer=optimizers[0])
    optimize(d_b, optimizer=optimizers[1])
    buffers = buffer(), buffer()
    for real_a, real_b in epochs(batches(torch.rand(7, *shape), torch.rand(7, *shape), size=2), 8):
        valid, fake = torch.ones(len(real_a), *d_a.output_shape), torch.zeros(len(real_a), *d_a.output_shape)
        optimizer_g.zero_grad()
        loss_identity = (identity(g_ba(real_a), real_a) + identity(g_ab(real_b), real_b)) / 2
        fake_b, fake_a = g_ab(real_a), g_ba(real_b)
        loss_gan = (adversarial(d_b(fake_b), valid) + adversarial(d_a(fake_a), valid)) / 2
        loss_cycle = (cycle(g_ba(fake_b), real_a) + cycle(g_ab(fake_a), real_b)) / 2
        loss_g = loss_gan + 10 * loss_cycle + 5 * loss_identity
        loss_g.backward()
        optimizer_g.step()
        losses = []
        for model, optimizer, real, made, earlier in zip(
            (d_a, d_b), optimizers, (real_a, real_b), (fake_a, fake_b), buffers, strict=True
        ):
            optimizer.zero_grad()
            loss_real = adversarial(model(real), valid)
            loss_fake = adversarial(model(earlier.push_and_pop(made).detach()), fake)
            losses.append((loss_real + loss_fake) / 2)
            losses[-1].backward()
            optimizer.step()
        log(g=loss_g, a=losses[0], b=losses[1])


def waveglow(optimize: Optimize, log: Log) -> None:
    """train.py: a flow with affine couplings, a determinant for each, outputs of several kinds in one tuple."""
    names = definitions("waveglow", "glow.py")
    model = names.WaveGlow(80, 6, 8, 4, 2, {"n_layers": 4, "n_channels": 32, "kernel_size": 3})
    criterion, optimizer = names.WaveGlowLoss(1.0), torch.optim.Adam(model.parameters(), lr=1e-4)
    optimize(model, optimizer=optimizer)
    model.train()
    for mel, audio in epochs(batches(torch.randn(10, 80, 16), torch.rand(10, 4096) - 0.5, size=4), 8):
        model.zero_grad()
        outputs = model((mel, audio))
        loss = criterion(outputs)
        loss.backward()
        optimizer.step()
        log(loss=loss)


def glow(optimize: Optimize, log: Log) -> None:
    """train.py: a flow whose first forward, without gradients, initialises its parameters by the batch; samples."""
    model = definitions("glow-pytorch", "model.py", logabs=lambda x: torch.log(torch.abs(x))).Glow(
        3, 4, 2, affine=True, conv_lu=True
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    optimize(model, optimizer=optimizer)
    for step, (image,) in enumerate(epochs(batches(torch.rand(20, 3, 32, 32), size=8), 9)):
        image = torch.floor(image * 255 / 8) / 32 - 0.5
        noisy = image + torch.rand_like(image) / 32
        if step == 0:
            with torch.no_grad():
                model(noisy)
            continue
        log_p, logdet, _ = model(noisy)
        loss = (-(logdet.mean() + log_p) / (np.log(2) * 32 * 32 * 3)).mean()
        model.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss)
        if step % 4 == 0:
            with torch.no_grad():
                model.reverse([torch.randn(4, 6, 16, 16) * 0.7, torch.randn(4, 24, 8, 8) * 0.7])
            log()


def stargan(optimize: Optimize, log: Log) -> None:
    """solver.py: three forwards of the discriminator and a gradient penalty, the generator called twice in a chain."""
    models, gradient = imported("stargan", "model"), definitions("stargan", "solver.py").Solver.gradient_penalty
    generator, discriminator = models.Generator(16, 5, 2), models.Discriminator(32, 16, 5, 3)
    g_optimizer = torch.optim.Adam(generator.parameters(), 0.0001, [0.5, 0.999])
    d_optimizer = torch.optim.Adam(discriminator.parameters(), 0.0001, [0.5, 0.999])
    optimize(generator, optimizer=g_optimizer)
    optimize(discriminator, optimizer=d_optimizer)
    solver = SimpleNamespace(device="cpu")
    for step, (x_real, c_org) in enumerate(
        epochs(batches(torch.rand(20, 3, 32, 32), torch.randint(0, 2, (20, 5)).float(), size=8), 9)
    ):
        c_trg = c_org[torch.randperm(len(c_org))].clone()
        out_src, out_cls = discriminator(x_real)
        d_loss = -torch.mean(out_src) + F.binary_cross_entropy_with_logits(out_cls, c_org, reduction="sum") / len(c_org)
        x_fake = generator(x_real, c_trg)
        out_src, _ = discriminator(x_fake.detach())
        alpha = torch.rand(len(x_real), 1, 1, 1)
        x_hat = (alpha * x_real.data + (1 - alpha) * x_fake.data).requires_grad_(True)
        d_loss = d_loss + torch.mean(out_src) + 10 * gradient(solver, discriminator(x_hat)[0], x_hat)
        g_optimizer.zero_grad()
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        if (step + 1) % 2 == 0:
            x_fake = generator(x_real, c_trg)
            out_src, out_cls = discriminator(x_fake)
            g_loss = F.binary_cross_entropy_with_logits(out_cls, c_trg, reduction="sum") / len(c_trg)
            g_loss = g_loss - torch.mean(out_src) + 10 * torch.mean(torch.abs(x_real - generator(x_fake, c_org)))
            g_optimizer.zero_grad()
            d_optimizer.zero_grad()
            g_loss.backward()
            g_optimizer.step()
        log(d=d_loss)


def guided_diffusion(optimize: Optimize, log: Log) -> None:
    """train_util.py: the authors' own checkpoints (an autograd function), microbatches, an average of the weights."""
    utils = imported("guided-diffusion", "guided_diffusion.script_util")
    defaults = utils.model_and_diffusion_defaults()
    defaults |= {
        "image_size": 64, "num_channels": 32, "num_res_blocks": 1, "num_heads": 2, "use_checkpoint": True,
        "attention_resolutions": "16", "learn_sigma": True, "dropout": 0.1,
    }  # fmt: skip
    model, diffusion = utils.create_model_and_diffusion(**defaults)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    optimize(model, optimizer=optimizer)
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    for (batch,) in epochs(batches(torch.rand(9, 3, 64, 64) * 2 - 1, size=4), 8):
        optimizer.zero_grad()
        total = 0.0
        for micro in batch.split(2):
            t = torch.randint(0, 1000, (len(micro),))
            losses = diffusion.training_losses(model, micro, t)
            loss = losses["loss"].mean()
            loss.backward()
            total += loss.item()
        optimizer.step()
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.mul_(0.99).add_(parameter.detach(), alpha=0.01)
        log(loss=total)


def dit(optimize: Optimize, log: Log) -> None:
    """train.py: labels left out at random, the loss computed by the authors' diffusion around the model."""
    package("timm")
    model = definitions("DiT", "models.py").DiT(
        input_size=16, patch_size=2, hidden_size=128, depth=6, num_heads=4, num_classes=10
    )
    diffusion = imported("DiT", "diffusion").create_diffusion(timestep_respacing="")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    optimize(model, optimizer=optimizer)
    model.train()
    for x, y in epochs(batches(torch.randn(20, 4, 16, 16), torch.randint(0, 10, (20,)), size=8), 8):
        t = torch.randint(0, diffusion.num_timesteps, (len(x),))
        loss = diffusion.training_losses(model, x, t, {"y": y})["loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss)
