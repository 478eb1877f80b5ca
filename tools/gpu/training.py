"""What `gpu_check.py` trains: an MLP, an LSTM, a small and a large GPT, and ResNet-50, in real and in tiny sizes.

In: a workload's name, a device and sizes. Out: a `Training`, as those of `workloads.py`. Models are written here and
there, so that PyTorch alone is needed. Weights and batches are made on the CPU from seed 0, so that losses can be
compared between devices and contenders; there is no dropout, whose numbers differ between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from shared.workloads import GPT, MLP, NUM_BATCHES, Batch, GPTSize, Training
from torch import nn
from torch.nn import functional

# ----- models


class GPT2(GPT):
    """GPT-2 as published: the head shares the embedding's weight, and weights are drawn from N(0, 0.02).

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    def __init__(self, size: GPTSize) -> None:
        super().__init__(size)
        self.head.weight = self.token.weight
        self.apply(_initialise)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class CellLoop(nn.Module):
    """An LSTM cell in a Python loop over f32[time, batch, inputs]; `forward` gives the loss."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.width = width
        self.cell = nn.LSTMCell(inputs, width)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = inputs.new_zeros(inputs.shape[1], self.width)
        memory = torch.zeros_like(hidden)
        for one in inputs.unbind():
            hidden, memory = self.cell(one, (hidden, memory))
        return functional.cross_entropy(self.head(hidden), targets)


class Bottleneck(nn.Module):
    """A residual block of ResNet-50: 1x1, 3x3 and 1x1 convolutions, with batch norms."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-50 with depths (3, 4, 6, 3) and width 64: He et al., 2015, with the stride in the 3x3 convolution.

    `forward` gives the loss.
    """

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for place in range(depth):
                blocks.append(Bottleneck(channels, width << stage, 2 if stage and not place else 1))
                channels = 4 * (width << stage)
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes),
        )  # fmt: skip

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.layers(inputs), targets)


# ----- what is trained


@dataclass(slots=True)
class AutocastTraining(Training):
    """A training whose forward pass is in a block of `torch.autocast` to bfloat16, as users write it."""

    def _train(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            loss = self.forward(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.update()
        return loss.detach()


@dataclass(frozen=True, slots=True)
class Scale:
    """Real sizes or tiny ones, and what can be chosen."""

    tiny: bool = False
    channels_last: bool = False
    batch: int = 0  # of GPT-2; 0 for what `fitting_batch` says


@dataclass(frozen=True, slots=True)
class GpuWorkload:
    """One thing to train on a GPU."""

    title: str
    model: Callable[[Scale], nn.Module]
    batch: Callable[[Scale], Batch]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    autocast: bool = False
    tolerance: float = 1e-3  # of the first losses, relative to eager's: of rounding that training amplifies


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _tokens(size: GPTSize, batch: int) -> Batch:
    tokens = torch.randint(size.vocabulary, (batch, size.length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gpt2_size(scale: Scale) -> GPTSize:
    """GPT-2 small, 124 M parameters, its vocabulary padded from 50257 to a multiple of 64 as trainers do."""
    if scale.tiny:
        return GPTSize(layers=2, width=32, heads=2, vocabulary=64, length=16, fused_attention=True)
    return GPTSize(layers=12, width=768, heads=12, vocabulary=50304, length=1024, fused_attention=True)


def _small_size(scale: Scale) -> GPTSize:
    if scale.tiny:
        return GPTSize(layers=1, width=16, heads=2, vocabulary=32, length=8, fused_attention=True)
    return GPTSize(layers=6, width=384, heads=6, vocabulary=256, length=128, fused_attention=True)


def _images(scale: Scale) -> Batch:
    count, side, classes = (2, 32, 10) if scale.tiny else (64, 224, 1000)
    return torch.randn(count, 3, side, side), torch.randint(classes, (count,))


def _resnet(scale: Scale) -> nn.Module:
    return ResNet((1, 1), 8, 10) if scale.tiny else ResNet((3, 4, 6, 3), 64, 1000)


def _sequences(scale: Scale) -> Batch:
    length, batch = (4, 2) if scale.tiny else (32, 32)
    return torch.randn(length, batch, 64), torch.randint(10, (batch,))


# In order of their value: the first ones are measured even if time is short.
GPU_WORKLOADS: dict[str, GpuWorkload] = {
    "mlp": GpuWorkload(
        "MLP, 3 layers of 256, batch 64, AdamW",
        lambda scale: MLP(64, 16 if scale.tiny else 256, 10),
        lambda scale: (torch.randn(64, 64), torch.randint(10, (64,))),
        _adamw,
    ),
    "gpt2": GpuWorkload(
        "GPT-2 small, 124 M parameters, 1024 tokens, autocast to bfloat16, fused AdamW",
        lambda scale: GPT2(gpt2_size(scale)),
        lambda scale: _tokens(gpt2_size(scale), scale.batch or 2),
        _fused_adamw,
        autocast=True,
        tolerance=2e-2,
    ),
    "lstm": GpuWorkload(
        "LSTM cell of 256, loop of 32 steps, batch 32, AdamW",
        lambda scale: CellLoop(64, 8 if scale.tiny else 256, 10),
        _sequences,
        _adamw,
    ),
    "gpt-small": GpuWorkload(
        "GPT of 6 layers of 384, batch 1, 128 tokens, AdamW",
        lambda scale: GPT(_small_size(scale)),
        lambda scale: _tokens(_small_size(scale), 1),
        _adamw,
        tolerance=5e-3,
    ),
    "resnet50": GpuWorkload(
        "ResNet-50, batch 64, 224 x 224, SGD with momentum",
        _resnet,
        _images,
        _sgd,
        tolerance=5e-2,  # cuDNN rounds operands of convolutions to TF32, and batch norms amplify that
    ),
}


def make_gpu_training(name: str, device: str, scale: Scale) -> Training:
    """The workload on `device`, from seed 0."""
    workload = GPU_WORKLOADS[name]
    layout = torch.channels_last if scale.channels_last and name == "resnet50" else torch.contiguous_format
    torch.manual_seed(0)
    model = workload.model(scale)
    batches = [workload.batch(scale) for _ in range(NUM_BATCHES)]
    if layout is torch.channels_last:
        model = model.to(memory_format=layout)
        batches = [(inputs.to(memory_format=layout), targets) for inputs, targets in batches]
    model = model.to(device)
    moved = itertools.cycle([(inputs.to(device), targets.to(device)) for inputs, targets in batches])
    optimizer = workload.optimizer(model)
    kind = AutocastTraining if workload.autocast else Training
    return kind(model, optimizer, moved, model, optimizer.step)


# Bytes on a GPU of GPT-2 small's training: what does not depend on the batch (weights, gradients, AdamW's state, casts,
# the libraries' own), and per sequence of 1024 tokens (activations, logits). Estimates, made generously.
_FIXED_BYTES, _BYTES_PER_SEQUENCE = 6e9, 1.7e9


def fitting_batch(free_bytes: float, processes: int) -> int:
    """The largest batch of GPT-2, a power of two up to 16, with which so many processes fit side by side."""
    room = 0.85 * free_bytes / processes - _FIXED_BYTES
    return max((batch for batch in (1, 2, 4, 8, 16) if batch * _BYTES_PER_SEQUENCE <= room), default=1)
