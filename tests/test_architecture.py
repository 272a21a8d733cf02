"""What the packages may use, and how their files, names and docstrings are kept.

The order of imports is held by import-linter (setup.cfg, `make lint`).
"""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

import pytest

import collectives
import nn
import parallel
from parallel.testing import faults

ROOT = Path(__file__).parents[1]
PACKAGES = ("nn", "collectives", "parallel")
# What each package may use beside the standard library and the project itself.
FOREIGN = {
    "nn": {"numpy", "matplotlib", "PIL"},
    "collectives": {"numpy", "matplotlib", "PIL", "mpi4py"},
    "parallel": {"numpy", "matplotlib", "mpi4py", "threadpoolctl", "IPython", "pytest", "_pytest"},
}

# Modules that somebody imports under another name: (importing file, module).
RENAMED = {
    ("tests/collectives/test_event_simulation.py", "collectives.pricing.price"),
    ("tests/collectives/test_closed_forms.py", "collectives.pricing.price"),
    ("tests/collectives/test_window.py", "collectives.node_memory.window"),
}
# Folders whose `__init__` is no map yet.
UNMAPPED = {"parallel/strategies"}


def module_of(path: Path) -> str:
    """nn.core.layer of nn/core/layer.py, nn.core of nn/core/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def files() -> dict[str, Path]:
    """Every module of the three packages, and its file."""
    found = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
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
    assert len(files()) > 100


def test_packages_use_only_what_they_may():
    for module, path in files().items():
        names = {name.split(".")[0] for name in imports_in(path.read_text(), module)}
        assert names - sys.stdlib_module_names - set(PACKAGES) <= FOREIGN[module.split(".")[0]], module
        assert "pytest" not in names or module.startswith("parallel.testing."), f"{module} needs pytest to be imported"


def test_modules_are_imported_under_their_names():
    known, found = set(files()), set()
    places = [path for folder in (*PACKAGES, "scripts", "tests", "notebooks") for path in (ROOT / folder).rglob("*.py")]
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
DOCUMENTED = ("nn", "parallel")


def test_public_names_say_what_they_do():
    missing = []
    for path in files().values():
        if not path.relative_to(ROOT).as_posix().startswith(DOCUMENTED):
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
    Callback CheckpointError Checkpoints ClipGlobalNorm ClipNorm ClipValue Conv2d CrossEntropyLoss Dropout
    EarlyStopping Embedding Flatten GlobalAvgPool2d GlobalMaxPool2d HuberLoss KeepCheckpoints Layer LayerNorm Layout
    LeakyReLU LearnedPositions Linear Loader LocalResponseNorm LogSoftmax MAELoss MSELoss MaskedCrossEntropyLoss
    LayerContext MaxPool2d MemoryPool Metrics MixtureOfExperts MultiHeadAttention NLLLoss Network NonFiniteLoss
    Parallel Product Progress QuadraticLoss RMSNorm RMSprop RNN RotaryPositions RowSum ScatterAdd
    ReLU Recompute Region Reshape Residual RestoreBest Sequential Trainer ShapeError SiLU Sigmoid
    SinusoidalPositions Softmax Spec Tanh TiedLinear Training TransformerBlock Vectors data evaluate fit gradcheck
    models save load register Model FileError check_layer check_loss check_optimizer
    """,
    parallel: """
    CheckReplicas DataParallel DistributedDataParallel QuasiNewton
    ShardedCheckpoints FullyShardedDataParallel ParameterServer ReplicaError
    ZeRO1 ZeRO2 join
    """,
    collectives: """
    ALGORITHMS Communicator Copy Deadlock Recv RecvReduce Reduce ScheduleError Send blocks check check_world draw
    install_excepthooks price simulate testall waitall
    """,
}


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_public_names_stay(package):
    missing = [name for name in PUBLIC[package].split() if not hasattr(package, name)]
    assert not missing
    assert set(PUBLIC[package].split()) <= set(package.__all__)
    assert importlib.import_module(package.__name__) is package


def test_import_nn_leaves_out_what_training_does_without():
    left_out = ("nn.analysis.gradcheck", "nn.files.onnx", "nn.optim.lbfgs", "concurrent.futures", "socket")
    program = f"import sys, nn; print([name for name in {left_out} if name in sys.modules], nn.LBFGS.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[] LBFGS\n"


# Files of nn that say rank: of a member of a group, of what the user of a Loader starts, of an order.
SAY_RANK = {"nn/core/context.py", "nn/data/loader.py"}


def test_the_places_of_faults_are_listed():
    raised = [
        name for path in files().values() for name in re.findall(r'sys\.audit\("(ringprop\.\w+)', path.read_text())
    ]
    assert sorted(raised) == sorted(re.findall(r"^\| (ringprop\.\w+) \|", faults.__doc__, re.MULTILINE))


def test_nn_knows_nothing_of_ranks():
    """What only ranks need is in parallel; where nn has an opening for them, its meaning is said without them."""
    words = re.compile(r"\b(ranks?|replicas?|all-?reduce|MPI_\w+)\b", re.IGNORECASE)
    found = {p.relative_to(ROOT).as_posix() for p in (ROOT / "nn").rglob("*.py") if words.search(p.read_text())}
    assert found - SAY_RANK == set(), "say it without ranks: shards, slices, a group, processes; or do it in parallel"
    assert SAY_RANK - found == set(), "mended: take it out of SAY_RANK"


def test_files_of_tests_have_names_of_their_own():
    """pytest takes two of one name, in different folders, for one module."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_nobody_asks_a_trainer_or_its_parts_what_attributes_they_have():
    """What all have is in the protocol: nn.Trainer, DistributedTrainer, and the bases of passes and exchanges."""
    found = []
    for module, path in files().items():
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
                asked, name = ast.unparse(node.args[0]), node.args[1]
                if isinstance(name, ast.Constant) and asked.rpartition(".")[2] in (
                    "trainer",
                    "exchange",
                    "forward_backward",
                ):
                    found.append(f"{module}: {ast.unparse(node)}")
    assert found == []
