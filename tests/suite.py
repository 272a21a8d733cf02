"""How this project's own tests are run: a draw from the large ones, and their order where several workers share them.

`pytest --exhaustive 6` runs one in six of the tests that are marked exhaustive, on ranks or not: which ones, the code
decides, so that each has its turn and a failure can be tried again.
"""

import functools
import gc
import re
import zlib
from pathlib import Path

import pytest

from parallel.launch import launcher


def pytest_addoption(parser):
    help = "run one in N of the tests marked exhaustive, drawn by the code"
    parser.addoption("--exhaustive", type=int, metavar="N", help=help)


def pytest_report_header(config):
    if one_in := config.getoption("exhaustive"):
        return f"exhaustive: one in {one_in}, drawn by the code, {code():08x}"


def pytest_configure(config):
    if (one_in := config.getoption("exhaustive")) is not None and one_in < 1:
        raise pytest.UsageError(f"--exhaustive runs one in N, N at least 1, given {one_in}")
    gc.disable()  # while thousands of tests are collected, which all stay: a quarter of that time


@functools.cache
def code() -> int:
    """A number for what is tested, and the tests."""
    root, number = Path(__file__).parents[1], 0
    for folder in ("collectives", "nn", "parallel", "scripts", "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            number = zlib.crc32(path.read_bytes(), number)
    return number


def not_drawn(items, one_in) -> list:
    """The exhaustive ones but one in so many, which this code draws."""
    seed = code()
    left = lambda item: zlib.crc32(f"{seed} {item.nodeid}".encode()) % one_in
    return [item for item in items if item.get_closest_marker("exhaustive") and left(item)]


def pytest_collection_modifyitems(config, items):
    if one_in := config.getoption("exhaustive"):
        out = set(not_drawn(items, one_in))
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]


def pytest_collection_finish():
    """The garbage collector passes over the thousands of tests and their modules from now on: they stay to the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """With pytest-xdist, -n logical: one worker more than cores, for some wait for programs, or for a time to pass."""
    return launcher.cores() + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With pytest-xdist: which tests one worker runs one after the other, and which of them are begun first.

    It knows tests by their names alone. The longest come first, or one worker would end minutes after the others: a
    test on ranks, or of a file that starts programs, takes some fifty times as long as another one; one on a cluster
    waits for it for ten seconds, in which the other workers have the cores. Files that compare with PyTorch go to one
    worker: to import it takes as long as all their tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByLaunch(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path, _, test = nodeid.partition("::")
            ranks = re.search(r"[\[-](\d+ ranks?)[]-]", test)
            if ranks:
                return f"{path.rpartition('/')[0]} {ranks[1]}"
            return "torch" if imports_torch(config.rootpath / path) else path

        def _assign_work_unit(self, node):
            self.workqueue.move_to_end(max(self.workqueue, key=self.expected), last=False)
            super()._assign_work_unit(node)

        def expected(self, scope):
            files = {config.rootpath / nodeid.partition("::")[0] for nodeid in self.workqueue[scope]}
            alone = " " not in scope and not any(map(starts_programs, files))
            return len(self.workqueue[scope]) * (1 if alone else 1000 if any(map(on_a_cluster, files)) else 50)

    return ByLaunch(config, log)


@functools.cache
def starts_programs(file: Path) -> bool:
    return re.search("subprocess|launch|scripts", file.read_text()) is not None


@functools.cache
def on_a_cluster(file: Path) -> bool:
    return re.search("import slurmlab", file.read_text()) is not None


@functools.cache
def imports_torch(file: Path) -> bool:
    """Whether the tests themselves do; what a program that they start imports is its own."""
    return not starts_programs(file) and re.search(r'importorskip\("torch', file.read_text()) is not None
