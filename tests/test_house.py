"""The house: what may import what, read from the source. Imports inside functions, and for types alone, count too."""

import ast
import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

import pytest

import collectives
import nn
import parallel

ROOT = Path(__file__).parents[1]
# The rooms of each package, those to come too, from the ground up: a file imports its own room and those before it.
FLOORS = {
    "nn": (
        "keyed", "reading", "core", "initializers", "layers", "losses", "optim", "data", "training", "models", "files",
        "analysis",
    ),
    "collectives": (
        "steps", "reading", "progress", "algorithms", "failures", "node_memory", "pricing", "checking", "drawing",
        "report", "puzzles", "choosing", "running", "communicator",
    ),
    "parallel": (
        "launch", "reports", "mesh", "passes", "exchange", "trainer", "strategies", "planning",
        "elastic", "command",
    ),
}  # fmt: skip
# The packages that each may import.
BELOW = {"nn": (), "collectives": (), "parallel": ("nn", "collectives")}

FOREIGN = {
    "nn": {"numpy", "matplotlib", "PIL"},
    "collectives": {"numpy", "matplotlib", "PIL", "mpi4py"},
    "parallel": {"numpy", "matplotlib", "mpi4py", "threadpoolctl", "IPython"},
}

# Modules that somebody imports under another name: (importing file, module).
RENAMED = {
    ("collectives/running/table.py", "collectives.running.plan_moves"),
    ("collectives/running/table.py", "collectives.running.plan_reductions"),
    ("tests/collectives/test_communicator.py", "collectives.algorithms.shared"),
    ("collectives/node_memory/plans.py", "collectives.algorithms.shared"),
    ("tests/collectives/test_clock.py", "collectives.pricing.price"),
    ("tests/collectives/test_closed_forms.py", "collectives.pricing.price"),
    ("tests/collectives/test_window.py", "collectives.node_memory.window"),
}
# Folders whose `__init__` is no map yet.
UNMAPPED = {
    "parallel/exchange", "parallel/exchange/compression", "parallel/passes",
    "parallel/strategies",
}  # fmt: skip


def module_of(path: Path) -> str:
    """nn.core.layer of nn/core/layer.py, nn.core of nn/core/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def files() -> dict[str, Path]:
    """Every module of the three packages, and its file."""
    found = (path for package in FLOORS for path in sorted((ROOT / package).rglob("*.py")))
    return {module_of(path): path for path in found}


@cache
def tree_of(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(tree_of(text)))


def imports_in(text: str, package: str, known: Container[str] = frozenset()) -> Iterator[str]:
    """The modules that a text imports, wherever in it; `known` are all of ours.

    `from nn.data import loader` is nn.data.loader where that is a module, and nn.data otherwise. Importing
    collectives.running.plan also runs the `__init__` of what is around it, which is not counted: it is a map.
    """
    for node in nodes_of(text):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*around, *filter(None, [node.module])])
            names = [name if (name := f"{origin}.{alias.name}") in known else origin for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            names = [part.value for part in node.args[:1] if isinstance(part, ast.Constant)]
        yield from names


@cache
def edges() -> dict[str, set[str]]:
    """Every module -> the modules that it imports."""
    known, found = set(files()), defaultdict(set)
    for module, path in files().items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        found[module] = known.intersection(imports_in(path.read_text(), package, known)) - {module}
    return found


def room_of(module: str) -> str:
    """core of nn.core.layer, losses of nn.losses, and "" of the package itself."""
    return (module.split(".") + [""])[1]


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Every set of modules that import each other, however far around."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, waiting = set(), [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        reach[start] = seen
    return {
        frozenset(other for other in graph if other in reach[start] and start in reach[other])
        for start in graph
        if start in reach[start]
    }


def test_this_reads_imports():
    """Control: each form of import is found, and nothing else."""
    known = {"nn", "nn.data", "nn.data.loader", "nn.losses", "collectives.steps"}
    text = """
import numpy, nn.losses
from nn.data import loader, Data
from .. import losses
def f():
    from collectives.steps import Send
    importlib.import_module("nn.data.loader")
if TYPE_CHECKING:
    from nn import Network
"""
    found = list(imports_in(text, "nn.data", known))
    assert sorted(found) == sorted(
        ["numpy", "nn.losses", "nn.data.loader", "nn.data", "nn.losses", "collectives.steps", "nn.data.loader", "nn"]
    )
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == {frozenset("abc")}
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()
    assert len(files()) > 100 and sum(map(len, edges().values())) > 300


def test_packages_import_one_way():
    """And of what others made only what CONTRIBUTING.md allows: importing nn must never start MPI."""
    wrong = {
        (module, other)
        for module, others in edges().items()
        for other in others
        if (package := module.split(".")[0]) != (its := other.split(".")[0]) and its not in BELOW[package]
    }
    assert not wrong
    for module, path in files().items():
        names = {name.split(".")[0] for name in imports_in(path.read_text(), module)}
        assert names - sys.stdlib_module_names - set(FLOORS) <= FOREIGN[module.split(".")[0]], module


@pytest.mark.parametrize("package", FLOORS)
def test_every_room_has_its_floor(package):
    assert {room_of(module) for module in files() if module.startswith(f"{package}.")} <= set(FLOORS[package])


@pytest.mark.parametrize("package", FLOORS)
def test_the_floors_are_those_that_contributors_are_told(package):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (row,) = re.findall(rf"^\| `{package}/` \| ([a-z_]+(?:, [a-z_]+)+) \|$", text, re.MULTILINE)
    told = row.split(", ")
    assert told == [room for room in FLOORS[package] if room in told] and len(told) > 5


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_one_way(package):
    """A file imports its own room and those below, never the package as a whole; its `__init__` may import all."""
    floor = {room: i for i, room in enumerate(FLOORS[package])}
    wrong = {
        (module, other)
        for module, others in edges().items()
        for other in others
        if module.startswith(f"{package}.")
        and other.split(".")[0] == package
        and (other == package or floor[room_of(other)] > floor[room_of(module)])
    }
    assert wrong == set()


def test_no_files_import_each_other_in_a_circle():
    assert circles(edges()) == set()


def test_modules_are_imported_under_their_names():
    known, found = set(files()), set()
    places = [path for room in (*FLOORS, "scripts", "tests", "notebooks") for path in (ROOT / room).rglob("*.py")]
    renames = re.compile(r"^ *(from .*)?import (?!numpy as np$).* as |^ {4,}\w+ as \w+,$", re.MULTILINE)
    for path in places:
        text = path.read_text()
        for node in ast.walk(tree_of(text)) if renames.search(text) else ():  # a walk through all takes seconds
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if alias.asname and (name := before + alias.name) in known:
                    found.add((path.relative_to(ROOT).as_posix(), name))
    assert found - RENAMED == set()
    assert RENAMED - found == set(), "mended: take it out of RENAMED"


FOLDERS = sorted(path.parent for path in files().values() if path.name == "__init__.py" and path.parent.parent != ROOT)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_folder_begins_with_a_map(folder):
    """Some ten lines at the top of its `__init__` name every file and folder in it; there is no code but imports."""
    tree = tree_of((folder / "__init__.py").read_text())
    text = ast.get_docstring(tree) or ""
    inside = [path.name for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    missing = [name for name in sorted(inside) if name != "__init__.py" and name not in text]
    code = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    wrong = [*missing, *code, *(["too long"] if len(text.splitlines()) > 16 else [])]
    if folder.relative_to(ROOT).as_posix() in UNMAPPED:
        assert wrong, "mended: take it out of UNMAPPED"
    else:
        assert not wrong, f"not in the map: {missing}; code beside it: {code}"


# Where every function and class that has no underscore says what it does.
TOLD = ("nn", "parallel")


def test_public_names_say_what_they_do():
    missing = []
    for path in files().values():
        if not path.relative_to(ROOT).as_posix().startswith(TOLD):
            continue
        for node in tree_of(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                missing += [] if ast.get_docstring(node) else [f"{path.relative_to(ROOT)}: {node.name}"]
    for callback in (nn.Callback.on_begin, nn.Callback.on_step, nn.Callback.on_epoch, nn.Callback.on_end):
        missing += [] if callback.__doc__ else [callback.__qualname__]
    assert not missing


# The names that programs rely on: none may go.
PUBLIC = {
    nn: """
    GELU LAMB LARS LBFGS SGD Adagrad Adam AdamW AdaptiveAvgPool2d AvgPool2d BCEWithLogitsLoss BatchNorm1d BatchNorm2d
    Branches Callback CheckpointError Checkpoints ClipGlobalNorm ClipNorm ClipValue Conv2d CrossEntropyLoss Dropout
    EarlyStopping Embedding Flatten GlobalAvgPool2d GlobalMaxPool2d HuberLoss KeepCheckpoints Layer LayerNorm Layout
    LeakyReLU LearnedPositions Linear Loader LocalResponseNorm LogSoftmax MAELoss MSELoss MaskedCrossEntropyLoss
    MaxPool2d Memory Metrics MultiHeadAttention NLLLoss Network NonFiniteLoss Progress QuadraticLoss RMSNorm RMSprop
    ReLU Recompute Region Reshape Residual RestoreBest Run Sequential Serial ShapeError SiLU Sigmoid
    SinusoidalPositions Softmax Spec Tanh TiedLinear Training TransformerBlock Vectors data evaluate fit gradcheck
    models save load register Trained FileError
    """,
    parallel: """
    CheckReplicas CompressedDataParallel CompressedParameterServer DataParallel DistributedDataParallel
    FullyShardedDataParallel ParameterServer ReplicaError ReproducibleDataParallel
    ReproducibleFullyShardedDataParallel ReproducibleMasterWorker ReproducibleParameterServer ReproducibleSerial
    ReproducibleZeRO1 ReproducibleZeRO2 ZeRO1 ZeRO2 join
    """,
    collectives: """
    ALGORITHMS Communicator Copy Deadlock Recv RecvReduce Reduce ScheduleError Send blocks check check_world draw
    install_excepthooks part price simulate testall waitall
    """,
}


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_public_names_stay(package):
    missing = [name for name in PUBLIC[package].split() if not hasattr(package, name)]
    assert not missing
    assert set(PUBLIC[package].split()) <= set(package.__all__)
    assert importlib.import_module(package.__name__) is package


def test_files_of_tests_have_names_of_their_own():
    """pytest takes two of one name, in different folders, for one module."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_nobody_asks_a_trainer_or_its_parts_what_attributes_they_have():
    """What all have is in the protocol: nn.Serial, parallel.Trainer, and the bases of passes and exchanges."""
    found = []
    for module, path in files().items():
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
                asked, name = ast.unparse(node.args[0]), node.args[1]
                if isinstance(name, ast.Constant) and asked.rpartition(".")[2] in ("trainer", "exchange", "pass_"):
                    found.append(f"{module}: {ast.unparse(node)}")
    assert found == []
