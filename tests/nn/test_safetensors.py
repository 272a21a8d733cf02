"""The format as its own library has it: what one writes the other reads, bit for bit."""

import json
import struct

import numpy as np
import pytest

import nn
from nn.files.safetensors import DTYPES, TensorError, Tensors, write

RNG = np.random.default_rng(0)
ARRAYS = {
    f"{code} {shape}": (100 * RNG.standard_normal(shape)).astype(dtype)
    for code, dtype in DTYPES.items()
    for shape in ((), (3,), (2, 3, 4), (0, 2))
}
ARRAYS["a view, not contiguous"] = np.arange(24.0).reshape(4, 6)[::2, ::-1].T
ARRAYS["big-endian"] = np.arange(5, dtype=">f4")


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "x.safetensors"
    write(file, ARRAYS, {"made by": "a test"})
    found = Tensors(file)
    assert found.metadata == {"made by": "a test"} and set(found) == set(ARRAYS) and len(found) == len(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype.newbyteorder("=") and found[name].shape == array.shape
    size = int.from_bytes(file.read_bytes()[:8], "little")
    assert size % 8 == 0 and file.stat().st_size == 8 + size + sum(array.nbytes for array in ARRAYS.values())
    write(file, {})
    assert not Tensors(file) and Tensors(file).metadata == {}


def test_the_formats_own_library_agrees(tmp_path):
    theirs = pytest.importorskip("safetensors.numpy")
    file = tmp_path / "x.safetensors"
    write(file, ARRAYS)
    for name, array in theirs.load_file(file).items():
        np.testing.assert_array_equal(array, ARRAYS[name])
        assert array.dtype == ARRAYS[name].dtype.newbyteorder("=")
    contiguous = {name: np.array(array, array.dtype.newbyteorder("="), order="C") for name, array in ARRAYS.items()}
    theirs.save_file(contiguous, file, {"a": "b"})
    found = Tensors(file)
    assert found.metadata == {"a": "b"} and set(found) == set(ARRAYS)
    for name, array in contiguous.items():
        np.testing.assert_array_equal(found[name], array)


def test_bfloat16_is_read_as_float32(tmp_path):
    values = np.array([1.0, -2.5, 3.140625, 0.0], np.float32)  # of eight bits each
    header = json.dumps({"x": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    raw = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + raw)
    np.testing.assert_array_equal(Tensors(tmp_path / "x.safetensors")["x"], values.reshape(2, 2))


def test_what_cannot_be_written_is_refused_before_it_is(tmp_path):
    file = tmp_path / "x.safetensors"
    for arrays, metadata, said in (
        ({"x": np.array([1j])}, {}, "'x' cannot be written: its dtype is complex128"),
        ({"x": np.array(["a"])}, {}, "its dtype is <U1"),
        ({"__metadata__": np.ones(1)}, {}, "cannot be written"),
        ({"x": np.ones(1)}, {"a": 1}, "metadata must be texts"),
    ):
        with pytest.raises(TypeError, match=said):
            write(file, arrays, metadata)
        assert not file.exists()


def test_a_file_of_others_is_no_network(tmp_path):
    file = tmp_path / "x.safetensors"
    write(file, {"a": np.ones(3)})
    with pytest.raises(nn.FileError, match="network"):
        nn.load(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TensorError, match=r"x\.safetensors: no safetensors file: its arrays take 24 bytes.* are 23"):
        Tensors(file)
