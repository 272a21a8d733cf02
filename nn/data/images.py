"""An image file as a network sees it: grey or in colours, cut and scaled to the size that it was trained with.

What has to be done is done by plain means, and said in words, for a wrong sample is the usual cause of a wrong answer.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np

from nn.data.dataset import DataError
from nn.reading import open_file

GREY = (0.299, 0.587, 0.114)  # of red, green and blue: how bright they look (ITU-R BT.601)
FITS = ("crop", "pad", "stretch")
# Formats that are read, whatever the file is called. Of others some are handed to a program (PostScript).
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "PPM")
LARGEST = 256 << 20  # bytes of a file
MOST_PIXELS = 1 << 26  # of an image that is decoded: 268 MB
ENOUGH_PIXELS = 1 << 22  # of an image that is kept in floats: 100 MB
ORIENTATION = 0x0112  # of EXIF
# Orientation -> what Pillow calls the turn.
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def read_image(path: str | Path) -> tuple[np.ndarray, list[str]]:
    """Read an image file: (height, width, channels) float64 in 0 .. 1, and what was done to it, in words.

    Transparent pixels lie on white. An image is turned as its camera says (EXIF); one of more than ENOUGH_PIXELS is
    averaged over squares of pixels.

    Raises
    ------
    DataError
        It is no image of a format that is read, it is damaged, or it has more than MOST_PIXELS.
    OSError
        There is no such file, or it is no regular one.
    """
    from PIL import Image

    path = Path(path)
    with open_file(path, LARGEST) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images: those are refused below
        try:
            image = Image.open(file, formats=FORMATS)
            width, height = image.size
            if width * height <= MOST_PIXELS:
                return _decoded(image)
        except Exception as error:  # readers of image formats raise errors of many kinds
            why = f"{error}" if type(error) is not Image.UnidentifiedImageError else f"known are {', '.join(FORMATS)}"
            raise DataError(f"{path}: no image that can be read ({why})") from error
    raise DataError(
        f"{path}: {width}x{height} are {width * height:,} pixels, and at most {MOST_PIXELS:,} are read: scale it down"
    )


def _decoded(image) -> tuple[np.ndarray, list[str]]:
    """The pixels of an image of Pillow's, and what was done to them."""
    from PIL import Image

    done = []
    turn = TURNS.get(image.getexif().get(ORIENTATION))
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits a pixel, grey
        pixels = np.asarray(image)
        most = 65535 if image.format == "PNG" or pixels.max(initial=0) > 255 else 255
        image = Image.fromarray(np.clip(pixels * (255 / most), 0, 255).astype(np.float32))  # mode F
    elif image.mode not in ("L", "LA", "RGB", "RGBA") or "transparency" in image.info:
        clear = "transparency" in image.info or image.mode in ("PA", "La", "RGBa")
        grey = image.mode in ("1", "L", "La")
        image = image.convert({(True, True): "LA", (True, False): "L", (False, True): "RGBA"}.get((grey, clear), "RGB"))
    side = math.ceil(math.sqrt(image.width * image.height / ENOUGH_PIXELS))
    if side > 1:
        before, image = image.size, image.reduce(side)
        done.append(f"{before[0]}x{before[1]} averaged to {image.width}x{image.height}")
    if turn:
        image = image.transpose(Image.Transpose[turn])
        done.append("turned as the camera says")
    pixels = np.asarray(image, np.float64) / 255
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.shape[2] in (2, 4):
        pixels, opaque = pixels[..., :-1], pixels[..., -1:]
        pixels = pixels * opaque + (1 - opaque)
    return pixels, done


def fit_to_shape(image: np.ndarray, shape: tuple[int, int, int], fit: str = "crop") -> tuple[np.ndarray, list[str]]:
    """Return an image as a sample of that shape, and what was done to it, in words.

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
    """Return the mean of the outermost rows and columns of (..., height, width, channels)."""
    sides = (image[..., 0, :, :], image[..., -1, :, :], image[..., :, 0, :], image[..., :, -1, :])
    return float(np.mean([side.mean() for side in sides]))


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return (height, width, channels): linear interpolation, averaged over the pixels that become one."""
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
    """The middle of an image, width / height as given."""
    height, width = image.shape[:2]
    new_height, new_width = min(height, round(width / proportion)), min(width, round(height * proportion))
    top, left = (height - new_height) // 2, (width - new_width) // 2
    return image[top : top + max(1, new_height), left : left + max(1, new_width)]


def _padded(image: np.ndarray, proportion: float) -> np.ndarray:
    """An image in the middle of a larger one, width / height as given."""
    height, width = image.shape[:2]
    new_height, new_width = max(height, round(width / proportion)), max(width, round(height * proportion))
    larger = np.full((new_height, new_width, image.shape[2]), border(image))
    top, left = (new_height - height) // 2, (new_width - width) // 2
    larger[top : top + height, left : left + width] = image
    return larger
