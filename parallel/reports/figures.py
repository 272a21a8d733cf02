"""Pictures in the directory of a run: there whole or not at all, never through a link of somebody else."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from nn.training.checkpoints import write_atomically


def write_figure(figure, file: Path, **options: Any) -> None:
    """Write a figure of matplotlib; the file's name says the format, `options` are those of `savefig`."""
    content = io.BytesIO()
    figure.savefig(content, format=file.suffix[1:], **{"dpi": 120, **options})
    write_atomically(file, content.getvalue())
