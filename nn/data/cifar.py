"""The binary version of CIFAR-10 and CIFAR-100: records of one or two label bytes and 3072 pixels.

Pixels come as three planes (red, green, blue) of 32 rows by 32. CIFAR-10 has one label byte, CIFAR-100 two:
the coarse class and the fine one, of which the fine one is used. Source: A. Krizhevsky, Learning Multiple
Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from nn.reading import open_file

from .dataset import DataError, check_labels

PIXELS = 3 * 32 * 32
LARGEST = 1 << 28  # bytes of a file: CIFAR-100 has 154 MB in one
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_cifar(paths: Iterable[Path], label_bytes: int = 1, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 32, 32, 3) uint8, channels last, and the last label of each record (n,) uint8.

    Raises DataError where a file is not a whole number of records, or holds a label that no class has.
    """
    images, labels = [], []
    for path in paths:
        with open_file(path, LARGEST) as file:
            content = np.fromfile(file, np.uint8)
        record = label_bytes + PIXELS
        if len(content) == 0 or len(content) % record:
            raise DataError(
                f"{path}: truncated or foreign: expected a whole number of records of {record} bytes, "
                f"given {len(content)} bytes"
            )
        content = content.reshape(-1, record)
        label = content[:, label_bytes - 1]
        check_labels(label, classes, path)
        labels.append(label)
        images.append(content[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return np.concatenate(images), np.concatenate(labels)
