"""Diffusion of a sound from its onsets and its class, with EMA weights and classifier-free guidance (SyncFusion).

thinwire train --job examples/workloads/onsets.py --steps 200
thinwire compare --job examples/workloads/onsets.py --steps 200

It tests a target that is drawn anew for every batch, and an average of the weights that is evaluated in their place. All random
draws are in the batch, so that they follow from the share alone.
"""

import math

import torch
from torch import nn
from torch.func import functional_call

from thinwire.app.jobs.ema import EMA

LENGTH, CLASSES, LEVELS, BATCH, GUIDANCE, DROPPED = 64, 4, 50, 32, 2.0, 0.15
ALPHA = torch.cos(torch.linspace(0.02, 0.98, LEVELS) * math.pi / 2) ** 2  # of the signal's energy, level by level


def sounds(count, generator=None):
    """Sounds, their onsets, their classes: each onset begins a decaying wave whose frequency is the class's."""
    onsets = (torch.rand(count, LENGTH, generator=generator) < 0.05).float()
    kind = torch.randint(CLASSES, (count,), generator=generator)
    t = torch.arange(LENGTH)
    waves = torch.stack([torch.exp(-t / 6) * torch.cos(2 * math.pi * t * (k + 1) / 12) for k in range(CLASSES)])
    spectrum = torch.fft.rfft(onsets, 2 * LENGTH) * torch.fft.rfft(waves[kind], 2 * LENGTH)
    return torch.fft.irfft(spectrum)[:, :LENGTH], onsets, kind


class Denoiser(nn.Module):
    """Convolutions over time, which are told onsets, class and level; class CLASSES is none."""

    def __init__(self, width=32):
        super().__init__()
        self.enter = nn.Conv1d(2, width, 7, padding=3)
        self.kind, self.level = nn.Embedding(CLASSES + 1, width), nn.Embedding(LEVELS, width)
        self.mid = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2 * d, dilation=d) for d in (1, 2, 4))
        self.leave = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, noisy, onsets, kind, level):
        told = (self.kind(kind) + self.level(level))[:, :, None]
        x = self.enter(torch.stack([noisy, onsets], 1))
        for layer in self.mid:
            x = x + layer(torch.nn.functional.silu(x + told))
        return self.leave(x)[:, 0]


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.denoiser = Denoiser()
        self.ema = EMA(self.denoiser, 0.98)


def model():
    return Averaged()


def batches(share):
    while True:
        sound, onsets, kind = sounds(BATCH)
        told = torch.rand(BATCH) >= DROPPED  # otherwise without onsets and class, for guidance
        onsets, kind = onsets * told[:, None], torch.where(told, kind, CLASSES)
        yield sound, onsets, kind, torch.randint(LEVELS, (BATCH,)), torch.randn(BATCH, LENGTH)


def mixed(sound, noise, level):
    kept = ALPHA.to(sound.device)[level][:, None]
    return kept.sqrt() * sound + (1 - kept).sqrt() * noise


def loss(model, batch):
    """The squared error of the predicted noise."""
    sound, onsets, kind, level, noise = batch
    if torch.is_grad_enabled():
        model.ema.update(model.denoiser)
    return (model.denoiser(mixed(sound, noise, level), onsets, kind, level) - noise).square().mean()


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def sampled(denoise, onsets, kind, noise, steps=12):
    """DDIM with guidance: what is told counts GUIDANCE times as much as what is not."""
    x, alpha, none = noise, ALPHA.to(noise.device), torch.full_like(kind, CLASSES)
    levels = torch.linspace(LEVELS - 1, 0, steps).long().tolist()
    for level, after in zip(levels, [*levels[1:], None]):
        at = torch.full_like(kind, level)
        free = denoise(x, torch.zeros_like(onsets), none, at)
        found = free + GUIDANCE * (denoise(x, onsets, kind, at) - free)
        clean = ((x - (1 - alpha[level]).sqrt() * found) / alpha[level].sqrt()).clamp(-3, 3)
        x = clean if after is None else alpha[after].sqrt() * clean + (1 - alpha[after]).sqrt() * found
    return x


def evaluate(model):
    """1 − correlation of sounds that the averaged weights sample with the true ones; and the noise that both weights leave."""
    generator, here = torch.Generator().manual_seed(1), next(model.parameters()).device
    sound, onsets, kind = (one.to(here) for one in sounds(128, generator))
    noise = torch.randn(128, LENGTH, generator=generator).to(here)
    level = torch.randint(LEVELS, (128,), generator=generator).to(here)

    def by_average(*told):
        return functional_call(model.denoiser, model.ema.weights(), told)

    made = sampled(by_average, onsets, kind, noise)
    alike = torch.nn.functional.cosine_similarity(made.flatten(), sound.flatten(), 0)
    left = [
        (denoise(mixed(sound, noise, level), onsets, kind, level) - noise).square().mean()
        for denoise in (by_average, model.denoiser)
    ]
    return {"1 - correlation": 1 - alike, "denoising, EMA": left[0], "denoising": left[1]}
