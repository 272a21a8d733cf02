"""IDX files: read for every type and number of axes, refused by name where they are not what they say."""

import gzip
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nn.data.dataset import DataError
from nn.data.idx import TYPES, read_idx


def idx(array, code):
    """An array as the bytes of an IDX file, by the format's description."""
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.astype(TYPES[code]).tobytes()


def gzipped(content):
    """Without the second at which it was written: the names of tests are made of it, on every worker alike."""
    return gzip.compress(content, mtime=0)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(TYPES)), st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans(), st.integers()
)
def test_written_arrays_are_read(tmp_path_factory, code, shape, packed, seed):
    array = np.random.default_rng(abs(seed)).integers(0, 100, shape)
    path = tmp_path_factory.mktemp("idx") / "file"
    content = idx(array, code)
    path.write_bytes(gzip.compress(content) if packed else content)
    got = read_idx(path, array.ndim, TYPES[code])
    assert got.shape == tuple(shape) and np.array_equal(got, array)


def test_a_file_that_is_not_compressed_is_memory_mapped(tmp_path):
    path = tmp_path / "images"
    path.write_bytes(idx(np.arange(60).reshape(3, 4, 5), 8))
    images = read_idx(path, 3)
    assert isinstance(images, np.memmap) and not images.flags.writeable
    assert images[2, 3, 4] == 59


GOOD = idx(np.arange(24).reshape(2, 3, 4), 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD[:-1], r"truncated: header says shape \(2, 3, 4\), which takes 40 bytes, given 39"),
        (GOOD + b"\0", "too long: .* 40 bytes, given 41"),
        (GOOD[:10], "truncated in its header: 3 axes, given 10 bytes"),
        (GOOD[:3], "not an IDX file: .* given 00 00 08"),
        (b"", "not an IDX file: .* given nothing"),
        (b"\x89PNG" + GOOD, "not an IDX file: .* given 89 50 4e 47"),
        (b"\0\0\x0a" + GOOD[3:], "not an IDX file"),
        (gzipped(GOOD)[:-12], "truncated or damaged gzip file"),
        (gzipped(GOOD)[:-8] + b"\0" * 8, "truncated or damaged gzip file: CRC check failed"),
        (b"\x1f\x8bnot gzip at all", "truncated or damaged gzip file"),
        (gzipped(GOOD[:-1]), "truncated: header says"),
        (gzipped(GOOD + b"\0"), "41 or more"),
        (struct.pack(">4I", 2051, 2**10, 2**20, 2**20), "truncated: header says"),
        (struct.pack(">4I", 2051, 2**31, 2**31, 2**31), "no array can have shape"),
        (struct.pack(">4I", 2051, 0, 2**32 - 1, 2**32 - 1), "no array can have shape"),
        (gzipped(struct.pack(">4I", 2051, 2**10, 2**10, 2**10)), "bytes of gzip cannot hold so many"),
        (struct.pack(">H2B65I", 0, 8, 65, *[1] * 65) + b"\0", "65 axes, and an array has at most 64"),
        (idx(np.arange(3), 8), r"expected 3 axes \(magic 2051\), given 1 of shape \(3,\)"),
        (idx(np.arange(24).reshape(2, 3, 4), 13), "expected numbers of type uint8, given >f4"),
    ],
)
def test_foreign_and_truncated_files_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "images-idx3"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_idx(path, 3, np.uint8)
    assert str(error.value).startswith(str(path))


def test_no_more_is_unpacked_than_the_header_asks_for(tmp_path):
    """256 MiB of zeros, packed into a quarter of a MiB, behind a header of 24 bytes."""
    path = tmp_path / "images-idx3"
    with gzip.open(path, "wb") as file:
        file.write(GOOD)
        for _ in range(256):
            file.write(bytes(2**20))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="41 or more"):
            read_idx(path, 3, np.uint8)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
