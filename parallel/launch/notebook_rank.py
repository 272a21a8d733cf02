"""What a rank does with a notebook cell of %%mpi (parallel/launch/notebook.py), and how values travel between them.

The notebook writes a directory: `cell.py`, the cell; `request.json`, which names to bring back; `in.json` and
`in.npz`, the values to begin with; `definitions.py`, the functions and classes. Each rank r runs

    python -m mpi4py -m parallel.launch.notebook_rank DIRECTORY

and leaves `r.json` and `r.npz` (values), or `r.error` (its traceback), or `r.stack` (where it was when ended).
Values are arrays, numbers, strings, None, and lists, tuples and dicts of them: JSON and .npz, never pickle.
"""

import faulthandler
import json
import sys
import time
import traceback
import types
from pathlib import Path

import numpy as np

WAIT = 30.0  # seconds that a failed rank waits for the notebook to end it


def save(path: Path, values: dict) -> None:
    """Write named values as path.json and path.npz. Raises TypeError, with the name, for others than listed above."""
    arrays = {}
    tree = {}
    for name, value in values.items():
        try:
            tree[name] = _encode(value, arrays)
        except TypeError as error:
            raise TypeError(f"`{name}` cannot go between the notebook and the ranks: {error}") from None
    np.savez(path.with_suffix(".npz"), **arrays)
    path.with_suffix(".json").write_text(json.dumps(tree))


def load(path: Path) -> dict:
    """What `save` wrote."""
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
        tree = json.loads(path.with_suffix(".json").read_text())
        return {name: _decode(value, arrays) for name, value in tree.items()}


def _encode(value, arrays):
    """JSON for a value: itself, or {kind: content}; arrays go into `arrays` and are named there."""
    if value is None or type(value) in (bool, int, float, str):
        return value
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
    items = [_decode(item, arrays) for item in content]
    return items if kind == "list" else tuple(items)


def main(directory: Path) -> None:
    """Run the cell in `directory` on this rank, and leave there what it has made, or why it failed."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # whole lines, so that ranks do not mix
    with open(directory / f"{rank}.stack", "w") as stack:
        faulthandler.enable(stack)
        try:
            run(directory, rank)
        except BaseException as error:  # also SystemExit: the other ranks would wait for this one
            trace = error.__traceback__
            while trace and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            text = "".join(traceback.format_exception(type(error), error, trace))
            part = directory / f"{rank}.part"
            part.write_text(text)
            part.rename(directory / f"{rank}.error")
            time.sleep(WAIT)
            MPI.COMM_WORLD.Abort(1)


def run(directory: Path, rank: int) -> None:
    """Execute the definitions and the cell; save the names that are asked for. Raises what they raise."""
    sys.modules["__main__"] = types.ModuleType("__main__")  # where pickle looks for what the cell defines
    names = vars(sys.modules["__main__"])
    names.update(load(directory / "in"))
    for file in directory / "definitions.py", directory / "cell.py":
        exec(compile(file.read_text(), file, "exec"), names)
    wanted = json.loads((directory / "request.json").read_text())
    if missing := [name for name in wanted if name not in names]:
        raise NameError(f"-o asks for {', '.join(missing)}, which this rank has not set")
    save(directory / str(rank), {name: names[name] for name in wanted})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
