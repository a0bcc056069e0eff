"""Speech whose upper band is missing gets it back: a generator of two streams, amplitude and phase, against a discriminator (AP-BWE).

thinwire train --job examples/workloads/speech.py --steps 150
thinwire compare --job examples/workloads/speech.py --steps 150

It tests two models and two optimizers, and a loss for each. The generator's loss passes through the discriminator and does not
train it. Speech is synthetic: a voice with a moving pitch and three formants, whose upper partials follow from the lower ones.
"""

import math

import torch
from torch import nn
from torch.nn.functional import relu

RATE, SAMPLES, FFT, HOP, BATCH = 4000, 768, 64, 16, 4
BINS, CUT = FFT // 2 + 1, FFT // 4  # bins from CUT on are missing
WINDOW = torch.hann_window(FFT)


def voices(count, generator=None):
    """Made voices: [count, SAMPLES]."""
    t = torch.arange(SAMPLES) / RATE

    def drawn(low, high, *shape):
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    pitch = drawn(90, 220, 1) * (1 + 0.1 * torch.sin(2 * math.pi * drawn(2, 5, 1) * t + drawn(0, 6, 1)))
    angle = 2 * math.pi * pitch.cumsum(1) / RATE
    formants = torch.cat([drawn(300, 700, 1), drawn(900, 1400, 1)], 1)
    # The upper one follows from the lower ones.
    formants = torch.cat([formants, formants.sum(1, keepdim=True) * 0.9], 1)
    sound = torch.zeros(count, SAMPLES)
    for partial in range(1, 20):
        f = pitch * partial
        gain = (1 / (1 + ((f[:, None] - formants[:, :, None]) / 120) ** 2)).sum(1) * (f < RATE / 2)
        sound += gain * torch.sin(partial * angle)
    return sound / sound.std(1, keepdim=True)


def spectra(sound):
    """Log amplitude and phase, each [count, BINS, frames]."""
    spectrum = torch.stft(sound, FFT, HOP, window=WINDOW.to(sound.device), return_complex=True)
    return (spectrum.abs() + 1e-2).log(), spectrum.angle()


class Stream(nn.Module):
    """Convolutions over time."""

    def __init__(self, outputs, width=48):
        super().__init__()
        self.enter = nn.Conv1d(2 * BINS, width, 5, padding=2)
        self.mid = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(2))
        self.leave = nn.Conv1d(width, outputs, 5, padding=2)


class Generator(nn.Module):
    """Two streams, which hear each other after every layer."""

    def __init__(self):
        super().__init__()
        self.amplitude, self.phase = Stream(BINS), Stream(2 * BINS)

    def forward(self, amplitude, phase):
        given = torch.cat([amplitude, phase], 1)
        a, p = torch.tanh(self.amplitude.enter(given)), torch.tanh(self.phase.enter(given))
        for of_a, of_p in zip(self.amplitude.mid, self.phase.mid):
            a, p = a + torch.tanh(of_a(a + p)), p + torch.tanh(of_p(a + p))
        real, imaginary = self.phase.leave(p).chunk(2, 1)
        upper = (torch.arange(BINS, device=a.device) >= CUT)[None, :, None]
        return torch.where(upper, self.amplitude.leave(a), amplitude), torch.where(
            upper, torch.atan2(imaginary, real + 1e-6), phase
        )


class Both(nn.Module):
    """Both models, as parameters of one module."""

    def __init__(self):
        super().__init__()
        self.generator = Generator()
        self.discriminator = nn.Sequential(
            *(nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.LeakyReLU(0.2), nn.Conv2d(12, 24, 5, stride=2, padding=2)),
            *(nn.LeakyReLU(0.2), nn.Conv2d(24, 1, 3, padding=1)),
        )


def model():
    return Both()


def batches(share):
    while True:
        yield spectra(voices(BATCH))


def narrow(amplitude, phase):
    """The same without the upper band."""
    upper = (torch.arange(BINS, device=phase.device) >= CUT)[None, :, None]
    return amplitude.masked_fill(upper, math.log(1e-2)), phase.masked_fill(upper, 0.0)


def wrapped(difference):
    """The difference of angles, the shorter way round."""
    return (difference - 2 * math.pi * (difference / (2 * math.pi)).round()).abs()


def loss(model, batch):
    """The generator's, then the discriminator's (hinge); each optimizer descends its own."""
    amplitude, phase = batch
    made, turned = model.generator(*narrow(amplitude, phase))
    judge = model.discriminator
    told = judge(made[:, None])
    near = (made - amplitude).square().mean() + 0.1 * (wrapped(turned - phase) * amplitude.exp()).mean()
    true, false = judge(amplitude[:, None]), judge(made.detach()[:, None])
    return [near - 0.02 * told.mean(), relu(1 - true).mean() + relu(1 + false).mean()]


def optimizer(model):
    return [
        torch.optim.AdamW(model.generator.parameters(), lr=2e-3, betas=(0.8, 0.99)),
        torch.optim.AdamW(model.discriminator.parameters(), lr=5e-4, betas=(0.8, 0.99)),
    ]


def evaluate(model):
    """Log-spectral distance of the upper band in dB, as the field has it; the phase's error in radians; the narrow band's distance."""
    here = next(model.parameters()).device
    amplitude, phase = (one.to(here) for one in spectra(voices(32, torch.Generator().manual_seed(1))))
    made, turned = model.generator(*narrow(amplitude, phase))
    upper, decibels = slice(CUT, BINS), 20 / math.log(10)
    distance = decibels * (made - amplitude)[:, upper].square().mean(1).sqrt().mean()
    return {"LSD, dB": distance, "phase, rad": wrapped(turned - phase)[:, upper].mean()}
