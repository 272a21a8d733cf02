#!/usr/bin/env python3
"""Rebuild nn/data/digits.npz from scikit-learn's copy of the UCI digits (see nn/data/digits.md).

The file is a plain .npz of two byte arrays, with fixed time stamps, so that it comes out the same each time.
Needs scikit-learn, which nothing else in the project does.

    python scripts/make_digits.py            write the file
    python scripts/make_digits.py --check    compare it with what would be written, and write nothing
"""

import argparse
import io
import os
import sys
import zipfile
from pathlib import Path

import numpy as np

DIGITS = Path(__file__).resolve().parent.parent / "nn" / "data" / "digits.npz"


def digits():
    """The arrays of the file: images (1797, 8, 8) uint8 in 0 .. 16, and labels (1797,) uint8."""
    from sklearn.datasets import load_digits

    images, labels = load_digits().images, load_digits().target
    arrays = {"images": images.astype(np.uint8), "labels": labels.astype(np.uint8)}
    assert np.array_equal(arrays["images"], images) and np.array_equal(arrays["labels"], labels)
    return arrays


def pack(arrays):
    """An .npz file as bytes: np.savez_compressed with the dates left out."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, version=(1, 0), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            archive.writestr(entry, content.getvalue(), zipfile.ZIP_DEFLATED, 9)
    return out.getvalue()


def check(path, arrays):
    """Exit code: 0 where the file holds these arrays, and a line that says how alike it is."""
    with np.load(path, allow_pickle=False) as file:
        given = dict(file)
    for name in arrays.keys() | given.keys():
        if name not in arrays or name not in given or not np.array_equal(arrays[name], given[name]):
            print(f"{path}: array {name!r} is not what scikit-learn has", file=sys.stderr)
            return 1
    same = path.read_bytes() == pack(arrays)
    print(f"{path}: {'byte-identical' if same else 'the same arrays, compressed by another zlib'}")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 where the arrays differ")
    options = parser.parse_args()
    if options.check:
        return check(DIGITS, digits())
    content = pack(digits())
    temporary = DIGITS.with_suffix(".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, DIGITS)
    print(f"{DIGITS}: {len(content)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
