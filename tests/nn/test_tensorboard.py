"""TensorBoard's event files: framing and content read back by a reader of its own, and by TensorBoard where it is."""

import math
import struct

import numpy as np
import pytest

import nn
from nn.training.event_file import EventFile, crc32c
from nn.training.trainer import NonFiniteLoss


def checksum(content: bytes) -> int:
    """CRC-32C as a division of polynomials, bit by bit, highest power first; rotated and moved as records hold it."""
    bits = int.from_bytes(bytes(int(f"{byte:08b}"[::-1], 2) for byte in content)) << 32
    length = 8 * len(content)
    bits ^= 0xFFFFFFFF << length
    for place in range(length - 1, -1, -1):
        if bits >> (place + 32) & 1:
            bits ^= 0x11EDC6F41 << place
    rest = int(f"{bits:032b}"[::-1], 2) ^ 0xFFFFFFFF
    return ((rest >> 15 | rest << 17) + 0xA282EAD8) % 2**32


def fields(content: bytes) -> list[tuple[int, object]]:
    """(number, value) of a message: a float of 8 bytes, an integer, bytes, or a float of 4."""

    def varint():
        nonlocal place
        value = shift = 0
        while True:
            byte = content[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    found, place = [], 0
    while place < len(content):
        key = varint()
        kind = key & 7
        if kind == 0:
            value = varint()
        elif kind == 2:
            size = varint()
            value, place = content[place : place + size], place + size
        else:
            size, code = {1: (8, "<d"), 5: (4, "<f")}[kind]
            (value,), place = struct.unpack_from(code, content, place), place + size
        found.append((key >> 3, value))
    return found


def read(file) -> list[dict]:
    """The events of a file, as dictionaries: step, and version, scalars or restart."""
    data, events = file.read_bytes(), []
    while data:
        (length,), (of_length,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
        content, (of_content,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        assert of_length == checksum(data[:8])
        assert of_content == checksum(content)
        data = data[16 + length :]
        event = dict(fields(content))
        assert 1e9 < event[1] < 1e10, "seconds since 1970"
        known = {"step": event.get(2, 0)}
        if 3 in event:
            known["version"] = event[3].decode()
        if 5 in event:
            values = [dict(fields(value)) for number, value in fields(event[5]) if number == 1]
            known["scalars"] = {value[1].decode(): value[2] for value in values}
        if 7 in event:
            known["restart"] = dict(fields(event[7])) == {1: 1}
        events.append(known)
    return events


def files(directory):
    return sorted(directory.glob("events.out.tfevents.*"))


def fitted(directory, epochs=2, progress=None, trainer=None, **options):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 6))
    trainer = trainer or nn.Trainer(
        nn.Network(nn.Linear(6, 2), (6,), np.float64), nn.CrossEntropyLoss(), nn.SGD(lr=0.5)
    )
    data = nn.data.Dataset(x, (x[:, 0] > 0).astype(int), classes=2, dtype=np.float64)
    board = nn.callbacks.TensorBoard(directory, **options)
    loaders = nn.Loader(data, 8, dtype=np.float64), nn.Loader(data, 50, shuffle=False, dtype=np.float64)
    return nn.fit(trainer, loaders[0], epochs, [board], loaders[1], progress=progress)


@pytest.mark.parametrize(
    ("content", "known"),
    # RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
    [(b"\0" * 32, 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E), (b"123456789", 0xE3069283)],
)
def test_checksums_are_those_of_the_standard(content, known):
    assert crc32c(content) == known


def test_epochs_and_steps_are_read_back(tmp_path):
    training = fitted(tmp_path / "new" / "run", every=3)
    (file,) = files(tmp_path / "new" / "run")
    first, *events = read(file)
    assert first == {"step": 0, "version": "brain.Event:2"}
    assert [event["step"] for event in events] == [3, 6, 7, 10, 13, 14]
    epochs = [event["scalars"] for event in events if "epoch/loss" in event["scalars"]]
    for scalars, record in zip(epochs, training.history, strict=True):
        names = {f"epoch/{name}" for name in record if name not in ("epoch", "step")}
        assert scalars.keys() == names >= {"epoch/loss", "epoch/validation_loss", "epoch/validation_accuracy"}
        for name in names:
            assert scalars[name] == np.float32(record[name.removeprefix("epoch/")])
    steps = [event["scalars"] for event in events if "step/loss" in event["scalars"]]
    # An epoch has 7 steps of 8, ..., 8, 2 samples: the means of 3 steps, and the rest, make up its mean.
    assert all(scalars.keys() == {"step/loss", "step/lr"} and scalars["step/lr"] == 0.5 for scalars in steps)
    rest = 50 * training.history[0]["loss"] - 24 * (steps[0]["step/loss"] + steps[1]["step/loss"])
    assert 0 < rest / 2 < 2


def test_a_training_that_continues_has_a_file_of_its_own_and_voids_later_steps(tmp_path):
    first = fitted(tmp_path)
    fitted(tmp_path, 3, first.progress(), first.trainer)
    before, after = files(tmp_path)
    assert not any(event.get("restart") for event in read(before))
    events = read(after)
    assert events[1] == {"step": 15, "restart": True}
    assert [event["step"] for event in events[2:]] == [21]


def test_numbers_beyond_four_bytes_are_infinite_and_nan_stays(tmp_path):
    file = EventFile(tmp_path)
    file.add(1, {"large": 1e300, "small": -1e300, "nan": math.nan, "largest": 3.4028234e38})
    file.flush()
    scalars = read(file.path)[1]["scalars"]
    assert scalars["large"] == math.inf and scalars["small"] == -math.inf and math.isnan(scalars["nan"])
    assert scalars["largest"] == np.float32(3.4028234e38)


def test_what_was_written_before_an_error_is_kept(tmp_path):
    class Fails(nn.Callback):
        def on_step(self, training, loss):
            if training.trainer.steps == 5:
                raise NonFiniteLoss("on purpose")

    trainer = nn.Trainer(nn.Network(nn.Linear(6, 2), (6,)), nn.CrossEntropyLoss(), nn.SGD(lr=0.5))
    callbacks = [nn.callbacks.TensorBoard(tmp_path, every=2), Fails()]
    with pytest.raises(NonFiniteLoss):
        nn.fit(trainer, (np.ones((80, 6)), np.ones(80, int)), 1, callbacks, batch=8)
    (file,) = files(tmp_path)
    assert [event["step"] for event in read(file)[1:]] == [2, 4]


def test_a_directory_that_cannot_be_made_and_steps_that_are_none_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        fitted(tmp_path / "file" / "board")
    with pytest.raises(ValueError, match="every"):
        nn.callbacks.TensorBoard(tmp_path, every=0)


def test_tensorboard_reads_them(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = fitted(tmp_path)
    record = first.history[-1]
    fitted(tmp_path, 3, first.progress(), first.trainer)
    board = accumulators.EventAccumulator(str(tmp_path)).Reload()
    losses = board.Scalars("epoch/loss")
    assert [event.step for event in losses] == [7, 14, 21]
    assert losses[1].value == np.float32(record["loss"])
