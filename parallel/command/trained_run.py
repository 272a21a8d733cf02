"""The network that a run has left: what is written beside it at the end, and how it is opened again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import nn
from nn.data import Data, images
from nn.data.text import VOCABULARY
from parallel.command.options import Options
from parallel.command.parsing import resumed
from parallel.settings import OptionError, shortened
from parallel.state.sharded_checkpoints import ShardedCheckpoints

FILE = "network.npz"
LOOKED_AT = 200  # training samples, for what their borders are like


def about(options: Options, data: Data) -> dict[str, Any]:
    """What using the network takes beside it: how samples were scaled, what its outputs mean."""
    train = data.train
    facts: dict[str, Any] = {"data": data.name, "outputs": outputs(options), "classes": data.classes}
    if data.class_names != VOCABULARY:
        facts["class_names"] = list(data.class_names)
    if options.hidden_share:
        facts["hidden"] = options.hidden_share
    if len(data.in_shape) == 3:
        white = 16 if data.name == "digits" else 255 if train.x.dtype.kind in "iu" else 1  # as it is stored
        facts |= {"white": white, "border": images.border(np.asarray(train.x[:LOOKED_AT], float)) / white}
    for name in ("scale", "shift"):
        if (value := getattr(train, name)) is not None:
            facts[name] = np.asarray(value).tolist()
    return facts


def outputs(options: Options) -> str:
    """What the outputs are: logits, scores of their own, or values."""
    if options.loss in ("cross-entropy", "bce"):
        return "logits" if options.loss == "cross-entropy" else "logits of each"
    return "values"


def opened(place: str) -> nn.Model:
    """The network of a run's directory, or of a file that nn.save wrote.

    A run that was stopped has no network yet: then its best checkpoint is taken, and what made the network.

    Raises
    ------
    OptionError
        There is none.
    nn.FileError, OSError
        The file is not what it says, or cannot be read.
    """
    path = Path(place)
    if path.is_file():
        return nn.load(path)
    if (path / FILE).exists():
        return nn.load(path / FILE)
    if not (path / "config.json").exists():
        raise OptionError(f"{place} is neither the directory of a run nor a file that nn.save wrote")
    from parallel.command import factory

    options = Options(**resumed({"resume": place}))
    kept = ShardedCheckpoints(path / "checkpoints")
    named = {entry["file"] for entry in kept.entries()}
    if not named:
        raise OptionError(f"{place}: nothing was saved yet, neither {FILE} nor a checkpoint")
    state, _, _ = kept.load("best" if "best.npz" in named else None)
    parts = factory.make(options)
    return nn.Model(parts.network, state, about(options, parts.data))


def error_text(error: Exception) -> str:
    """What an error says, without the system's number."""
    return shortened(str(error).removeprefix(f"[Errno {getattr(error, 'errno', None)}] "))
