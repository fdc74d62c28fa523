"""A diffusion model: a U-Net with attention that predicts the noise in pictures of digits, trained within a budget.

The network is laid out as diffusers' `UNet2DModel`: residual blocks that are told the time, attention where pictures
are small, skips from the way down to the way up. The pictures ship with scikit-learn.
`python examples/diffusion_unet.py --small` takes seconds on a CPU.
"""

from __future__ import annotations

import math
import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import memopt

STEPS_OF_NOISE = 200


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm_1, self.conv_1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm_2, self.conv_2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv_1(F.silu(self.norm_1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.conv_2(F.silu(self.norm_2(y))) + self.shortcut(x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(8, width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x).flatten(2).transpose(1, 2)).chunk(3, -1)
        attended = self.out(F.scaled_dot_product_attention(q, k, v))
        return x + attended.transpose(1, 2).unflatten(-1, x.shape[-2:])


class UNet(nn.Module):
    """Predicts the noise in pictures, and returns the mean squared error."""

    def __init__(self, width: int) -> None:
        super().__init__()
        time = 4 * width
        self.width, self.time = width, nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter, self.leave = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.down = nn.ModuleList(Residual(width << level, width << (level + 1), time) for level in range(2))
        self.middle = nn.ModuleList([Residual(4 * width, 4 * width, time) for _ in range(2)])
        self.attention = Attention(4 * width)
        self.up = nn.ModuleList(Residual(6 * width << level >> 1, width << level, time) for level in (1, 0))

    def forward(self, noisy: Tensor, steps: Tensor, noise: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10_000) * torch.arange(self.width // 2, device=noisy.device) * 2 / self.width)
        angles = steps[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, skips = self.enter(noisy), []
        for block in self.down:
            skips.append(x)
            x = F.avg_pool2d(block(x, time), 2)
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1), time)
        return F.mse_loss(self.leave(x), noise)


def main() -> None:
    torch.manual_seed(0)
    small = "--small" in sys.argv
    width, samples, side, budget_gb = (32, 16, 16, 0.026) if small else (128, 64, 64, 8.0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.05, STEPS_OF_NOISE), 0)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        pictures = F.interpolate(digits[torch.randint(len(digits), (samples,))], (side, side), mode="bilinear")
        steps, noise = torch.randint(STEPS_OF_NOISE, (samples,)), torch.randn_like(pictures)
        share = kept[steps][:, None, None, None]
        noisy = share.sqrt() * pictures + (1 - share).sqrt() * noise
        return noisy.to(device), steps.to(device), noise.to(device)

    model = UNet(width).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    memopt.optimize(model, budget_gb, example_inputs=batch(), optimizer=optimizer)
    print(memopt.plan_of(model))

    for step in range(1, 5):
        given = batch()
        with memopt.measure_peak() as peak:
            loss = model(*given)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.3f}  peak {peak.bytes / 1024**3:.4f} of {budget_gb} GB")


if __name__ == "__main__":
    main()
