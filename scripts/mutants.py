"""Mutation testing: small changes are made to the code, one at a time, and some test should fail for each.

    make mutants                                           # a sample of 200 of all three packages: hours
    python scripts/mutants.py --only nn/ --count 50        # of some files

The operators are Cosmic Ray's (+ for -, < for <=, `and` for `or`, 1 for 0, no loop, ...); mutants_drawing.py says which
changes are left out by rule. Every test file is run once under coverage (mutants_lines.py), so that for each line the
files that run it are known. A mutant is tried with those, first those that are likely to tell soonest, until one fails:

- killed: a test failed;
- timeout: a test file took three times as long as when it was counted, and half a minute more, and was ended;
- survived: all of them passed, or those that were tried in --cap seconds;
- not run: no test runs that line, so that none can fail.

Everything happens in a copy of the tracked files below the system's temporary directory (mutants_running.py); the
checkout is never changed. Each outcome is written as soon as it is known, and a second call goes on where the first
one ended: with more tests where --cap has been raised, or where tests have changed. A survivor is a test that is
missing, code that nobody needs, or an equivalent mutant: one that changes nothing that anybody could see. The last are
listed, with the reason, in mutants_equivalent.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from itertools import islice
from pathlib import Path

from mutants_drawing import Mutant, draw
from mutants_lines import Measured, covering, measure
from mutants_running import Copy, Ended

FOLDERS = ("nn", "collectives", "parallel")
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.toml")
CAUGHT = ("killed", "timeout")
PATIENCE, LEAST = 3, 30  # a test file may take that many times as long as under coverage, and seconds more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, metavar="N", help="mutants in the sample (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sample (default: 0)")
    parser.add_argument("--only", default="", metavar="PREFIX", help="of files that begin so, such as nn/loss")
    parser.add_argument("--cap", type=float, default=600, metavar="S", help="seconds of tests a mutant (default: 600)")
    parser.add_argument("--out", type=Path, default=Path("runs/mutants"), metavar="DIR", help="what is kept")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy is removed
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    tracked = [path for path in listed.split("\0") if path and Path(path).is_file()]
    tests = sorted(path for path in tracked if Path(path).name.startswith("test_") and path.endswith(".py"))
    sources = [path for path in tracked if path.startswith(tuple(f"{name}/" for name in FOLDERS))]
    sources = [path for path in sources if path.endswith(".py") and path.startswith(options.only)]
    outcomes = Outcomes(options.out / "outcomes.json")
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy = Copy(tracked, directory)
        measured = measure(copy, tests, FOLDERS, options.out / "tests")
        sample = list(islice(draw(sources, options.seed), options.count))
        for mutant in sample:
            near = covering(measured, mutant.file, (copy.path / mutant.file).read_text(), mutant.line)
            before = outcomes.known.get(mutant.key, {})
            if found := try_mutant(mutant, near, copy, options.cap, before):
                outcomes.add(mutant, found)
                told = found["tried"][-1][0] if found["tried"] else ""
                print(
                    f"{found['outcome']:9} {found['seconds']:5.0f} s  {mutant.file}:{mutant.line}  {told}", flush=True
                )
    report(sample, outcomes.known)


def try_mutant(mutant: Mutant, near: list[Measured], copy: Copy, cap: float, before: dict) -> dict | None:
    """The outcome, and the tests tried: (file, digest), of which the last one told; None where it was known before."""
    if before.get("outcome") in CAUGHT:
        return None
    tried = [list(pair) for pair in before.get("tried", [])]
    rest = [one for one in near if [one.test, one.digest] not in tried]
    seconds = before.get("seconds", 0.0)
    if before and (not rest or seconds >= cap):
        return None
    found = {"outcome": "survived" if near else "not run", "covering": len(near), "said": ""}
    for one in rest:
        if seconds >= cap or found["outcome"] in CAUGHT:
            break
        ended = run_changed(mutant, one, copy)
        seconds += ended.seconds
        tried.append([one.test, one.digest])
        if ended.status not in (0, 5):  # 5: none was left to run
            found |= {"outcome": "timeout" if ended.status is None else "killed", "said": ended.said}
    return found | {"seconds": seconds, "tried": tried}


def run_changed(mutant: Mutant, one: Measured, copy: Copy) -> Ended:
    """A time limit is believed if the same tests of the unchanged code, right after, keep well within it."""
    limit = LEAST + PATIENCE * one.seconds
    but = [f"--deselect={test}" for test in one.failing]
    while True:
        with copy.changed(mutant.file, mutant.text):
            ended = copy.run(one.test, limit, "-x", *but)
        if ended.status is not None:
            return ended
        now = LEAST + PATIENCE * copy.run(one.test, 10 * limit, *but).seconds
        if now <= limit:
            return ended
        limit = now


class Outcomes:
    """What is known of mutants, in a file; by `Mutant.key`, so that a line may have moved."""

    def __init__(self, file: Path):
        self.file = file
        kept = json.loads(file.read_text()) if file.exists() else []
        self.known = {(row["file"], row["change"], row["twin"]): row for row in kept}

    def add(self, mutant: Mutant, found: dict) -> None:
        where = {"file": mutant.file, "line": mutant.line, "change": mutant.change, "twin": mutant.twin}
        self.known[mutant.key] = where | found
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(list(self.known.values()), indent=1))
        os.replace(new, self.file)


def report(sample: list[Mutant], known: dict) -> None:
    listed = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    equivalent = {(row["file"], row["change"].strip(), row.get("twin", 0)): row["why"] for row in listed}
    count = Counter()
    for mutant in sample:
        row = known[mutant.key]
        outcome = row["outcome"]
        if outcome in ("survived", "not run") and mutant.key in equivalent:
            outcome = "equivalent"
        elif outcome in ("survived", "not run"):
            passed = f", {len(row['tried'])} of {row['covering']} test files that run it passed" if row["tried"] else ""
            print(f"\n{outcome}  {mutant.file}:{mutant.line}{passed}\n{mutant.change}")
        count[outcome] += 1
    caught = count["killed"] + count["timeout"]
    print("\n" + ", ".join(f"{n} {outcome}" for outcome, n in count.most_common()))
    print(f"caught: {caught} of {len(sample) - count['equivalent']} that are not equivalent")


if __name__ == "__main__":
    main()
