"""What all tests share: MPI ranks launched by pytest (parallel/testing), and the check that nothing stays behind."""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

# pytest puts this directory on the path, where tests/nn would pass for the package nn: the packages come first.
sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.launch import blas

pytest_plugins = ["parallel.testing.plugin", "suite"]  # the first by its entry point, too, where installed
PATIENCE = 900.0  # seconds after which a test that waits for an event gives up: machines and disks have hung for 300


def longer(first):
    """Times to try, one after the other, where ranks must be on time: on a busy machine they are for a longer one."""
    return first, 4 * first, 16 * first


# Arrays are small here: a second thread of a matrix product would take a core to wait for the first, and on a busy
# machine the first would wait for it. Before NumPy is imported; what tests start inherits it.
blas.set_environment(1)

# Algorithms are chosen by the table of the package, whatever has been measured on this machine.
os.environ.setdefault("RINGPROP_TUNE", "")

# What waits for messages looks again and again: cores are shared with other tests, so it gives way to them meanwhile.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

# Started in the background by a script, pytest would hand down to all its children that Ctrl-C is to be ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Told to write no bytecode, each of the hundreds of processes that tests start would compile the packages anew.
if sys.dont_write_bytecode and os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")


# Runs write checkpoints through to the disk, while other ranks wait for them in a busy loop: here the disk is memory,
# where there is enough, from which programs may be started. What hosts of scripts/netlab.py share is not: `disk_path`.
MEMORY, ENOUGH = Path("/dev/shm"), 4 << 30
os.environ.setdefault("RINGPROP_TEST_DISK", tempfile.gettempdir())
if (
    "TMPDIR" not in os.environ
    and os.access(MEMORY, os.W_OK)
    and shutil.disk_usage(MEMORY).free > ENOUGH
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
):
    place = MEMORY / f"tests-of-ringprop-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(place)


@contextlib.contextmanager
def leaving_nothing():
    """At the end of this block none of the processes started in it, or by those, runs.

    They are found by a variable in their environment, read from /proc: independent of what the launcher does. What
    is started in it and must be ended by somebody sleeps longer than PATIENCE: it does not end by itself meanwhile.
    """
    name, value = "RINGPROP_TEST_MARK", os.urandom(8).hex()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield
    end = time.monotonic() + PATIENCE
    while (left := list(_running(f"{name}={value}"))) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left, f"still running: {left}"


def _running(variable):
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in environ.read_bytes().split(b"\0"):
                yield environ.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has just ended, or is another user's
            continue


@pytest.fixture
def nothing_left():
    with leaving_nothing():
        yield


@pytest.fixture
def disk_path():
    """As tmp_path, but never in /dev/shm, of which each host of scripts/netlab.py has its own."""
    with tempfile.TemporaryDirectory(dir=os.environ["RINGPROP_TEST_DISK"]) as directory:
        yield Path(directory)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["some", "all"])
def thorough(request):
    """Whether to try all cases: in an exhaustive test, beside one that tries some of them."""
    return request.param
