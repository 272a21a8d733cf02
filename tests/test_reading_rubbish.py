"""Rubbish is refused: of every file that the packages read, thousands of broken ones end in an error of ours.

Each reader is given broken copies of a good file, and files made to do harm. Whatever they hold, it returns what it
should or raises its own error, which names the file; it does not crash, hang, take memory that a file of that size has
no use for, or execute anything. Which files is decided by a seed; RINGPROP_FUZZ=100 tries a hundred times as many:

    RINGPROP_FUZZ=100 python -m pytest tests/test_reading_rubbish.py

A reader runs in a process of its own; `python tests/test_reading_rubbish.py READER FIRST LAST` tries those again.
"""

import contextlib
import faulthandler
import gzip
import hashlib
import io
import json
import os
import pickle
import random
import re
import resource
import struct
import sys
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from forks import in_a_fork

FEW, MANY = 300, 500  # inputs of every reader: the harmful ones come first
LONGEST = 60  # seconds for one input, on however busy a machine: it takes a millisecond
SPARE = 16 << 20  # bytes that reading takes beside what the file can hold
RATIO = 1100  # DEFLATE's best is 1032


# ------------------------------------------------------------------------------------------- good files, and bad ones


def idx(rng):
    head = struct.pack(">HBB3I", 0, 8, 3, 4, 5, 6)
    content = head + rng.randbytes(120)
    yield content
    yield gzip.compress(content)
    yield struct.pack(">HBB255I", 0, 8, 255, *[1] * 255) + b"\0"
    yield struct.pack(">HBB3I", 0, 8, 3, *[2**32 - 1] * 3)
    yield struct.pack(">HBB3I", 0, 8, 3, 0, 2**32 - 1, 2**32 - 1)
    for sizes in ((2**12, 2**10, 2**9), (1, 1, 5), (2**10, 2**10, 2**10)):  # of 4 MiB of zeros
        yield gzip.compress(struct.pack(">HBB3I", 0, 8, 3, *sizes) + bytes(2**22), 9)
    yield gzip.compress(content) + gzip.compress(content)
    yield gzip.compress(b"")


def cifar(rng):
    yield b"".join(bytes([rng.randrange(10)]) + rng.randbytes(3072) for _ in range(2))
    yield b""
    yield bytes(3072)


def npy(rng, dtype="<f4", shape="(2, 3)", size=24, version=(1, 0)):
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}"
    header = header.encode("latin1").ljust(117) + b"\n"
    length = struct.pack("<H" if version == (1, 0) else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + length + header + rng.randbytes(size)


def zipped(members, how=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return out.getvalue()


class Harm:
    """Unpickled, it runs a command."""

    def __reduce__(self):
        return os.system, ("true",)


def headers(rng):
    """Headers of .npy files that lie, or that hurt who believes them."""
    yield from (npy(rng, dtype) for dtype in ("|V0", "|V4", "|S0", "<U0", "|O", "<M8[s]", "<c8", ">f8", "<f2", "|b1"))
    yield from (npy(rng, dtype) for dtype in ("x", "", "<f4,<f4", [("a", "<f4")], [("a", "|O")], ("<f4", (2**40,))))
    huge = ("(1000000000000,)", "(4611686018427387904, 4)", "(0, 9223372036854775807, 9)", "(-1,)", "(-2, -3)")
    yield from (npy(rng, shape=shape) for shape in huge)
    odd = ("(True, 6)", "(6.0,)", "6", "()", "[2, 3]", "(2, 3", f"({'1, ' * 65})", "(" * 99, "-" * 9000, "10 ** 400")
    yield from (npy(rng, shape=shape) for shape in odd)
    yield from (npy(rng, version=version) for version in ((2, 0), (3, 0), (9, 9)))
    yield b"\x93NUMPY\x02\x00\xff\xff\xff\xff{"
    yield npy(rng, "|O", "(1,)", 0) + pickle.dumps([Harm()])
    yield pickle.dumps(Harm())


def npz(rng):
    good = {"x_train": npy(rng), "y_train": npy(rng, "|i1", "(2,)", 2)}
    good |= {"x_test": npy(rng), "y_test": npy(rng, "|b1", "(2,)", 2)}
    good = {name: content[:128] + bytes(len(content) - 128) for name, content in good.items()}
    yield zipped(good)
    yield zipped(good, zipfile.ZIP_DEFLATED)
    yield from (zipped(good, how) for how in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
    for bad in headers(rng):
        yield zipped(good | {rng.choice(list(good)): bad}, zipfile.ZIP_DEFLATED)
    bomb = npy(rng, "|u1", "(1000000,)", 0) + bytes(10**6)
    yield zipped(good | {"x_train": bomb}, zipfile.ZIP_DEFLATED)
    yield zipped(good).replace(struct.pack("<I", 130), struct.pack("<I", 2**32 - 2))
    yield zipped(dict(list(good.items())[:3]))


def npys(rng):
    yield npy(rng)
    yield from headers(rng)


NESTED = b"[" * 100_000
CHECKPOINT = {"format": 1, "checkpoints": [{"file": "step-00000001.npz", "sha256": "", "named": False}]}


def checkpoint(rng):
    good = {"progress": npy(rng, "<U2", "()", 0) + "{}".encode("utf-32-le"), "steps": npy(rng, "<i8", "()", 8)}
    good["param/0.W"] = npy(rng)
    yield zipped(good)
    yield from (zipped(good | {"param/0.W": bad}) for bad in headers(rng))
    for text in ("[", "[]", "1", "NaN", "[" * 50_000, "\0"):
        yield zipped(good | {"progress": npy(rng, f"<U{len(text)}", "()", 0) + text.encode("utf-32-le")})
    yield zipped({"steps": good["steps"]})
    yield zipped(good, zipfile.ZIP_LZMA)


def told(root=None, **changed):
    """The description in a saved network."""
    root = root or {"layer": "Linear", "arguments": {"in_features": 2, "out_features": 3, "bias": False}}
    return {"format": 1, "name": "x", "in_shape": [2], "dtype": "float32", "root": root, "about": {}} | changed


def descriptions(rng):
    """Descriptions of networks that lie, or that hurt who believes them; the first is right for param/W of (2, 3)."""
    yield json.dumps(told())
    linear = told()["root"]
    for value in (None, 7, -1, 10**400, "x", [], {}, [None], ["x"], True, 1e300, [0], [2] * 70, [2**31], [[[]]] * 3):
        yield from (json.dumps(told() | {key: value}) for key in told())
        yield from (json.dumps(told(linear | {key: value})) for key in linear)
        arguments = linear["arguments"]
        yield from (json.dumps(told(linear | {"arguments": arguments | {key: value}})) for key in (*arguments, "init"))
    for name in ("os.system", "__import__", "Layer", "Network", "nn.layers.dense.Linear", "Sequential", "Recompute"):
        yield json.dumps(told({"layer": name, "arguments": {}}))
        yield json.dumps(told({"layer": name, "arguments": {"layers": [linear] * 3, "layer": "x"}}))
    huge = {"vocabulary": 10**12, "features": 10**12}
    yield json.dumps(told({"layer": "Embedding", "arguments": huge}))
    for depth in (50, 70, 300):
        nested = linear
        for _ in range(depth):
            nested = {"layer": "Sequential", "arguments": {"layers": [nested]}}
        yield json.dumps(told(nested))
    yield json.dumps(told({"layer": "Linear", "arguments": {"init": {"initializer": "os.system"}}}))
    yield from ("[" * 50_000, "NaN", "", "\0", '{"format": 1}')


def saved(rng):
    good = {"param/W": npy(random.Random(0))}

    def described(text):
        return {"network": npy(rng, f"<U{len(text)}", "()", 0) + text.encode("utf-32-le")}

    first, *others = descriptions(rng)
    yield zipped(described(first) | good)
    yield from (zipped(described(text) | good) for text in others)
    yield from (zipped(described(first) | good | {"param/W": bad}) for bad in headers(rng))
    yield from (zipped(good | {"network": bad}) for bad in headers(rng))
    yield zipped(good)
    yield zipped(described(first) | good | {"param/b": npy(rng)})
    yield zipped(described(" " * 300_000 + first) | good, zipfile.ZIP_DEFLATED)


def tensors(rng):
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    metadata = {"__metadata__": {"ringprop": json.dumps(told())}}

    def made(header, size=24, length=None):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + bytes(size)

    yield made(metadata | {"param/W": entry})
    yield from (made({"__metadata__": {"ringprop": text}, "param/W": entry}) for text in descriptions(rng))
    for value in (None, 7, -1, 10**400, "x", [], {}, [0, 2**62], [24, 0], [0, 24, 24], [True, 24], 1e300, "F8_E4M3"):
        yield from (made(metadata | {"param/W": entry | {key: value}}) for key in entry)
        yield made({"__metadata__": value, "param/W": entry})
        yield made(metadata | {"param/W": value})
    other = entry | {"data_offsets": [24, 48]}
    yield made(metadata | {"param/W": entry, "param/b": entry})
    yield made(metadata | {"param/W": entry, "param/b": other}, 48)
    yield made(metadata | {"param/W": other}, 48)
    yield made(metadata | {"param/W": entry | {"shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, 0)
    yield made(metadata | {"param/W": entry}, 25)
    yield made(json.dumps(metadata | {"param/W": entry}).encode()[:-1] + b', "param/W": {}}')
    yield from (made(metadata, length=length) for length in (0, 2**63, 2**64 - 1, 10**8 + 1))
    yield from (made(text) for text in (NESTED, b"[]", b"null", b"", b' {"a": 1}', b"{", b"\xff"))


def manifest(rng):
    yield json.dumps(CHECKPOINT, indent=1).encode()
    yield NESTED
    for value in (None, 7, "x", [], {}, [None], ["x"], [{}], True, 1e300, [[[]]] * 3):
        yield json.dumps(CHECKPOINT | {"format": value}).encode()
        yield json.dumps(CHECKPOINT | {"checkpoints": value}).encode()
        for key in ("file", "sha256", "named"):
            yield json.dumps(CHECKPOINT | {"checkpoints": [CHECKPOINT["checkpoints"][0] | {key: value}]}).encode()
    for file in ("../victim.npz", "/etc/passwd", "a\0.npz", "", ".", "..", "checkpoints/x.npz", "x" * 999 + ".npz"):
        yield json.dumps(CHECKPOINT | {"checkpoints": [CHECKPOINT["checkpoints"][0] | {"file": file}]}).encode()


VALUES = ("1" + "0" * 400, "-1", "0", "1e400", "nan", "inf", "true", "[]", "{}", '""', '"\\u0000"', "1" * 5000, '"x"')


def config(rng):
    good = {"model": "mlp:64,10", "epochs": 3, "lr": 0.1, "nesterov": False, "batch": 32, "clip": None}
    yield json.dumps(good, indent=1).encode()
    yield from (b"[]", b"null", b"{", NESTED, b'{"epochs": ' + NESTED)
    yield from (f'{{"{key}": {value}}}'.encode() for key in good for value in (*VALUES, "NaN", "-Infinity"))


def toml(rng):
    good = b'model = "mlp:64,8,10"\nepochs = 2\nlr = 0.5\nnesterov = false\nbatch = 16\nloss = "quadratic"\n'
    yield good
    yield from (b"a = " + NESTED, b"a = " + b"{a=" * 50_000, b"[" * 3000, b"a." * 50_000 + b"a = 1", b"a = \xff", b"\0")
    keys = "epochs", "lr", "batch", "nesterov", "model", "optimizer", "mo-mentum", "a.b"
    yield from (f"{key} = {value}".encode() for key in keys for value in VALUES)
    yield b"batch = 0x" + b"f" * 9000
    yield b"lr = 0x" + b"f" * 9000
    yield b"lr = 1979-05-27T07:32:00Z"


def network(rng):
    link = {"alpha": 1e-6, "beta": 1e-9, "overhead": 1e-7, "gap": 1e-7}
    good = {"inside": link, "between": link, "ranks_per_node": 2, "gamma": 0.0, "copy": 0.0, "source": "here"}
    yield json.dumps(good, indent=2).encode()
    yield from (NESTED, b"[]", b"{", b"null", b'{"inside": ' + NESTED)
    for value in (None, 10**400, -1, float("nan"), float("inf"), "x", [1], {}, True, 1.5):
        yield from (json.dumps(good | {key: value}).encode() for key in good)
        yield from (json.dumps(good | {"inside": link | {key: value}}).encode() for key in link)


def table(rng):
    good = {"node": {"allreduce": [[4096, "native"], [None, "ring"]], "broadcast": [[None, "binomial"]]}}
    yield json.dumps(good, indent=1).encode()
    yield from (NESTED, b"[]", b"{", b"null", b'{"node": []}', b'{"node": {"allreduce": ' + NESTED)
    for value in (None, 10**400, -1, float("nan"), float("inf"), "x", [1], {}, True, 1.5, ["native"], "ring"):
        yield json.dumps({"node": {"allreduce": value}}).encode()
        yield json.dumps({"node": {"allreduce": [[value, "native"], [None, "ring"]]}}).encode()
        yield json.dumps({"node": {"allreduce": [[4096, value], [None, "ring"]]}}).encode()
        yield json.dumps({"node": {"allreduce": [value, [None, "ring"]]}}).encode()


def image(rng):
    from PIL import Image

    pixels = Image.frombytes("RGB", (9, 7), rng.randbytes(189))
    for name in ("PNG", "JPEG", "GIF", "BMP", "PPM", "TIFF", "WEBP"):
        out = io.BytesIO()
        pixels.save(out, name)
        yield out.getvalue()
    yield b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n{} loop\n%%EOF\n"
    yield b"P6 60000 60000 255\n"
    yield b"P6 8000 8000 255\n"
    yield b"BM" + bytes(8) + struct.pack("<IIiiHHIIiiII", 54, 40, 30000, 30000, 1, 24, 0, 0, 0, 0, 0, 0)


def profile(rng):
    head = "layer,forward_ms,backward_ms,output_bytes,parameter_bytes\n"
    yield (head + "Linear(4 10),0.453,0.474,1024000,16388000\nReLU,0.1,0.2,1024,0\n").encode()
    yield from (f"{head}x,{value},1,1,1\n".encode() for value in VALUES)
    yield from (b"", head.encode(), b"\0", b'"' + b"a" * 200_000, b"a," * 100_000)


def schedule(rng):
    yield b"0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    yield from (b"", b"\n" * 1000, b"0F0", b"9" * 5000 + b"F0", b'"' + b"0" * 200_000, b"0F0," * 10_000, b"\xff")


WORDS = [b"null", b"true", b"-1", b"1e400", b"NaN", b'""', b"[]", b"{}", b"[[[", b"\0", b"\xff\xfe", b"1" + b"0" * 400]
NUMBERS = [0, 1, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


def broken(content, rng):
    """A copy with one to four mistakes."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(content) + 1)
        end = min(len(content), at + rng.choice((1, 2, 4, 8, 64)))
        kind = rng.randrange(9)
        if kind == 0 and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del content[at:]
        elif kind == 2:
            del content[at:end]
        elif kind == 3:
            content[at:end] = rng.randbytes(end - at)
        elif kind == 4:
            content[at:at] = content[rng.randrange(len(content) + 1) :][: rng.choice((1, 8, 200))]
        elif kind == 5:
            code = rng.choice("<>") + rng.choice("HIQ")
            number = rng.choice(NUMBERS) % (1 << 8 * struct.calcsize(code))
            content[at : at + struct.calcsize(code)] = struct.pack(code, number)
        elif kind == 6:
            content[at:at] = rng.choice(WORDS)
        elif kind == 7 and (numbers := list(re.finditer(rb"-?\d+(\.\d+)?", bytes(content)))):
            found = rng.choice(numbers)
            content[found.start() : found.end()] = rng.choice([*WORDS, b"%d" % rng.choice(NUMBERS)])
        elif kind == 8 and (words := list(re.finditer(rb"[A-Za-z_]+", bytes(content)))):
            one, other = rng.choice(words), rng.choice(words)
            content[one.start() : one.end()] = other[0]
    return bytes(content)


# ---------------------------------------------------------------------------------------------------------- the readers


def readers():
    """Name -> (files, where one is put, how it is read, error): imported here, so that pytest need not."""
    from collectives.choosing.selection import load as load_table
    from collectives.pricing.networks import Network
    from nn.data import DataError
    from nn.data.cifar import read_cifar
    from nn.data.idx import read_idx
    from nn.data.images import read_image
    from nn.data.sources import load
    from nn.files.model import FileError
    from nn.files.model import load as load_network
    from nn.files.safetensors import TensorError, Tensors
    from nn.training.checkpoints import CheckpointError, Checkpoints
    from parallel.command.options import Options
    from parallel.command.parsing import read_toml, resumed
    from parallel.command.rules import check
    from parallel.planning.profile import read_profile
    from parallel.settings import OptionError
    from parallel.strategies.pipeline.option import written

    def of_directory(path):
        for key in ("x_train", "y_train", "x_test", "y_test"):
            if not (other := path.with_name(f"{key}.npy")).exists():
                other.write_bytes(npy(random.Random(0)))
        data = load(path.parent)
        return data.train.batch(), data.test.batch()

    def of_archive(path):
        data = load(path)
        return data.train.batch(), data.test.batch()

    def of_checkpoint(path):
        """With the checksum of what it is: who changes a file on purpose changes the manifest too."""
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        entry = CHECKPOINT["checkpoints"][0] | {"sha256": sha256}
        (path.parent / "manifest.json").write_text(json.dumps(CHECKPOINT | {"checkpoints": [entry]}))
        state, _, _ = Checkpoints(path.parent).load()
        return {name: state[name] for name in state}

    def of_manifest(path):
        kept = Checkpoints(path.parent)
        for entry in kept.entries():
            assert (path.parent / entry["file"]).parent == path.parent
        return kept.load()

    def of_config(path):
        return accepted(resumed({"resume": str(path.parent)}))

    def of_toml(path):
        return accepted(read_toml(str(path)))

    def of_tensors(path):
        found = Tensors(path)
        return {name: found[name].sum() for name in found}

    def accepted(values):
        """What the file may say; whether options go together is another question, and has another answer."""
        with contextlib.suppress(OptionError):
            check(Options(**values))

    return {
        "idx": (idx, "images", lambda path: read_idx(path).sum(), DataError),
        "cifar": (cifar, "data.bin", lambda path: read_cifar([path]), DataError),
        "npz": (npz, "data.npz", of_archive, DataError),
        "npy": (npys, "arrays/x_train.npy", of_directory, DataError),
        "checkpoint": (checkpoint, "step-00000001.npz", of_checkpoint, CheckpointError),
        "manifest": (manifest, "manifest.json", of_manifest, CheckpointError),
        "config": (config, "config.json", of_config, OptionError),
        "toml": (toml, "some.toml", of_toml, OptionError),
        "network": (network, "network.json", Network.load, ValueError),
        "table": (table, "table.json", load_table, ValueError),
        "saved": (saved, "network.npz", load_network, FileError),
        "tensors": (tensors, "arrays.safetensors", of_tensors, TensorError),
        "saved tensors": (tensors, "network.safetensors", load_network, FileError),
        "image": (image, "image.jpg", lambda path: read_image(path)[0].sum(), DataError),
        "profile": (profile, "profile.csv", read_profile, ValueError),
        "schedule": (schedule, "schedule.csv", lambda path: written(str(path)), OptionError),
    }


FORBIDDEN = ("exec", "pickle.find_class", "os.system", "os.exec", "os.fork", "subprocess.Popen", "socket.connect")


class Executed(BaseException):
    """Something was run that should only have been read."""


def attempt(read, path, error):
    """Read one file; AssertionError where that ends in a way that it should not. Returns whether it was refused."""
    size = path.stat().st_size
    tracemalloc.start()
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    try:
        read(path)
        refused = False
    except error as told:
        assert type(told) is error, f"another's error: {told!r}"
        assert str(path.parent) in str(told), f"does not name the file: {told}"
        assert len(str(told)) < 2000, "the message is too long"
        refused = True
    finally:
        faulthandler.cancel_dump_traceback_later()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < SPARE + RATIO * size, f"took {most:,} bytes for a file of {size:,}"
    return refused


def work(name, first, last):
    """In a process of its own: the inputs first ... last - 1 of a reader."""
    import ast  # noqa: F401 - what readers import when they first need it must not count as executed
    import tokenize  # noqa: F401
    import warnings

    files, place, read, error = readers()[name]
    warnings.simplefilter("ignore")  # of checkpoints that are damaged
    armed = False

    def watch(event, arguments):
        if armed and event in FORBIDDEN:
            raise Executed(f"{event} {arguments}")

    refused = 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / place
        path.parent.mkdir(exist_ok=True)
        made = list(files(random.Random(0)))
        path.write_bytes(made[0])
        if name != "manifest":  # its good one tells of a file that is not there
            read(path)  # a good one is read
        for content in made[1:]:  # and whatever is needed for messages is imported
            path.write_bytes(content)
            with contextlib.suppress(Exception):
                read(path)
        now = int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
        resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), resource.RLIM_INFINITY))
        sys.addaudithook(watch)
        for i in range(first, last):
            rng = random.Random(f"{name} {i}")
            content = made[i] if i < len(made) else broken(rng.choice(made[:2] * 9 + made), rng)
            path.write_bytes(content)
            armed = True
            try:
                refused += attempt(read, path, error)
            except BaseException:
                print(f"{name} {i}: {content[:300]!r} ({len(content)} bytes)", file=sys.stderr, flush=True)
                raise
            finally:
                armed = False
    print(refused)


@pytest.fixture(scope="module", autouse=True)
def readers_are_imported():
    """Import the readers before the forks, which would each import them again."""
    readers()


@pytest.mark.parametrize(
    ("first", "last"),
    [pytest.param(0, FEW, id="some"), pytest.param(FEW, MANY, id="others", marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize(
    "name",
    [
        *("idx", "cifar", "npz", "npy", "checkpoint", "manifest", "config", "toml", "network", "table"),
        *("saved", "tensors", "saved tensors", "image", "profile", "schedule"),
    ],
)
def test_rubbish_is_refused(name, first, last):
    times = int(os.environ.get("RINGPROP_FUZZ", "1"))
    status, said, errors = in_a_fork(work, name, first * times, last * times)
    assert status == 0, errors
    assert int(said) > times * (last - first) / 4, "control: much of it is rubbish"


def odd(name):
    """In a process of its own: what is no file, or one without end, in the place of a reader's file."""
    import warnings

    warnings.simplefilter("ignore")
    files, place, read, error = readers()[name]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / place
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(next(iter(files(random.Random(0)))))
        if name != "manifest":
            read(path)  # whatever is needed is imported
        sizes = {"checkpoint": 0, "manifest": 1 << 32, "config": 1 << 32, "toml": 1 << 32}
        kinds = {
            "a FIFO": lambda: os.mkfifo(path),
            "a link to one": lambda: (os.mkfifo(path.with_name("fifo")), path.symlink_to(path.with_name("fifo"))),
            "a device": lambda: path.symlink_to("/dev/zero"),
            "a directory": path.mkdir,
            "a link to itself": lambda: path.symlink_to(path),
            "a sparse file": lambda: (path.touch(), os.truncate(path, sizes.get(name, 1 << 32))),
        }
        if name == "checkpoint":
            entry = CHECKPOINT["checkpoints"][0] | {"sha256": "0" * 64}
            (path.parent / "manifest.json").write_text(json.dumps(CHECKPOINT | {"checkpoints": [entry]}))
            read = readers()["manifest"][2]
            read = (lambda of_manifest: lambda path: of_manifest(path.with_name("manifest.json")))(read)
        for kind, make in kinds.items():
            path.unlink()
            make()
            tracemalloc.start()
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            try:
                read(path)
            except (error, OSError) as told:
                assert str(path.parent) in str(told), f"{kind}: does not name the file: {told}"
            else:
                raise AssertionError(f"{kind} was read")
            finally:
                faulthandler.cancel_dump_traceback_later()
                most = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert most < SPARE, f"{kind} took {most:,} bytes"
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
                path.touch()
    print("done")


@pytest.mark.parametrize(
    "name",
    [
        "idx",
        "cifar",
        "npz",
        "npy",
        "checkpoint",
        "manifest",
        "config",
        "toml",
        "network",
        "table",
        "saved",
        "tensors",
        "saved tensors",
        "image",
        "profile",
        "schedule",
    ],
)
def test_only_files_are_read(name):
    """A FIFO would hold whoever opens it, a device may never end, a sparse file takes memory but no disk."""
    status, said, errors = in_a_fork(odd, name)
    assert (status, said) == (0, "done\n"), errors


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
