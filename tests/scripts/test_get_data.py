"""get_data, from a server on this machine and from files: what is whole arrives, all else leaves no trace."""

import functools
import gzip
import hashlib
import http.server
import importlib.util
import io
import os
import resource
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
from conftest import PATIENCE

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "get_data.py"
specification = importlib.util.spec_from_file_location("get_data", SCRIPT)
get_data = importlib.util.module_from_spec(specification)
specification.loader.exec_module(get_data)

CONTENT = {name: name.encode() * 200_000 for name in ("images.gz", "labels.gz")}


def entry(name, content, members=()):
    return get_data.File(name, len(content), hashlib.sha256(content).hexdigest(), members)


def archive(**files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"batches/{name}.bin")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("batches/three.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return out.getvalue()


ARCHIVE = archive(one=b"1" * 3_000_000, two=b"2" * 10, unwanted=b"x")
MEMBERS = ("one.bin", "two.bin")
CATALOG = {
    "toy": get_data.Source(("http://127.0.0.1:1/",), tuple(entry(*item) for item in CONTENT.items())),
    "packed": get_data.Source(("http://127.0.0.1:1/",), (entry("all.tar.gz", ARCHIVE, MEMBERS),)),
    "odd": get_data.Source(("http://127.0.0.1:1/",), (entry("all.tar.gz", ARCHIVE, (*MEMBERS, "three.bin")),)),
}


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files; under /slow/ it sends a third of what it announces, under /silent/ nothing."""

    def do_GET(self):
        self.server.requests.append(self.path)
        if not self.path.startswith(("/slow/", "/silent/")):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", "9912422")
        self.end_headers()
        self.wfile.write(b"x" * 3_000_000 if self.path.startswith("/slow/") else b"")
        self.wfile.flush()
        self.server.hold.wait(PATIENCE)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(address, directory, list of requested paths) of a mirror on this machine."""
    root = tmp_path_factory.mktemp("mirror")
    for name, content in CONTENT.items():
        (root / name).write_bytes(content)
    (root / "all.tar.gz").write_bytes(ARCHIVE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(root))) as httpd:
        httpd.requests, httpd.hold, httpd.daemon_threads = [], threading.Event(), True
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", root, httpd.requests
        httpd.hold.set()
        httpd.shutdown()
        thread.join()


def run(name, directory, *mirrors, timeout=60):
    arguments = [name, "--data-dir", str(directory), "--timeout", str(timeout)]
    for mirror in mirrors:
        arguments += ["--mirror", str(mirror)]
    before = signal.getsignal(signal.SIGTERM)
    try:
        return get_data.main(arguments, CATALOG)
    finally:
        signal.signal(signal.SIGTERM, before)


def names(directory):
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


def test_files_come_from_the_first_mirror_that_has_them(server, tmp_path, capsys):
    address, _, requests = server
    assert run("toy", tmp_path, address + "/nowhere", address) == 0
    assert names(tmp_path) == ["images.gz", "labels.gz"]
    for name, content in CONTENT.items():
        assert (tmp_path / "toy" / name).read_bytes() == content
        assert (tmp_path / "toy" / name).stat().st_mode & 0o777 == 0o644
    out = capsys.readouterr().out
    assert "nowhere/images.gz: HTTP Error 404" in out and "Train on it: python scripts/train.py --data toy" in out

    # What is there and right is not fetched again; what is wrong is, and nothing else.
    asked = len(requests)
    assert run("toy", tmp_path, address) == 0 and len(requests) == asked
    (tmp_path / "toy" / "labels.gz").write_bytes(b"damaged")
    assert run("toy", tmp_path, address) == 0 and requests[asked:] == ["/labels.gz"]
    assert (tmp_path / "toy" / "labels.gz").read_bytes() == CONTENT["labels.gz"]


def test_an_archive_is_unpacked_and_not_kept(server, tmp_path, capsys):
    address, _, requests = server
    assert run("packed", tmp_path, address) == 0
    place = tmp_path / "packed"
    assert names(tmp_path) == ["SHA256SUMS", "one.bin", "two.bin"]
    assert (place / "one.bin").read_bytes() == b"1" * 3_000_000
    assert f"{hashlib.sha256(b'2' * 10).hexdigest()}  two.bin" in (place / "SHA256SUMS").read_text().splitlines()
    asked = len(requests)
    assert run("packed", tmp_path, address) == 0 and len(requests) == asked
    (place / "two.bin").write_bytes(b"3" * 10)
    assert run("packed", tmp_path, address) == 0 and len(requests) == asked + 1
    assert (place / "two.bin").read_bytes() == b"2" * 10

    assert run("odd", tmp_path, address) == 1  # a link is no file, whatever its name
    assert "archive without three.bin" in capsys.readouterr().err
    assert not (tmp_path / "odd" / "SHA256SUMS").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], "truncated: expected 1800000 bytes, given 1799999"),
        (lambda content: content + b"x", "longer than the 1800000 bytes expected"),
        (lambda content: content[:-1] + b"x", "corrupt: expected sha256"),
        (lambda content: b"<html>Sign in to this network</html>", "truncated: expected 1800000 bytes, given 36"),
        (lambda content: b"", "given 0"),
    ],
)
def test_a_wrong_file_is_refused_and_leaves_no_trace(tmp_path, capsys, change, message):
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for name, content in CONTENT.items():
        (mirror / name).write_bytes(content if name == "labels.gz" else change(content))
    directory = tmp_path / "data"
    old = directory / "toy" / "images.gz"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"what was there before")
    assert run("toy", directory, mirror.as_uri()) == 1
    assert message in capsys.readouterr().err
    assert names(directory) == ["images.gz"] and old.read_bytes() == b"what was there before"
    # A second mirror that is right makes up for it.
    (tmp_path / "right").mkdir()
    for name, content in CONTENT.items():
        (tmp_path / "right" / name).write_bytes(content)
    assert run("toy", directory, mirror.as_uri(), (tmp_path / "right").as_uri()) == 0
    assert old.read_bytes() == CONTENT["images.gz"]


def test_when_no_mirror_answers_the_message_says_what_to_do(server, tmp_path, capsys):
    address, _, _ = server
    assert run("packed", tmp_path, "http://127.0.0.1:1", address + "/silent", timeout=0.3) == 1
    error = capsys.readouterr().err
    for line in (
        "no mirror delivered all.tar.gz",
        "Connection refused",
        "timed out",
        f"Get it by hand (sha256 {hashlib.sha256(ARCHIVE).hexdigest()}",
        f"put it into {tmp_path / 'packed'}, unpacked: one.bin two.bin",
        "--mirror URL",
    ):
        assert line in error
    assert names(tmp_path) == []


def test_a_file_that_a_server_breaks_off_is_refused(tmp_path, capsys):
    """The length is announced, the connection ends early."""

    class Short(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT["images.gz"])))
            self.end_headers()
            self.wfile.write(CONTENT["images.gz"][:1000])

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Short) as httpd:
        thread = threading.Thread(target=httpd.handle_request)
        thread.start()
        assert run("toy", tmp_path, f"http://127.0.0.1:{httpd.server_port}") == 1
        thread.join()
    assert "truncated" in (error := capsys.readouterr().err) or "IncompleteRead" in error
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_stopped_download_leaves_no_trace(server, tmp_path, number, code, word):
    address, _, _ = server
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "mnist", "--data-dir", tmp_path, "--mirror", address + "/slow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + PATIENCE
    while not any(path.stat().st_size for path in tmp_path.rglob("*.tmp")) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(names(tmp_path)) == 1
    process.send_signal(number)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == code and word in error and "Traceback" not in error
    assert names(tmp_path) == []


def test_a_full_disk_is_named_and_leaves_no_trace(tmp_path):
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / "train-images-idx3-ubyte.gz").write_bytes(b"x" * 9_912_422)
    done = subprocess.run(
        [sys.executable, SCRIPT, "mnist", "--data-dir", tmp_path / "data", "--mirror", mirror.as_uri()],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"mnist: cannot write into {tmp_path / 'data' / 'mnist'}" in done.stderr and "File too large" in done.stderr
    assert names(tmp_path / "data") == []


def test_help_names_every_option_and_data_set():
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for word in ("mnist", "fashion-mnist", "cifar10", "--data-dir", "--mirror", "--timeout", "RINGPROP_DATA"):
        assert word in done.stdout


def test_the_catalog_agrees_with_the_files():
    """Sizes and sums of what is in $RINGPROP_DATA are those that a download is checked against."""
    directory = Path(os.environ.get("RINGPROP_DATA") or SCRIPT.parents[1] / "data")
    checked = 0
    for name in ("mnist", "fashion-mnist", "tinyshakespeare"):
        for file in get_data.CATALOG[name].files:
            path = directory / name / file.name
            if path.is_file():
                checked += 1
                assert path.stat().st_size == file.size
                assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
                if path.suffix == ".gz":
                    with gzip.open(path) as content:
                        assert content.read(2) == b"\0\0"
    if not checked:
        pytest.skip("needs data sets in $RINGPROP_DATA (scripts/get_data.py mnist)")
