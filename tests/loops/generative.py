"""Training loops of generative models of images."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.loops.loop import Log, Optimize


def dcgan(optimize: Optimize, log: Log) -> None:
    """DCGAN, two models, as in pytorch/examples. The discriminator learns from real and made images in two
    backwards; the last batch is smaller."""
    nz, ngf, ndf = 32, 16, 16

    def weights_init(m: nn.Module) -> None:
        if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(m.weight, 0.0, 0.02)
        elif isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.weight, 1.0, 0.02)
            nn.init.zeros_(m.bias)

    net_g = nn.Sequential(
        nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 4), nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
        nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False), nn.Tanh(),
    ).apply(weights_init)  # fmt: skip
    net_d = nn.Sequential(
        nn.Conv2d(3, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf * 2, ndf * 4, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 4), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf * 4, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
    ).apply(weights_init)  # fmt: skip
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=0.0002, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=0.0002, betas=(0.5, 0.999))
    optimize(net_d, optimizer=optimizer_d)
    optimize(net_g, optimizer=optimizer_g)
    criterion = nn.BCELoss()
    loader = DataLoader(TensorDataset(torch.rand(360, 3, 32, 32) * 2 - 1), batch_size=64, shuffle=True)
    for _ in range(2):
        for (real,) in loader:
            # (1) update D: maximize log(D(x)) + log(1 - D(G(z)))
            net_d.zero_grad()
            label = torch.full((real.size(0),), 1.0)
            err_real = criterion(net_d(real).view(-1), label)
            err_real.backward()
            fake = net_g(torch.randn(real.size(0), nz, 1, 1))
            err_fake = criterion(net_d(fake.detach()).view(-1), label.fill_(0.0))
            err_fake.backward()
            optimizer_d.step()
            # (2) update G: maximize log(D(G(z)))
            net_g.zero_grad()
            err_g = criterion(net_d(fake).view(-1), label.fill_(1.0))
            err_g.backward()
            optimizer_g.step()
            log(d=err_real.item() + err_fake.item(), g=err_g)


def vae_gan(optimize: Optimize, log: Log) -> None:
    """A VAE-GAN, three models: encoder, decoder, discriminator. One sum of losses reaches encoder and decoder; the
    discriminator's parameters are frozen meanwhile."""
    width, latent = 256, 32

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(256, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.GELU()
            )
            self.mu, self.logvar = nn.Linear(width, latent), nn.Linear(width, latent)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x)
            return self.mu(h), self.logvar(h)

    def mlp(first: int, last: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(first, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
            nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, last),
        )  # fmt: skip

    encoder, decoder, discriminator = Encoder(), mlp(latent, 256), mlp(256, 1)
    opt_vae = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    opt_d = torch.optim.AdamW(discriminator.parameters(), lr=1e-3)
    for model, opt in ((encoder, opt_vae), (decoder, opt_vae), (discriminator, opt_d)):
        optimize(model, optimizer=opt)
    loader = DataLoader(TensorDataset(torch.rand(9216, 256)), batch_size=1536, shuffle=True)
    for _ in range(2):
        for (x,) in loader:
            discriminator.requires_grad_(False)
            mu, logvar = encoder(x)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            made = decoder(z)
            reconstruction = F.mse_loss(made.sigmoid(), x)
            divergence = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()
            fool = F.softplus(-discriminator(made.sigmoid())).mean()
            opt_vae.zero_grad()
            (reconstruction + 0.1 * divergence + 0.01 * fool).backward()
            opt_vae.step()
            discriminator.requires_grad_(True)
            both = torch.cat([x, made.detach().sigmoid()])
            real = torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)])
            loss_d = F.binary_cross_entropy_with_logits(discriminator(both), real)
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            log(reconstruction=reconstruction, divergence=divergence, d=loss_d)


def vq_vae(optimize: Optimize, log: Log) -> None:
    """VQ-VAE: straight-through codes, codebook and commitment losses that the model returns beside the
    reconstruction; gradients are clipped."""

    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.block = nn.Sequential(
                nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, width, 1)
            )

        def forward(self, x: Tensor) -> Tensor:
            return x + self.block(x)

    class Quantizer(nn.Module):
        def __init__(self, codes: int, width: int, beta: float = 0.25) -> None:
            super().__init__()
            self.beta, self.embedding = beta, nn.Embedding(codes, width)
            self.embedding.weight.data.uniform_(-1.0 / codes, 1.0 / codes)

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            z = z.permute(0, 2, 3, 1).contiguous()
            flat, e = z.view(-1, z.shape[-1]), self.embedding.weight
            d = flat.pow(2).sum(1, keepdim=True) + e.pow(2).sum(1) - 2 * flat @ e.t()
            indices = d.argmin(1)
            one_hot = torch.zeros(len(indices), len(e)).scatter_(1, indices.unsqueeze(1), 1)
            z_q = (one_hot @ e).view(z.shape)
            loss = self.beta * (z_q.detach() - z).pow(2).mean() + (z_q - z.detach()).pow(2).mean()
            z_q = z + (z_q - z).detach()
            used = one_hot.mean(0)
            perplexity = torch.exp(-(used * torch.log(used + 1e-10)).sum())
            return loss, z_q.permute(0, 3, 1, 2).contiguous(), perplexity

    class VQVAE(nn.Module):
        def __init__(self, width: int = 32) -> None:
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(3, width, 4, 2, 1),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, 1, 1),
                Residual(width),
                Residual(width),
            )
            self.quantizer = Quantizer(64, width)
            self.decoder = nn.Sequential(
                Residual(width), Residual(width), nn.ConvTranspose2d(width, width, 4, 2, 1), nn.ReLU(),
                nn.Conv2d(width, 3, 3, 1, 1),
            )  # fmt: skip

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            embedding_loss, z_q, perplexity = self.quantizer(self.encoder(x))
            return embedding_loss, self.decoder(z_q), perplexity

    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, amsgrad=True)
    optimize(model, optimizer=optimizer)
    data = torch.rand(8 * 24, 3, 32, 32)
    variance = data.var()
    model.train()
    for step in range(10):
        x = data[step % 8 * 24 :][:24]
        optimizer.zero_grad()
        embedding_loss, x_hat, perplexity = model(x)
        reconstruction = ((x_hat - x) ** 2).mean() / variance
        loss = reconstruction + embedding_loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log(loss=loss, perplexity=perplexity.detach())


def ddpm(optimize: Optimize, log: Log) -> None:
    """DDPM: a U-Net predicts noise; an average of its parameters follows each step; the rate warms up; images are
    sampled from the average between epochs."""

    class Block(nn.Module):
        def __init__(self, first: int, last: int, time: int) -> None:
            super().__init__()
            self.norm1, self.conv1 = nn.GroupNorm(4, first), nn.Conv2d(first, last, 3, padding=1)
            self.norm2, self.conv2 = nn.GroupNorm(4, last), nn.Conv2d(last, last, 3, padding=1)
            self.time, self.dropout = nn.Linear(time, last), nn.Dropout(0.1)
            self.skip = nn.Conv2d(first, last, 1) if first != last else nn.Identity()

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
            return self.skip(x) + self.conv2(self.dropout(F.silu(self.norm2(h))))

    class UNet(nn.Module):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.embed = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
            self.first = nn.Conv2d(1, width, 3, padding=1)
            self.down1, self.down2 = Block(width, width, 4 * width), Block(width, 2 * width, 4 * width)
            self.middle = Block(2 * width, 2 * width, 4 * width)
            self.up2, self.up1 = Block(4 * width, width, 4 * width), Block(2 * width, width, 4 * width)
            self.last, self.width = nn.Conv2d(width, 1, 3, padding=1), width

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            freqs = torch.exp(torch.arange(self.width // 2, device=x.device) * -0.5)
            angles = t[:, None].float() * freqs[None]
            temb = self.embed(torch.cat([angles.sin(), angles.cos()], dim=1))
            h0 = self.first(x)
            h1 = self.down1(h0, temb)
            h2 = self.down2(F.avg_pool2d(h1, 2), temb)
            h = self.middle(h2, temb)
            h = self.up2(torch.cat([h, h2], 1), temb)
            h = self.up1(torch.cat([F.interpolate(h, scale_factor=2, mode="nearest"), h1], 1), temb)
            return self.last(F.silu(h))

    T = 100
    alphas_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, T), 0)
    net = UNet()
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    optimize(net, optimizer=optimizer)
    loader = DataLoader(TensorDataset(torch.rand(224, 1, 28, 28) * 2 - 1), batch_size=48, shuffle=True)
    for _ in range(2):
        for (x0,) in loader:
            t = torch.randint(0, T, (x0.shape[0],))
            noise = torch.randn_like(x0)
            a = alphas_bar[t][:, None, None, None]
            loss = F.mse_loss(net(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                for average, parameter in zip(ema.parameters(), net.parameters(), strict=True):
                    average.lerp_(parameter, 0.05)
            log(loss=loss)
        with torch.no_grad():
            x = torch.randn(4, 1, 28, 28)
            for step in range(T - 1, T - 4, -1):
                x = x - 0.1 * ema(x, torch.full((4,), step))


def critic_penalty(optimize: Optimize, log: Log) -> None:
    """The critic of a WGAN-GP in the manner of PyTorch-GAN: two forwards wait while a third one, between real and
    generated images, is differentiated by its input, and the norm of that gradient is a part of the loss."""
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2)]
    critic = nn.Sequential(*layers, nn.Conv2d(16, 32, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(32 * 64, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.5, 0.9))
    optimize(critic, optimizer=optimizer)
    for _ in range(5):
        real, fake = torch.rand(2, 24, 3, 16, 16).unbind()
        real_validity, fake_validity = critic(real), critic(fake)
        alpha = torch.rand(24, 1, 1, 1)
        between = (alpha * real + (1 - alpha) * fake).requires_grad_()
        values = critic(between)
        (slope,) = torch.autograd.grad(values, between, torch.ones_like(values), create_graph=True, retain_graph=True)
        penalty = (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
        loss = fake_validity.mean() - real_validity.mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss, penalty=penalty)
