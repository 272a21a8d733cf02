"""The command line of `ringprop doctor`: an acceptance test of the machine or the cluster that ranks run on.

    ringprop doctor --ranks 4
    mpirun -n 8 python -m mpi4py scripts/doctor.py
    srun --mpi=pmix -n 8 python -m mpi4py scripts/doctor.py --json doctor.json

The checks are in acceptance.py and trials.py. They take a minute, and ten at most; the exit status is 0 if none failed.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from parallel.command.arguments import Parser, new_file, number, whole
from parallel.command.findings import FAILED, OK, WARNING, Finding
from parallel.launch import blas, launcher
from parallel.settings import OptionError

LIMIT = 600.0  # seconds, for all of it
WRONG = 2  # exit status


def parser(rank: int | None) -> Parser:
    """Return the command line; only the first rank writes a file."""
    found = Parser(prog="ringprop doctor", description="Check the ranks, libraries and network that training needs.")
    found.add_argument(
        "--ranks", type=whole(1), help="ranks to start on this machine, 2 to 4 unless given; not below mpirun or srun"
    )
    found.add_argument(
        "--seconds", type=number(1, 300), default=20.0, help="for timing collectives, about (default: 20)"
    )
    found.add_argument(
        "--watch", type=number(1, LIMIT), default=60.0, help="seconds that ranks wait for each other (default: 60)"
    )
    found.add_argument("--threads", type=whole(1, 1024), help="BLAS threads of a rank (default: cores / ranks)")
    found.add_argument("--json", type=str if rank else new_file, metavar="FILE", help="write all findings there")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line of `ringprop doctor`; return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    launcher.disable_fabrics()
    blas.set_environment()
    try:
        rank = launcher.rank_from_environment()
    except launcher.LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    if rank and {"-h", "--help"} & set(argv):
        return 0  # rank 0 prints it
    options = parser(rank).parse_args(argv)
    if launcher.inside():
        from parallel.command.rules import check_started

        try:
            check_started(options, launcher.size_from_environment() or options.ranks)
        except OptionError as error:
            if not rank:
                print(f"error: {error}", file=sys.stderr)
            return WRONG
        return examine(options, rank)
    try:
        count = options.ranks or min(4, max(2, launcher.cores()))
        return launcher.run([sys.argv[0], *argv], count, timeout=LIMIT)
    except launcher.LaunchError as error:
        print(line(Finding("start", FAILED, str(error))), file=sys.stderr)
        return 1


def examine(options, rank: int | None) -> int:
    """Run all checks on these ranks, print and write what they found; return the exit status (collective)."""
    from parallel.command.main import end_mpi, fail, local_ranks, set_threads, start_mpi

    faulthandler.dump_traceback_later(LIMIT, exit=True)
    set_threads(max(1, launcher.cores() // local_ranks()), options.threads)
    from parallel.command import acceptance

    loaded = acceptance.age()
    try:
        start_mpi(options.watch)
        launcher.begun()
    except RuntimeError as error:  # each is alone: they were started by the launcher of another MPI library
        if not rank:
            print(line(Finding("start", FAILED, str(error))), file=sys.stderr)
        return 1
    try:
        status = report(options, acceptance.facts(loaded))
    except (ValueError, TypeError, RuntimeError, OSError, MemoryError) as error:
        return fail(error)
    end_mpi(options.watch)
    return status


def report(options, own: dict) -> int:
    """Run the checks; return the exit status (collective)."""
    from mpi4py import MPI

    from collectives.failures.launch_check import starting

    world, begin, found = MPI.COMM_WORLD, time.monotonic(), []
    with starting(options.watch):
        ranks = world.allgather(own)
    for finding in checks(options, world, ranks):
        found.append(finding)
        if world.rank == 0:
            print(line(finding), flush=True)
    seconds = time.monotonic() - begin
    worst = next((status for status in (FAILED, WARNING) if any(each.status == status for each in found)), OK)
    if world.rank == 0:
        print(summary(found, seconds), flush=True)
        if options.json:
            record = {"status": worst, "seconds": seconds, "ranks": ranks, "findings": [asdict(each) for each in found]}
            Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return int(worst == FAILED)


def checks(options, world, ranks: list[dict]) -> Iterator[Finding]:
    """Yield what each check finds, the cheap ones first (collective)."""
    from collectives import Communicator
    from parallel.command import acceptance, trials

    yield acceptance.hello(ranks)
    yield from acceptance.versions(ranks)
    yield acceptance.threads_of_mpi(ranks)
    yield from acceptance.threads(ranks, acceptance.started_by())
    yield acceptance.node_memory(ranks)
    yield acceptance.start(ranks)
    load = acceptance.load(ranks)
    yield load
    yield trials.shared_directory(world, ranks)
    if world.size == 1:
        advice = "ringprop doctor --ranks 2, mpirun or srun"
        yield Finding("collectives", WARNING, "there is one rank: nothing to send was tried", advice)
    else:
        communicator = Communicator(world, watch=options.watch)
        yield from trials.collectives_checked(communicator, options.seconds, load.status == OK)
        chosen = communicator.explain("allreduce", trials.LENGTHS[-1] // 4)
        yield Finding("algorithm", OK, chosen.partition("\n")[0])
        communicator.release()
    yield trials.same_bits(trials.digests(world, options.watch), ranks)


def line(finding: Finding) -> str:
    """Return a finding as lines of text."""
    text = f"{finding.check:12} {finding.text}"
    lines = textwrap.wrap(text, 108, subsequent_indent=" " * 13, break_long_words=False, break_on_hyphens=False)
    rows = [row for row in finding.rows if "case" in row]
    if rows:
        lines += ["", f"{'':13}{'us':24} {'ours':>10} {'library':>10} {'ratio':>6}"]
        lines += [
            f"{'':13}{row['case']:24} {row['ours_us']:10,.1f} {row['library_us']:10,.1f} "
            f"{row['ours_us'] / row['library_us']:6.2f}"
            for row in rows
        ]
        lines += [""]
    return "\n".join([f"{finding.status:8} {lines[0]}", *(f"{'':9}{more}".rstrip() for more in lines[1:])])


def summary(found: list[Finding], seconds: float) -> str:
    """Return what to set, and the verdict."""
    lines = [""]
    if advice := list(dict.fromkeys(each.advice for each in found if each.advice)):
        lines += ["what to set, or to do:", *(f"  {each}" for each in advice), ""]
    failed, warned = (sum(each.status == status for each in found) for status in (FAILED, WARNING))
    verdict = f"{failed} of {len(found)} checks failed" if failed else "nothing failed"
    warnings = f", {warned} warning{'s' * (warned > 1)}" if warned else ""
    return "\n".join([*lines, f"{verdict}{warnings} ({seconds:.0f} s)"])
