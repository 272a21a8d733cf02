"""Made-up data: images of any shape to measure speed with, and points in the plane to look at."""

from __future__ import annotations

import math

import numpy as np


def random_images(count: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes (count, H, W, C) and labels (count,): the work of a real data set without its content."""
    random = np.random.default_rng(np.random.SeedSequence(seed))
    return random.integers(0, 256, (count, *shape), np.uint8), random.integers(0, classes, count)


def spirals(
    count: int, classes: int = 3, turns: float = 1.0, noise: float = 0.03, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Interleaved spirals: points (count, 2) within about the unit circle, and the arm (count,) of each.

    No line separates the arms, so the picture of a decision boundary shows what hidden layers are for.
    """
    random = np.random.default_rng(np.random.SeedSequence(seed))
    arm = np.arange(count) % classes
    radius = np.sqrt(random.uniform(0.01, 1.0, count))
    angle = 2 * math.pi * (arm / classes + turns * radius)
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return points + random.normal(0.0, noise, points.shape), arm
