"""Check of the shape of images that a model takes."""

from nn.core.layer import Shape


def image_shape(model: str, in_shape: Shape, at_least: int) -> tuple[int, int, int]:
    """Return (height, width, channels) of the samples; refuse others, with the name of the model and what it needs."""
    if len(in_shape) != 3 or min(in_shape[:2]) < at_least:
        raise ValueError(
            f"{model} takes images (height, width, channels) of at least {at_least}x{at_least}, "
            f"given samples of shape {tuple(in_shape)}"
        )
    return tuple(in_shape)
