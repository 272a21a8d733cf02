"""The peer's side of bench_engine.py and bench_training.py: the same models in PyTorch, and a training step of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


def build(case: str) -> tuple[nn.Module, Callable]:
    """(model, loss) of a case of either's CASES. Images are (N, C, H, W), as PyTorch has them."""
    if case.startswith("mlp 784-30-10"):
        model = nn.Sequential(nn.Linear(784, 30), nn.Sigmoid(), nn.Linear(30, 10), nn.Sigmoid())
        return model, lambda z, y: 0.5 * ((z - F.one_hot(y, 10).to(z.dtype)) ** 2).sum() / len(y)
    if case.startswith("mlp 784-128-10"):
        return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)), F.cross_entropy
    if case.startswith("mlp 784-512-512-10"):
        layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
        return nn.Sequential(*layers), F.cross_entropy
    if case.startswith("lenet5"):
        first = [nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(*first, *second, nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)), F.cross_entropy
    if case.startswith("vgg-small"):
        layers, channels = [], 3
        for filters in (64, 128, 256):
            for inputs in (channels, filters):
                layers += [nn.Conv2d(inputs, filters, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
            channels = filters
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 10)), F.cross_entropy
    if case.startswith("resnet20"):
        layers, channels = [*convolve(3, 16), nn.ReLU()], 16
        for filters in (16, 32, 64):
            for i in range(3):
                layers += [Block(channels, filters, 2 if i == 0 and filters > 16 else 1)]
                channels = filters
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), F.cross_entropy
    if case.startswith(("transformer", "lstm")):
        return Transformer() if case.startswith("transformer") else LSTM(), lambda z, y: F.cross_entropy(
            z.reshape(-1, z.shape[-1]), y.reshape(-1)
        )
    raise ValueError(f"no PyTorch model for the case {case!r}")


def convolve(channels: int, filters: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, filters, 3, stride, 1, bias=False), nn.BatchNorm2d(filters)


class Block(nn.Module):
    """Residual block of ResNet-20, shortcuts without parameters (option A)."""

    def __init__(self, channels: int, filters: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(*convolve(channels, filters, stride), nn.ReLU(), *convolve(filters, filters))
        self.stride, self.padding = stride, (filters - channels) // 2

    def forward(self, x):
        y = self.body(x)
        if self.stride > 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(x + y)


class TransformerBlock(nn.Module):
    """Pre-norm block with fused causal attention."""

    def __init__(self, features: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)
        self.heads = heads

    def forward(self, x):
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Language model: learned positions, final norm, head without bias."""

    def __init__(self, vocabulary: int = 256, places: int = 64, features: int = 128, heads: int = 4, blocks: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.positions = nn.Parameter(0.02 * torch.randn(places, features))
        self.blocks = nn.Sequential(*(TransformerBlock(features, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(features), nn.Linear(features, vocabulary, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embedding(ids) + self.positions[: ids.shape[1]])))


class LSTM(nn.Module):
    """Language model: two layers, a bias each."""

    def __init__(self, vocabulary: int = 256, features: int = 128):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, features), nn.Linear(features, vocabulary)
        self.lstm = nn.LSTM(features, features, 2, batch_first=True)
        for name, bias in self.lstm.named_parameters():
            if name.startswith("bias_hh"):  # the second of two that are added
                nn.init.zeros_(bias).requires_grad_(False)

    def forward(self, ids):
        return self.head(self.lstm(self.embedding(ids))[0])


class Trainer:
    """One training step, eager: zero_grad, forward, loss, backward, SGD."""

    def __init__(self, case: str, lr: float, channels_last: bool, seed: int = 0):
        torch.manual_seed(seed)
        self.model, self.loss = build(case)
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.model = self.model.to(memory_format=self.format)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def batch(self, x, y):
        """NumPy arrays as this model takes them."""
        x = torch.from_numpy(x)
        if x.ndim == 4:
            x = x.permute(0, 3, 1, 2).contiguous(memory_format=self.format)
        return x, torch.from_numpy(y)

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss
