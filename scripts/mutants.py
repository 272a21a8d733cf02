"""Mutation testing: small changes are made to the code, one at a time, and some test should fail for each.

    make mutants                                           # a sample of 200 of all three packages
    python scripts/mutants.py --only nn/ --count 50        # of some files

The operators are Cosmic Ray's (+ for -, < for <=, `and` for `or`, 1 for 0, no loop, ...). A place in the code is drawn,
then one of its mutants, so a place with many counts once. Each is tried with the few test files nearest to its file:
first those of its name, then those of its room, by the number of imports between. pytest stops at the first failure.
The outcome is "killed" by a failure, "timeout" where tests take five times as long as without it, or "survived".

Everything happens in a copy of the tracked files below the system's temporary directory. Each outcome is written as
soon as it is known, and a second call goes on where the first one ended; with a larger --nearest it tries survivors
with more tests. A survivor is a test that is missing, or an equivalent mutant: one that changes nothing that anybody
could see.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

FOLDERS = ("nn/", "collectives/", "parallel/")
UNUSED = ("VariableReplacer", "VariableInserter")  # operators that have to be told names
PATIENCE, LEAST = 5, 60  # a mutant may take that many times as long as the plain code, and seconds more
MARK = "RINGPROP_MUTANT"  # in the environment of all processes of a try


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, metavar="N", help="mutants in the sample (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sample (default: 0)")
    parser.add_argument(
        "--only", default="", metavar="PREFIX", help="try those of files that begin so, such as nn/loss"
    )
    parser.add_argument("--nearest", type=int, default=5, metavar="N", help="test files to try (default: 5)")
    parser.add_argument("--json", type=Path, default=Path("runs/mutants.json"), metavar="FILE", help="outcomes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy is removed
    outcomes = json.loads(options.json.read_text()) if options.json.exists() else {"plain": {}, "mutants": []}
    outcomes["plain"] = {
        test: seconds for test, seconds in outcomes["plain"].items() if seconds
    }  # try failed ones again
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    tracked = [path for path in listed.split("\0") if path and Path(path).is_file()]
    near = {path: tests[: options.nearest] for path, tests in nearest_tests(tracked).items()}
    known = {(m["file"], m["diff"]): m for m in outcomes["mutants"]}
    sample = [m for m in draw(tracked, options.count, options.seed) if m["file"].startswith(options.only)]
    sample.sort(key=lambda m: sum(map(needs_ranks, near[m["file"]])))  # the quick ones first
    with tempfile.TemporaryDirectory(prefix="mutants-") as copy:
        for path in tracked:
            target = Path(copy, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
        for mutant in sample:
            before = known.get((mutant["file"], mutant["diff"]), {"outcome": "survived", "tests": []})
            rest = [test for test in near[mutant["file"]] if test not in before["tests"]]
            if before["outcome"] == "survived" and rest:
                found = try_mutant(mutant, rest, Path(copy), outcomes["plain"])
                found["tests"] = before["tests"] + found["tests"]
                known[found["file"], found["diff"]] = found
                outcomes["mutants"] = list(known.values())
                save(options.json, outcomes)
                print(
                    f"{found['outcome']:9} {found['file']}:{found['line']} {' '.join(found['tests'][-1:])}", flush=True
                )
    tried = [known[m["file"], m["diff"]] for m in sample]
    for m in tried:
        if m["outcome"] == "survived":
            print(f"\nsurvived {m['file']}:{m['line']}\n{m['diff']}")
    if failing := [test for test, seconds in outcomes["plain"].items() if seconds is None]:
        print(f"\nnot used, for they fail without any change: {', '.join(failing)}")
    print("\n" + ", ".join(f"{n} {outcome}" for outcome, n in Counter(m["outcome"] for m in tried).most_common()))


def draw(tracked: list[str], count: int, seed: int) -> list[dict]:
    """That many mutants: file, line, diff and the whole new text."""
    sources = sorted(path for path in tracked if path.startswith(FOLDERS) and path.endswith(".py"))
    nodes = {path: list(ast_nodes(get_ast(Path(path).read_text()))) for path in sources}
    operators = [get_operator(name)() for name in sorted(operator_names()) if not name.endswith(UNUSED)]
    places = [(path, i) for path in sources for i in range(len(nodes[path]))]
    rng, sample = random.Random(seed), []
    for path, i in rng.sample(places, len(places)):
        fitting = [operator for operator in operators if any(operator.mutation_positions(nodes[path][i]))]
        if not fitting:
            continue
        operator, text = rng.choice(fitting), Path(path).read_text()
        occurrence = sum(len([*operator.mutation_positions(node)]) for node in nodes[path][:i])
        mutated = mutate_code(text, operator, occurrence)
        if mutated and behaviour(mutated) not in ("", behaviour(text)):
            lines = difflib.unified_diff(text.splitlines(), mutated.splitlines(), n=0, lineterm="")
            diff = "\n".join(list(lines)[2:])
            sample.append({"file": path, "line": nodes[path][i].start_pos[0], "diff": diff, "text": mutated})
        if len(sample) == count:
            break
    return sample


def behaviour(text: str) -> str:
    """The program without annotations, to tell changes that do nothing; "" for what is no program."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            node.annotation = ast.Constant(None) if isinstance(node, ast.AnnAssign) else None
    return ast.dump(tree)


def nearest_tests(tracked: list[str]) -> dict[str, list[str]]:
    """For each file of the packages, the test files to try, in order."""
    files = {path for path in tracked if path.endswith(".py")}
    imports = {path: imported(path, files) for path in files}
    found: dict[str, list] = {path: [] for path in files if path.startswith(FOLDERS)}
    for test in sorted(path for path in files if Path(path).name.startswith("test_")):
        distance, ring = {test: 0}, [test]
        while ring:
            ring = sorted({new for path in ring for new in imports[path] if new not in distance})
            distance |= dict.fromkeys(ring, max(distance.values()) + 1)
        for path in found:
            name, subject = Path(path).stem, Path(test).stem.removeprefix("test_")
            foreign = not test.startswith(f"tests/{path.split('/')[0]}/")
            named = not foreign and (name in subject or subject in name)
            if named or path in distance:
                other = needs_ranks(test) != ("mpi4py" in Path(path).read_text())  # than what the file is for
                key = (not named, foreign, distance.get(path, 0), other, Path(test).stat().st_size)
                found[path].append((*key, test))
    return {path: [test for *_, test in sorted(tests)] for path, tests in found.items()}


def imported(path: str, files: set[str]) -> set[str]:
    """The files of the project that a file imports anywhere; of a package also those that it names in strings."""
    names, package = set(), Path(path).parent.as_posix().replace("/", ".")
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = f"{package}.{node.module}" if node.level else node.module
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path.endswith("__init__.py"):
            names |= {node.value, f"{package}.{node.value}"}  # imported when it is first used
    stems = [name.replace(".", "/") for name in names]
    return {
        file for stem in stems for file in (f"{stem}.py", f"{stem}/__init__.py", f"tests/{stem}.py") if file in files
    }


def needs_ranks(test: str) -> bool:
    return re.search(r"mark\.mpi|launch", Path(test).read_text()) is not None


def try_mutant(mutant: dict, tests: list[str], copy: Path, plain: dict[str, float | None]) -> dict:
    """The mutant without its text, with its outcome and the tests tried, the last of which told."""
    found = {key: mutant[key] for key in ("file", "line", "diff")} | {"outcome": "survived", "tests": []}
    target = copy / mutant["file"]
    for test in tests:
        if test not in plain:  # first without any change: how long it takes, None where it fails
            status, seconds = run(test, copy, 600)
            plain[test] = seconds if status == 0 else None
        if plain[test] is None:
            continue
        found["tests"].append(test)
        kept = target.read_text()
        target.write_text(mutant["text"])
        try:
            status, _ = run(test, copy, LEAST + PATIENCE * plain[test])
        finally:
            target.write_text(kept)
        if status != 0:
            return found | {"outcome": "timeout" if status is None else "killed"}
    return found


def run(test: str, copy: Path, limit: float) -> tuple[int | None, float]:
    """(pytest's status, seconds) of a test file in the copy; status None after `limit` seconds. No process stays."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", MARK: mark}
    start = time.monotonic()
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=copy, env=environment, start_new_session=True, **quiet)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        end_processes(f"{MARK}={mark}".encode())
        process.wait()
    return status, time.monotonic() - start


def end_processes(mark: bytes) -> None:
    """Kill whoever has that in the environment: pytest, launchers and ranks, whatever group or session they are in."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:  # it has ended, or is another user's
            continue


def save(path: Path, outcomes: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(outcomes, indent=1))
    os.replace(new, path)


if __name__ == "__main__":
    main()
