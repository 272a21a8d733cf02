#!/usr/bin/env python3
"""Download a data set, verify its checksums, and put it where training finds it.

    python scripts/get_data.py mnist                     into $RINGPROP_DATA/mnist, else ./data/mnist
    python scripts/get_data.py cifar10 --data-dir DIR    into DIR/cifar10

One process, the standard library only. Each file is written beside its place, checked (size and sha256) and
then renamed: nothing half-written is ever found. Files that are there and right are not fetched again.
Mirrors are tried in order; --mirror URL (repeatable; http:, https: or file:) replaces them.
"""

import argparse
import hashlib
import http.client
import os
import signal
import sys
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

CHUNK = 1 << 20


class File(NamedTuple):
    """A file to download; of an archive, `members` are kept and the archive is not."""

    name: str
    size: int
    sha256: str
    members: tuple[str, ...] = ()


class Source(NamedTuple):
    """Where a data set comes from: mirrors are addresses to which the names of the files are appended."""

    mirrors: tuple[str, ...]
    files: tuple[File, ...]


# The sums of MNIST and Fashion-MNIST were taken from files whose MD5 sums are the published ones. Those of
# the CIFAR archives are the ones that several projects pin; their authors publish MD5 only (CIFAR-10
# c32a1d4ab5d03f1284b67883e8d87530, CIFAR-100 03b5dce01913d631647c71ecec9e9cb8).
CATALOG = {
    "mnist": Source(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        (
            File("train-images-idx3-ubyte.gz", 9_912_422,
                 "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            File("train-labels-idx1-ubyte.gz", 28_881,
                 "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            File("t10k-images-idx3-ubyte.gz", 1_648_877,
                 "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            File("t10k-labels-idx1-ubyte.gz", 4_542,
                 "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
    ),
    "fashion-mnist": Source(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        (
            File("train-images-idx3-ubyte.gz", 26_421_880,
                 "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            File("train-labels-idx1-ubyte.gz", 29_515,
                 "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            File("t10k-images-idx3-ubyte.gz", 4_422_102,
                 "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            File("t10k-labels-idx1-ubyte.gz", 5_148,
                 "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
    ),
    "cifar10": Source(
        (
            "https://www.cs.toronto.edu/~kriz/",
            "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
        ),
        (
            File("cifar-10-binary.tar.gz", 170_052_171,
                 "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                 (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")),
        ),
    ),
    "cifar100": Source(
        ("https://www.cs.toronto.edu/~kriz/",),
        (
            File("cifar-100-binary.tar.gz", 168_513_733,
                 "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                 ("train.bin", "test.bin", "fine_label_names.txt")),
        ),
    ),
    "tinyshakespeare": Source(
        ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
        (
            File("input.txt", 1_115_394,
                 "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
        ),
    ),
}  # fmt: skip


class MirrorError(Exception):
    """What one mirror did not deliver."""


class NoMirror(Exception):
    """No mirror delivered a file."""


def get(name, source, directory, timeout, say=print):
    """Put the files of a data set into a directory; those that are there and right are left alone."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.files:
        if _present(file, directory):
            say(f"{name}: {file.name}: there already, sums are right")
            continue
        failures = []
        for mirror in source.mirrors:
            url = mirror.rstrip("/") + "/" + file.name
            try:
                fetch(url, file, directory, timeout, say)
                break
            except MirrorError as error:
                failures.append(f"  {url}\n      {error}")
                say(f"{name}: {url}: {error}")
        else:
            raise NoMirror(
                f"{name}: no mirror delivered {file.name}:\n" + "\n".join(failures) + "\n"
                f"Get it by hand (sha256 {file.sha256}, {file.size} bytes) and put it into {directory}"
                + (f", unpacked: {' '.join(file.members)}" if file.members else "")
                + "\nor name another place that has it with --mirror URL."
            )


def fetch(url, file, directory, timeout, say):
    """Download one file, check it, and put it (of an archive: its members) into the directory.

    Raises MirrorError where the mirror is to blame, OSError where the disk is.
    """
    with _temporary(directory / file.name) as (out, commit):
        digest, done, said = hashlib.sha256(), 0, time.monotonic()
        for chunk in _chunks(url, timeout):
            done += len(chunk)
            if done > file.size:
                raise MirrorError(f"longer than the {file.size} bytes expected")
            digest.update(chunk)
            out.write(chunk)
            if time.monotonic() - said > 2:
                said = time.monotonic()
                say(f"{file.name}: {done / 1e6:.1f} of {file.size / 1e6:.1f} MB ({done / file.size:.0%})")
        if done < file.size:
            raise MirrorError(f"truncated: expected {file.size} bytes, given {done}")
        if digest.hexdigest() != file.sha256:
            raise MirrorError(f"corrupt: expected sha256 {file.sha256}, given {digest.hexdigest()}")
        if file.members:
            out.seek(0)
            _unpack(out, file, directory, say)
        else:
            commit()
            say(f"{directory / file.name}: {done} bytes, sha256 {file.sha256[:16]}...")


def _chunks(url, timeout):
    request = urllib.request.Request(url, headers={"User-Agent": "ringprop"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            while chunk := response.read(CHUNK):
                yield chunk
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise MirrorError(str(error)) from error


def _unpack(archive, file, directory, say):
    """The wanted members of a checked archive; last their sums, SHA256SUMS, as sha256sum -c reads them."""
    sums = {}
    try:
        with tarfile.open(fileobj=archive, mode="r:gz") as tar:
            for member in tar:
                name = Path(member.name).name
                if member.isfile() and name in file.members:
                    with _temporary(directory / name) as (out, commit):
                        digest, content = hashlib.sha256(), tar.extractfile(member)
                        while chunk := content.read(CHUNK):
                            digest.update(chunk)
                            out.write(chunk)
                        commit()
                    sums[name] = digest.hexdigest()
                    say(f"{directory / name}: {member.size} bytes")
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise MirrorError(f"cannot be unpacked: {error}") from error
    if missing := set(file.members) - set(sums):
        raise MirrorError(f"archive without {', '.join(sorted(missing))}")
    with _temporary(directory / "SHA256SUMS") as (out, commit):
        out.write("".join(f"{sums[name]}  {name}\n" for name in file.members).encode())
        commit()


def _present(file, directory):
    if not file.members:
        return _sha256(directory / file.name) == file.sha256
    sums = directory / "SHA256SUMS"
    if not sums.is_file():
        return False
    listed = set(sums.read_text().splitlines())
    return all(f"{_sha256(directory / name)}  {name}" in listed for name in file.members)


def _sha256(path):
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _temporary(path):
    """A file beside `path` to write, and commit() that makes it `path`; without it the file is gone."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)

    def commit():
        out.flush()
        os.fsync(out.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)

    try:
        with os.fdopen(handle, "w+b") as out:
            yield out, commit
    finally:
        Path(name).unlink(missing_ok=True)


def seconds(text):
    """A time above 0 that a socket can wait for."""
    with suppress(ValueError):
        if 0 < float(text) < threading.TIMEOUT_MAX:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, given {text!r}")


def address(text):
    """An address of one of the kinds that are read."""
    if not text.startswith(("http://", "https://", "file:///")):
        raise argparse.ArgumentTypeError(f"expected http://, https:// or file:///, given {text!r}")
    return text


def main(arguments=None, catalog=CATALOG):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")  # the usage would hide it
    parser.add_argument("name", choices=sorted(catalog), help="the data set")
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("RINGPROP_DATA") or "data"),
        help="directory of all data sets; this one goes into a directory of its name in it "
        "(default: $RINGPROP_DATA, else ./data; here %(default)s)",
    )
    parser.add_argument(
        "--mirror",
        action="append",
        type=address,
        metavar="URL",
        help="take the files from here instead: file names are appended to URL; may be given several times",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="without an answer before a mirror is given up (default: %(default)s)",
    )
    options = parser.parse_args(arguments)

    def terminate(*_):
        print(f"{options.name}: terminated; nothing half-written was left", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, terminate)  # so that temporary files are removed, as on Ctrl-C
    source = catalog[options.name]
    if options.mirror:
        source = source._replace(mirrors=tuple(options.mirror))
    directory = options.data_dir / options.name
    try:
        get(options.name, source, directory, options.timeout, say=lambda line: print(line, flush=True))
    except NoMirror as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{options.name}: cannot write into {directory}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{options.name}: interrupted; nothing half-written was left", file=sys.stderr)
        return 130
    train = os.environ.get("RINGPROP_COMMAND", "python scripts/train.py")
    print(f"{options.name} is in {directory}\nTrain on it: {train} --data {options.name} "
          f"--data-dir {options.data_dir}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
