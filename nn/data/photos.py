"""An image file as a network sees it: grey or in colours, cut and scaled to the size that it was trained with.

What has to be done is done by plain means, and told in words, for a wrong sample is the usual cause of a wrong answer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nn.data.dataset import DataError

GREY = (0.299, 0.587, 0.114)  # of red, green and blue: how bright they look (ITU-R BT.601)
FITS = ("crop", "pad", "stretch")


def read_photo(path: str | Path) -> np.ndarray:
    """The image in a file, (height, width, channels) float64 in 0 .. 1; what is transparent lies on white.

    Raises
    ------
    DataError
        It is no image that can be read.
    OSError
        There is no such file.
    """
    from matplotlib.image import imread

    path = Path(path)
    with open(path, "rb"):
        pass  # what is wrong with the name is said by the system
    try:
        raw = np.asarray(imread(path))
    except Exception as error:  # a reader of images raises whatever its parts do
        raise DataError(f"{path}: no image that can be read ({error})") from error
    image = raw / (1 if raw.dtype.kind == "f" else np.iinfo(raw.dtype).max)
    image = image[..., None] if image.ndim == 2 else image
    if image.ndim != 3 or image.shape[2] not in (1, 2, 3, 4) or 0 in image.shape:
        raise DataError(f"{path}: expected (height, width, channels), given {image.shape}")
    if image.shape[2] in (2, 4):
        image, opaque = image[..., :-1], image[..., -1:]
        image = image * opaque + (1 - opaque)
    return image.astype(np.float64)


def fitted(image: np.ndarray, shape: tuple[int, int, int], fit: str = "crop") -> tuple[np.ndarray, list[str]]:
    """An image as a sample of that shape, and what was done to it, in words.

    Parameters
    ----------
    image : (height, width, 1 or 3) array in 0 .. 1
    shape : (height, width, channels)
    fit : {"crop", "pad", "stretch"}
        Where the sides' proportion differs: cut off what sticks out, add a border of the image's own mean border, or
        let it be distorted.
    """
    if shape[2] not in (1, 3):
        raise DataError(f"the network takes {shape[2]} channels: image files have one (grey) or three (colours)")
    if fit not in FITS:
        raise DataError(f"fit must be one of {', '.join(FITS)}, given {fit!r}")
    done = [f"{image.shape[1]}x{image.shape[0]} {'grey' if image.shape[2] == 1 else 'colour'}"]
    if image.shape[2] == 3 and shape[2] == 1:
        image = image @ np.array(GREY)[:, None]
        done.append("made grey")
    elif image.shape[2] == 1 and shape[2] == 3:
        image = np.repeat(image, 3, axis=2)
        done.append("grey as three channels")
    height, width = image.shape[:2]
    if abs(height * shape[1] - width * shape[0]) >= max(shape[:2]) and fit != "stretch":
        image = (_cropped if fit == "crop" else _padded)(image, shape[1] / shape[0])
        done.append(f"{'cropped' if fit == 'crop' else 'padded'} to {image.shape[1]}x{image.shape[0]}")
    if image.shape[:2] != shape[:2]:
        image = resized(image, shape[0], shape[1])
        done.append(f"scaled to {shape[1]}x{shape[0]}")
    return image, done


def border(image: np.ndarray) -> float:
    """The mean of the outermost rows and columns of (..., height, width, channels)."""
    sides = (image[..., 0, :, :], image[..., -1, :, :], image[..., :, 0, :], image[..., :, -1, :])
    return float(np.mean([side.mean() for side in sides]))


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """(height, width, channels): linear interpolation, over as many pixels as become one where it shrinks."""
    rows, columns = _weights(image.shape[0], height), _weights(image.shape[1], width)
    return np.einsum("ih,jw,hwc->ijc", rows, columns, image, optimize=True)


def _weights(before: int, after: int) -> np.ndarray:
    """(after, before): what each pixel before gives to each after; rows sum to 1."""
    ratio = before / after
    centre = (np.arange(after) + 0.5) * ratio
    distance = np.abs(centre[:, None] - (np.arange(before) + 0.5)) / max(1.0, ratio)
    weights = np.maximum(0.0, 1.0 - distance)
    return weights / weights.sum(axis=1, keepdims=True)


def _cropped(image: np.ndarray, proportion: float) -> np.ndarray:
    """The middle of an image, width / height as told."""
    height, width = image.shape[:2]
    new_height, new_width = min(height, round(width / proportion)), min(width, round(height * proportion))
    top, left = (height - new_height) // 2, (width - new_width) // 2
    return image[top : top + max(1, new_height), left : left + max(1, new_width)]


def _padded(image: np.ndarray, proportion: float) -> np.ndarray:
    """An image in the middle of a larger one, width / height as told."""
    height, width = image.shape[:2]
    new_height, new_width = max(height, round(width / proportion)), max(width, round(height * proportion))
    larger = np.full((new_height, new_width, image.shape[2]), border(image))
    top, left = (new_height - height) // 2, (new_width - width) // 2
    larger[top : top + height, left : left + width] = image
    return larger
