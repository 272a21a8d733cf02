"""Write pictures into the directory of a run: atomically, and never through a symbolic link."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from nn.training.checkpoints import write_atomically


def write_figure(figure, file: Path, **options: Any) -> None:
    """Write a matplotlib figure in the format of the file's suffix; `options` are those of `savefig`."""
    content = io.BytesIO()
    figure.savefig(content, format=file.suffix[1:], **{"dpi": 120, **options})
    write_atomically(file, content.getvalue())
