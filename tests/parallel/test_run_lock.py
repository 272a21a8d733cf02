"""Only one process trains in a directory; the lock of one that has died is taken over."""

import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import PATIENCE

from parallel.command import run_lock
from parallel.command.run_lock import NAME, RunHeld, RunLock, this_process

ROOT = Path(__file__).parents[2]
HOLDS = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from parallel.command.run_lock import RunLock
RunLock().hold(Path(sys.argv[1])); print("held", flush=True); sys.stdin.read()
"""


def holder(directory):
    program = [sys.executable, "-c", HOLDS, str(directory)]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def without_locks(monkeypatch):
    """As on a disk that has none."""

    def flock(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("locks", [True, False])
def test_a_living_process_keeps_its_directory_and_a_dead_one_does_not(tmp_path, monkeypatch, locks):
    with holder(tmp_path / "run") as other:
        if not locks:
            without_locks(monkeypatch)
        words = rf"run is being trained by process {other.pid} on \S+ since .*: wait until it has ended, or end it"
        for _ in range(2):
            with pytest.raises(RunHeld, match=words):
                RunLock().hold(tmp_path / "run")
        other.kill()
        other.wait()
    lock = RunLock(lease=PATIENCE)  # nothing to wait for on the same machine
    assert json.loads(lock.hold(tmp_path / "run"))["process"] == os.getpid()
    assert lock.hold(tmp_path / "run") == lock.own, "it is held already"
    lock.release()
    assert not list((tmp_path / "run").iterdir())
    lock.release()


def elsewhere(directory, **changes):
    content = json.dumps(this_process() | {"machine": "another", "host": "node7"} | changes)
    directory.mkdir(exist_ok=True)
    (directory / NAME).write_text(content)
    return content


def test_of_another_machine_touches_tell(tmp_path, monkeypatch):
    """Whatever the clocks of machines say; and whether the disk has locks that other machines see, or none."""
    elsewhere(tmp_path)
    over, path = threading.Event(), tmp_path / NAME

    def touch():
        while not over.wait(0.01):
            stamp = os.stat(path).st_mtime_ns + 1000
            os.utime(path, ns=(stamp, stamp))

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(RunHeld, match="on node7"):
            RunLock(lease=PATIENCE).hold(tmp_path)
    finally:
        over.set()
        thread.join()
    for locks in (True, False):
        with monkeypatch.context() as patch:
            if not locks:
                without_locks(patch)
            elsewhere(tmp_path)
            lock = RunLock(lease=0.05)
            lock.hold(tmp_path)
            lock.release()
    known = elsewhere(tmp_path)
    lock = RunLock(lease=PATIENCE)
    assert lock.hold(tmp_path, known=known) == lock.own, "a rank of the same run, which has died"
    lock.release()


@pytest.mark.parametrize("content", ["", "{", '{"process": "x", "machine": 3}', "\0" * 5000])
def test_a_lock_that_tells_nothing_is_taken_over(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    lock = RunLock(lease=0.0)
    lock.hold(tmp_path)
    assert json.loads((tmp_path / NAME).read_text())["process"] == os.getpid()
    lock.release()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("elsewhere", path)])
def test_a_lock_that_cannot_be_written_is_one_line(tmp_path, make):
    """From one process and from a launcher of ranks."""
    make(tmp_path / NAME)
    for ranks in ([], ["--ranks", "2"]):
        command = [sys.executable, "scripts/train.py", "--model", "mlp:64,8,10", "--out", tmp_path, *ranks]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE)
        words = rf"error: {tmp_path}/lock, which keeps other runs away, cannot be written \(.*\)\n"
        assert done.returncode == 1 and re.fullmatch(words, done.stderr), done.stderr


@pytest.mark.parametrize("room", [0, 40])
def test_a_full_disk_leaves_no_lock_and_no_directory(tmp_path, room):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))  # a file can grow no larger
    try:
        with pytest.raises(RunHeld, match=r"run/lock, which keeps other runs away, cannot be written \("):
            RunLock().hold(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "run").exists()
    (again := RunLock()).hold(tmp_path / "run")
    again.release()


@pytest.mark.parametrize("locks", [True, False])
def test_a_file_of_another_program_is_not_overwritten(tmp_path, monkeypatch, locks):
    """--out may name a directory with other things in it."""
    if not locks:
        without_locks(monkeypatch)
    (tmp_path / NAME).write_text("poetry: 1.8\n")
    with pytest.raises(RunHeld, match="lock is the file of another program"):
        RunLock(lease=0.0).hold(tmp_path)
    assert (tmp_path / NAME).read_text() == "poetry: 1.8\n"


def test_one_that_was_taken_for_dead_ends(tmp_path):
    """Two would write: as where a machine was suspended for long, and another one went on."""
    with holder(tmp_path) as other:
        (tmp_path / NAME).unlink()
        with holder(tmp_path) as third:
            assert other.wait(PATIENCE) == -signal.SIGKILL and third.poll() is None
            third.stdin.close()


def test_no_two_take_over_the_same(tmp_path):
    """Many at once, where the last holder was killed: one has it, the others are refused."""
    with holder(tmp_path) as dead:
        dead.kill()
    got, refused, barrier = [], [], threading.Barrier(8)

    def take():
        lock = RunLock()
        barrier.wait()
        try:
            lock.hold(tmp_path)
            got.append(lock)
        except RunHeld as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == 7
    got[0].release()


def test_resuming_a_run_that_still_runs_is_refused_and_leaves_it_alone(tmp_path, nothing_left):
    """From one process and from ranks, which are not started; and it ends as if nobody had tried."""
    out = tmp_path / "live"
    command = [sys.executable, "scripts/train.py", "--model", "mlp:64,8,10", "--limit", "60", "--no-pictures"]
    with subprocess.Popen(
        [*command, "--epochs", "100000", "--out", out], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as running:
        while not (out / "checkpoints" / "manifest.json").exists():
            assert running.poll() is None
            time.sleep(0.01)
        said = json.loads((out / NAME).read_text())
        assert said["process"] == running.pid
        for ranks in ([], ["--ranks", "2"]):
            done = subprocess.run(
                [sys.executable, "scripts/train.py", "--resume", out, "--epochs", "100001", *ranks],
                cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE,
            )  # fmt: skip
            assert done.returncode == 1, done.stdout + done.stderr
            assert re.fullmatch(rf"error: {out} is being trained by process {running.pid} on .*\n", done.stderr)
        assert running.poll() is None
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=PATIENCE)
        assert running.returncode == 143 and b"to continue" in errors, errors
    assert not (out / NAME).exists()


def test_a_machine_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "line_of", lambda path: "")
    monkeypatch.setattr(run_lock, "stat_fields", lambda pid: Path("/proc/0/stat").read_text())  # FileNotFoundError
    lock = RunLock(lease=0.0)
    lock.hold(tmp_path)
    lock.release()
