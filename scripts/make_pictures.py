#!/usr/bin/env python3
"""Draw the pictures of docs/ from the algorithms themselves.

    python scripts/make_pictures.py              into docs/
    python scripts/make_pictures.py --out DIR    elsewhere, to compare

The same versions of the code and of matplotlib write the same bytes: no date, no random identifiers.
"""

import argparse
from pathlib import Path

import matplotlib

from collectives import ALGORITHMS, draw

PICTURES = {
    "ring_allreduce.svg": lambda: draw(ALGORITHMS["allreduce"]["ring"], 4, 4),
    "shared_allreduce.svg": lambda: draw(ALGORITHMS["allreduce"]["shared_arrays"], 4, 64),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/ from the algorithms themselves.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs", metavar="DIR")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        with matplotlib.rc_context({"svg.hashsalt": name}):
            picture().savefig(out / name, metadata={"Date": None})
        print(f"{out / name}: {(out / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
