"""Benchmark against peers: the engine against PyTorch, collectives against the MPI library's own, and others.

A suite is a file bench_SUITE.py beside this.
"""

import importlib
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What single suites do besides, as a keyword of their `rows`: (suite, option, what argparse is told, what).
FILE = {"metavar": "FILE"}
OPTIONS = [
    (
        "collectives",
        "all_algorithms",
        {"action": "store_true"},
        "measure every algorithm, and say of each row how far what is chosen by itself is from the best",
    ),
    (
        "collectives",
        "tune",
        FILE | {"nargs": "?", "const": "cache"},
        "measure every algorithm instead, and write a table of the fastest, for RINGPROP_TUNE; without FILE into the "
        "user's cache, where every communicator on one node finds it",
    ),
    (
        "engine",
        "explain",
        {"action": "store_true"},
        "instead of times, where a step reads and writes memory: calls, bytes and seconds of every NumPy function",
    ),
    ("growth", "draw", FILE, "draw the rows into that picture"),
    ("network", "network", FILE, "write the measured network there (default: network.json, beside the file of --json)"),
    ("network", "table", FILE, "write the algorithms that are fastest on the measured network, for RINGPROP_TUNE"),
]


def main(argv: list[str] | None = None) -> int:
    sys.path.insert(0, str(HERE))
    suites = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    from entry_point import module

    new_file = module("parallel.command.arguments").new_file
    parser = module("parallel.command.arguments").Parser(prog="bench.py", description=__doc__)
    parser.add_argument("suite", choices=[*suites, "all"], help="what to measure; all: one after the other")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the rows there, as a list of objects")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--quick", action="store_true", help="a few repetitions: shows that it works, measures badly")
    for suite, option, settings, what in OPTIONS:
        kind = {"type": new_file} if settings.get("metavar") == "FILE" else {}
        parser.add_argument(f"--{option.replace('_', '-')}", help=f"{suite}: {what}", **(settings | kind))
    options = parser.parse_args(argv)
    for suite, option, *_ in OPTIONS:
        if getattr(options, option) and options.suite != suite:
            parser.error(f"--{option.replace('_', '-')} is for the suite {suite}")
    options.network = options.network or Path(options.json or "").parent / "network.json"

    from benchmarking import to_json

    rows, failed = [], []
    try:
        for suite in suites if options.suite == "all" else [options.suite]:
            print(f"# {suite}", flush=True)
            try:
                own = {option: getattr(options, option) for of, option, *_ in OPTIONS if of == suite}
                for row in importlib.import_module(f"bench_{suite}").rows(options.quick, options.only, **own):
                    print(row, flush=True)
                    rows.append(row)
            except Exception:
                traceback.print_exc()
                failed.append(suite)
    finally:  # after Ctrl-C, too: all suites take hours
        if options.json:
            Path(options.json).write_text(to_json(rows))
            print(f"{len(rows)} rows in {options.json}")
    if options.only and not rows and not failed:
        parser.error(f"argument --only: no case of {options.suite} has {options.only!r} in its name")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    from entry_point import run

    sys.exit(run(main))
