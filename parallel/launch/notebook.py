"""A notebook cell on MPI ranks: `%load_ext parallel.launch.notebook`, then

    %%mpi -n 2 -o total
    from mpi4py import MPI
    total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank())
    total

runs the cell on two ranks started for it alone, shows side by side what they print, the value of the last line and the
figures that they draw, and sets `total` in the notebook to a list, one value a rank. `%mpi?` tells the rest.

The ranks are processes of their own: they know nothing of the notebook but what `--with` names, and nothing of each
other's cells but in a session. The cell ends, and every rank with it, when a rank raises (its traceback is shown with
its number), at the time limit (with the line where each rank was), and on interrupting the kernel.
"""

import ast
import math
import types

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from parallel.launch import notebook_session
from parallel.launch.notebook_output import Output
from parallel.launch.notebook_session import Cell, RankError, Session

__all__ = ["RankError", "load_ipython_extension", "mpi"]

MOST_RANKS = 64  # processes of this machine

sessions: dict[str, Session] = {}


@magic_arguments()
@argument("-n", "--ranks", type=int, default=None, help="how many ranks (default: 2, or those of the session)")
@argument("-t", "--timeout", type=float, default=60.0, help="seconds after which ranks are ended (default: 60)")
@argument("-o", "--out", default="", help="names to bring back, separated by commas: each a list, one value a rank")
@argument("--with", dest="given", default="", help="names of the notebook that the ranks begin with")
@argument("--session", default="", metavar="NAME", help="ranks that stay, with their variables, for the next cell")
@argument("--slow", default="", metavar="RANK:FACTOR", help="let a rank take so many times as long, such as 1:3")
@argument("--kill", default="", metavar="RANK:SECONDS", help="kill a rank (SIGKILL) after so long, such as 2:0.5")
@argument("--end", default="", metavar="NAME", help="of the line %%mpi --end NAME: end a session")
def mpi(line, cell=None):
    """Run this cell on MPI ranks.

    What ranks print is shown side by side while it comes; under it figures, and the value of the last line. Values that
    go in (--with) and come back (--out) are arrays, numbers, strings, and lists, tuples and dicts of these; modules,
    functions and classes go in as well.

        %%mpi -n 4 --with X,y,gradient -o w      a cell on four ranks, started for it and gone when it ends
        %%mpi --session work -n 2                ranks that stay: the next cell of this session has their variables
        %%mpi -n 2 --slow 1:3                    rank 1 takes three times as long
        %%mpi -n 3 --kill 2:0.5                  rank 2 is killed after half a second
        %mpi                                     which sessions there are
        %mpi --end work                          end one
    """
    asked = parse_argstring(mpi, line)
    if cell is None:
        return _list_or_end(asked.end)
    shell = get_ipython()
    if asked.end:
        raise UsageError(f"--end {asked.end}: the line %mpi --end {asked.end} does that; the cell has not run")
    out, given = _names(asked.out), _names(asked.given)
    _refuse(asked, out, cell)
    session = _session(asked.session, asked.ranks)
    slow, kill = (_disturbed(name, getattr(asked, name), session.ranks) for name in ("slow", "kill"))
    values, definitions = _given(given, shell)
    work = Cell(cell, out, definitions, values, asked.timeout, slow, kill)
    output = Output(session.ranks, live=hasattr(shell, "kernel"))
    if asked.session:
        sessions[asked.session] = session
    try:
        results = session.run(work, output)
    except KeyboardInterrupt:
        if asked.session:
            print(f"interrupted: the session {asked.session} has ended, with its ranks and their variables")
        raise
    finally:
        if not session.running:
            sessions.pop(asked.session, None)
        elif not asked.session:
            session.end()
    shell.user_ns.update({name: [result[name] for result in results] for name in out})


def load_ipython_extension(shell):
    """Register %%mpi: %load_ext calls this."""
    shell.register_magic_function(mpi, "line_cell")


def unload_ipython_extension(shell):
    """End all sessions: %unload_ext calls this."""
    for name in list(sessions):
        sessions.pop(name).end()


def _refuse(asked, out: list[str], cell: str) -> None:
    """Raise UsageError for impossible numbers and names, and for a cell that is no Python."""
    if asked.ranks is not None and not 1 <= asked.ranks <= MOST_RANKS:
        raise UsageError(f"-n {asked.ranks}: expected 1 to {MOST_RANKS} ranks")
    if not 0 < asked.timeout < math.inf:
        raise UsageError(f"-t {asked.timeout:g}: expected seconds above 0")
    for name in out:
        if not name.isidentifier():
            raise UsageError(f"-o {name}: expected names separated by commas, such as -o x,y")
    try:
        compile(cell, "the cell", "exec", dont_inherit=True)
    except SyntaxError as error:
        line = [*cell.splitlines(), ""][(error.lineno or 1) - 1].strip()
        own = "; ranks run Python alone, without lines of !, % and ?" if line.strip("!%?") != line else ""
        own = own or "; ranks have no event loop: asyncio.run(...)" * ("'await' outside" in error.msg)
        raise UsageError(f"line {error.lineno} of the cell, `{line}`: {error.msg}{own}") from None


def _list_or_end(name: str) -> None:
    """Run the line `%mpi`, or `%mpi --end NAME`."""
    if name and name not in sessions:
        raise UsageError(f"--end {name}: no such session; {_listed()}")
    if name:
        sessions.pop(name).end()
    else:
        print(_listed())


def _listed() -> str:
    each = [f"{name} ({session.ranks} ranks, {session.cells} cells)" for name, session in sessions.items()]
    return f"sessions: {', '.join(each)}" if each else "there is no session: %%mpi --session NAME begins one"


def _session(name: str, ranks: int | None) -> Session:
    """Return the ranks that a cell runs on."""
    if not name:
        return Session(2 if ranks is None else ranks, stays=False)
    if name in sessions and ranks not in (None, sessions[name].ranks):
        have = sessions[name].ranks
        raise UsageError(f"-n {ranks}: the session {name} has {have} ranks; %mpi --end {name} ends it")
    return sessions.get(name) or Session(2 if ranks is None else ranks, stays=True)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _disturbed(option: str, text: str, ranks: int) -> dict[int, float]:
    """Return {rank: number} of "1:3,2:0.5"."""
    found = {}
    for each in _names(text):
        try:
            rank, number = each.split(":")
            found[int(rank)] = float(number)
        except ValueError:
            raise UsageError(f"--{option} {each}: expected RANK:NUMBER, such as 1:3") from None
        if not 0 <= int(rank) < ranks:
            raise UsageError(f"--{option} {each}: the ranks are 0 to {ranks - 1}")
        least = 1 if option == "slow" else 0
        if not least <= float(number) < math.inf:
            what = "a factor" if option == "slow" else "seconds"
            raise UsageError(f"--{option} {each}: expected {what} of at least {least}")
    return found


def _given(names: list[str], shell) -> tuple[dict, str]:
    """Return what the ranks start with: values, and imports and definitions as source."""
    lines, values = [], {}
    for name in names:
        if name not in shell.user_ns:
            raise UsageError(f"--with {name}: the notebook has no such name")
        value = shell.user_ns[name]
        if isinstance(value, types.ModuleType):
            lines.append(f"import {value.__name__} as {name}")
        elif isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType):
            lines.append(f"from {value.__module__} import {value.__name__} as {name}")
        elif not isinstance(value, type | types.FunctionType):
            values[name] = value
        elif "." in value.__qualname__:
            raise UsageError(f"--with {name}: {value.__qualname__} is defined within another function or a class")
        elif value.__module__ == "__main__":
            lines.append(_definition(name, shell.user_ns["In"]))
        else:
            lines.append(f"from {value.__module__} import {value.__qualname__} as {name}")
    try:
        notebook_session.check(values)
    except TypeError as error:
        raise UsageError(f"--with: {error}") from None
    return values, "\n".join(lines)


def _definition(name: str, cells: list[str]) -> str:
    """Return the source of a function or class, from the last cell that defined it."""
    for text in reversed(cells):
        try:
            body = ast.parse(text).body
        except SyntaxError:  # a cell that failed
            continue
        for node in reversed(body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                first = min(part.lineno for part in [node, *node.decorator_list])
                return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise UsageError(f"--with {name}: no cell defines it with `def` or `class`")
