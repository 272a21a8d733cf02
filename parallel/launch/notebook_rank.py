"""A rank that runs cells of %%mpi (parallel/launch/notebook_session.py), and how values travel between them.

Each rank r runs

    python -m mpi4py -m parallel.launch.notebook_rank DIRECTORY

reads from DIRECTORY/r.go which cell is next, and leaves in that cell's folder what it has printed and drawn, and the
names that are asked for, or its traceback. Values are arrays, numbers, strings, None, and lists, tuples and dicts of
them: JSON and .npz, never pickle.
"""

import ast
import faulthandler
import json
import os
import sys
import traceback
import types
import warnings
from pathlib import Path

import numpy as np


def encoded(values: dict) -> tuple[dict, dict]:
    """Return (tree for JSON, arrays) of named values. Raises TypeError, with the name, for types not listed above."""
    arrays: dict = {}
    tree = {}
    for name, value in values.items():
        try:
            tree[name] = _encode(value, arrays)
        except TypeError as error:
            raise TypeError(f"`{name}` cannot go between the notebook and the ranks: {error}") from None
    return tree, arrays


def save(path: Path, values: dict) -> None:
    """Write named values as path.npz and then path.json. Raises TypeError."""
    tree, arrays = encoded(values)
    np.savez(path.with_suffix(".npz"), **arrays)
    path.with_suffix(".part").write_text(json.dumps(tree))
    path.with_suffix(".part").rename(path.with_suffix(".json"))


def load(path: Path) -> dict:
    """Read what `save` wrote."""
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
        tree = json.loads(path.with_suffix(".json").read_text())
        return {name: _decode(value, arrays) for name, value in tree.items()}


def _encode(value, arrays):
    """Return JSON for a value: itself, or {kind: content}; arrays go into `arrays` and are named there."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encode(item, arrays) for item in value]}
    if type(value) is dict:
        return {"dict": [[_encode(key, arrays), _encode(item, arrays)] for key, item in value.items()]}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        name = f"a{len(arrays)}"
        arrays[name] = np.asarray(value)
        return {"array" if isinstance(value, np.ndarray) else "scalar": name}
    raise TypeError(f"{type(value).__name__} is not an array, number, string, or list, tuple or dict of such")


def _decode(value, arrays):
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {_decode(key, arrays): _decode(item, arrays) for key, item in content}
    if kind == "array":
        return arrays[content]
    if kind == "scalar":
        return arrays[content][()]
    if kind == "complex":
        return complex(*content)
    items = [_decode(item, arrays) for item in content]
    return items if kind == "list" else tuple(items)


def main(directory: Path) -> None:
    """Run one cell after another, until there are no more: variables stay from each to the next."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.modules["__main__"] = types.ModuleType("__main__")  # where pickle looks for what the cell defines
    (directory / f"{rank}.part").write_text(str(os.getpid()))
    (directory / f"{rank}.part").rename(directory / f"{rank}.pid")
    with open(directory / f"{rank}.stack", "w") as stack, open(directory / f"{rank}.go") as cells:
        faulthandler.enable(stack)
        for line in cells:
            if line == "end\n":
                break
            do(directory / line.strip(), rank)


def do(place: Path, rank: int) -> None:
    """Run the cell in `place`; its output and its error go into files there."""
    kept = os.dup(1), os.dup(2)
    out = os.open(place / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in 1, 2:
        os.dup2(out, number)
    try:
        run(place, rank)
    except BaseException as error:  # also SystemExit: the other ranks would wait for this one
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        part = place / f"{rank}.part"
        sys.stdout.flush()
        part.write_text(text)
        part.rename(place / f"{rank}.error")
    finally:
        sys.stdout.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(out)


def run(place: Path, rank: int) -> None:
    """Execute the definitions and the cell; save the wanted names. Raises what they raise."""
    names = vars(sys.modules["__main__"])
    names.update(load(place / "in"))
    exec(compile((place / "definitions.py").read_text(), place / "definitions.py", "exec"), names)
    warnings.filterwarnings("ignore", ".*is non-interactive")  # plt.show(): the notebook does
    value = evaluate((place / "cell.py").read_text(), str(place / "cell.py"), names)
    wanted = json.loads((place / "request.json").read_text())
    if missing := [name for name in wanted if name not in names]:
        raise NameError(f"-o asks for {', '.join(missing)}, which this rank has not set")
    show(place, rank, value)
    sys.stdout.flush()
    save(place / str(rank), {name: names[name] for name in wanted})


def evaluate(text: str, file: str, names: dict):
    """Run a cell; return the value of its last line, if that is an expression and does not end with a semicolon."""
    tree = ast.parse(text, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    behind = text.splitlines()[last.end_lineno - 1].encode()[last.end_col_offset :]  # offsets are in bytes
    return None if behind.lstrip().startswith(b";") else value


def show(place: Path, rank: int, value) -> None:
    """Save the open figures, and the value of the last line: as a figure, if it is one."""
    figures = []
    if "matplotlib.pyplot" in sys.modules:
        plt = sys.modules["matplotlib.pyplot"]
        figures = [plt.figure(number) for number in plt.get_fignums()]
    if hasattr(value, "savefig"):
        figures += [value] * all(value is not each for each in figures)
    elif value is not None:
        (place / f"{rank}.value").write_text(repr(value))
    for number, figure in enumerate(figures):
        figure.savefig(place / f"{rank}.{number:03}.png", bbox_inches="tight")
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
