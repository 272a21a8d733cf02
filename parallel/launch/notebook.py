"""A notebook cell on MPI ranks: `%load_ext parallel.launch.notebook`, then

    %%mpi -n 2 -o total
    from mpi4py import MPI
    total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank())

runs the cell on two ranks started for it alone (launcher.py), shows what they print as it comes, and sets
`total` in the notebook to a list, one value a rank. The ranks are processes of their own: they know nothing of the
notebook but what `--with` names. The cell ends, and every rank with it, when a rank raises (its traceback is shown with
its number), at the time limit (with the line where each rank was), and on interrupting the kernel.
"""

import ast
import json
import os
import re
import sys
import tempfile
import time
import types
from pathlib import Path

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from parallel.launch import launcher, notebook_rank

START = 60.0  # seconds that ranks get to begin
GRACE = 1.0  # seconds that the other ranks get to fail too before all are ended


class RankError(RuntimeError):
    """A cell failed on some rank; shown without the notebook's own frames, which say nothing."""

    def _render_traceback_(self):
        return str(self).splitlines()


@magic_arguments()
@argument("-n", "--ranks", type=int, default=2, help="how many ranks (default: 2)")
@argument("-t", "--timeout", type=float, default=60.0, help="seconds after which ranks are ended (default: 60)")
@argument("-o", "--out", default="", help="names to bring back, separated by commas: each a list, one value a rank")
@argument("--with", dest="given", default="", help="names of the notebook that the ranks begin with")
def mpi(line, cell):
    """Run this cell on MPI ranks."""
    shell = get_ipython()
    asked = parse_argstring(mpi, line)
    out, given = _names(asked.out), _names(asked.given)
    with tempfile.TemporaryDirectory(prefix="mpi-cell-") as directory:
        directory = Path(directory)
        (directory / "cell.py").write_text(cell)
        (directory / "request.json").write_text(json.dumps(out))
        _give(directory, given, shell)
        _run(directory, asked.ranks, asked.timeout)
        results = [notebook_rank.load(directory / str(rank)) for rank in range(asked.ranks)]
    shell.user_ns.update({name: [result[name] for result in results] for name in out})


def load_ipython_extension(shell):
    """What %load_ext calls: from now on there is %%mpi."""
    shell.register_magic_function(mpi, "cell")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _give(directory: Path, names: list[str], shell) -> None:
    """Write what the ranks begin with: imports and definitions as source, the rest as values."""
    lines, values = [], {}
    for name in names:
        if name not in shell.user_ns:
            raise UsageError(f"--with {name}: the notebook has no such name")
        value = shell.user_ns[name]
        if isinstance(value, types.ModuleType):
            lines.append(f"import {value.__name__} as {name}")
        elif not isinstance(value, type | types.FunctionType):
            values[name] = value
        elif value.__module__ == "__main__":
            lines.append(_definition(name, shell.user_ns["In"]))
        else:
            lines.append(f"from {value.__module__} import {value.__qualname__} as {name}")
    (directory / "definitions.py").write_text("\n".join(lines))
    try:
        notebook_rank.save(directory / "in", values)
    except TypeError as error:
        raise UsageError(f"--with: {error}") from None


def _definition(name: str, cells: list[str]) -> str:
    """The source of a function or class, from the last cell that defined it."""
    for text in reversed(cells):
        try:
            body = ast.parse(text).body
        except SyntaxError:  # a cell that failed
            continue
        for node in reversed(body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                first = min(part.lineno for part in [node, *node.decorator_list])
                return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise UsageError(f"--with {name}: no cell defines it with `def` or `class`")


def _run(directory: Path, ranks: int, timeout: float) -> None:
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    environment = os.environ | {"PYTHONPATH": path, "MPLBACKEND": "agg"}  # not the notebook's own backend
    ends, running, failed_at, status, shown = time.monotonic() + START, False, None, None, True
    show = lambda text: print(text, end="", flush=True) if shown else None
    program = ["-m", "parallel.launch.notebook_rank", str(directory)]
    with launcher.Job(program, ranks, env=environment, stdout=show) as job:
        try:
            while (status := job.wait(0.05)) is None:
                now, failed = time.monotonic(), len(list(directory.glob("*.error")))
                failed_at = failed_at or (now if failed else None)
                if not running and all((directory / f"{rank}.stack").exists() for rank in range(ranks)):
                    ends, running = now + timeout, True
                if failed == ranks or (failed and now > failed_at + GRACE) or now > ends:
                    shown = False
                    job.show_stacks()
                    job.wait(GRACE)
                    break
        finally:
            shown = False  # what mpiexec says about being ended is no news
    if status != 0 or not all((directory / f"{rank}.json").exists() for rank in range(ranks)):
        late = f"no end within {timeout:g} s" if running else f"the ranks did not begin within {START:g} s"
        raise RankError(_explain(directory, ranks, status, late))


def _explain(directory: Path, ranks: int, status: int | None, late: str) -> str:
    """What each rank failed with, or where it was."""
    errors = {rank: path.read_text() for rank in range(ranks) if (path := directory / f"{rank}.error").exists()}
    by_text = {}
    for rank, text in errors.items():
        by_text.setdefault(text, []).append(rank)
    parts = [f"rank {', '.join(map(str, those))} of {ranks}: {text}" for text, those in by_text.items()]
    if not errors:
        parts = [late if status is None else launcher.ending(status)]
    for rank in range(ranks):
        frames = launcher.read_stack(directory / f"{rank}.stack")
        inside = [frame for frame in frames if frame[0] == str(directory / "cell.py")]
        if rank not in errors and inside:
            line = inside[0][1]
            source = (directory / "cell.py").read_text().splitlines()[line - 1].strip()
            parts.append(f"rank {rank} of {ranks} was at line {line} of the cell: {source}")
    return re.sub(f'"{re.escape(str(directory))}/(cell|definitions).py"', r"the \1", "\n".join(parts))
