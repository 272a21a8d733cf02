"""Run scripts/train.py: options, ranks, threads, and one clear message where something fails.

What is heavy (NumPy, MPI) is imported only once the number of threads is set, and never for --help.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from parallel.command.options import Options
from parallel.command.parsing import asks_for_help, parse
from parallel.command.run_directory import continue_with, default_directory, remove_unfinished
from parallel.command.run_lock import RunHeld, RunLock
from parallel.launch import blas, launcher, processes
from parallel.settings import OptionError, shortened

WRONG_OPTION = 2  # exit status, as argparse has it
INTERRUPTED, TERMINATED = 130, 143  # exit status after Ctrl-C and SIGTERM, as shells have it
OUTPUT_LOST = 128 + signal.SIGPIPE  # where nobody reads what is written
SIGNALLED = 128  # and the number of the signal
# Lines of Open MPI where ranks survive others, and where mpiexec gets a second signal while it ends a job. The launcher
# and the reaper send it one, whoever ends the job; schedulers send others to all processes of a job at once.
NOISE = re.compile(
    r"NBC_Progress: an error|LAUNCHER JOB OBJECT NOT FOUND|\[\S+:\d+\] pmix_ptl_base: send_msg: write failed"
    r"|(\S+: a|A)bort is (already )?in progress\.\.\."
    # Of MPICH, below its banner.
    r"|YOUR APPLICATION TERMINATED WITH THE EXIT STRING|This typically refers to a problem with your application"
    r"|Please see the FAQ page for debugging suggestions"
)
BANNERS = ("MPI_ABORT was invoked", "prterun has exited", "prterun detected", "prterun noticed", "=   BAD TERM")
EXPLANATION = re.compile(r"^(error|launch:|rank \d)|Error\b|Traceback")  # lines that say why a job has failed
ENDED_BY_SIGNAL = re.compile(r"rank \d+ of \d+: ended by SIG(INT|TERM)( during an MPI call)?\s*")
FAILED = 911  # tag of the messages of failing ranks
SAVING = 20.0  # seconds that ranks have to save and end, when they are asked to, or to end after an error
PATIENCE = 2.0  # seconds that a failing rank waits for the others to fail too


def main(argv: list[str] | None = None) -> int:
    """Train as the command line says; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    open_standard_files()
    launcher.disable_fabrics()
    blas.set_environment()
    try:
        rank, here = launcher.rank_from_environment(), local_ranks()
    except launcher.LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_OPTION
    if rank is not None and (above := processes.rank_above()):  # MPI would wait without end, for another such rank
        print(
            f"error: process {above}, which has started this one, is rank {rank} of an MPI job, and this one is none: "
            "start it outside of that job",
            file=sys.stderr,
        )
        return WRONG_OPTION
    if rank and asks_for_help(argv):
        return 0  # rank 0 says it
    try:
        options = parse(argv)
        if options.ranks and options.ranks > 1 and not launcher.inside():
            from parallel.command.factory import prepare

            prepare(options)
            if not options.out:
                options = replace(options, out=default_directory(options))
                argv += [] if options.resume else ["--out", options.out]
            if not options.find_lr:
                with held(options):  # refused before there are ranks, of which the first will hold it
                    pass
            return start_ranks(options, argv)
    except OptionError as error:
        return fail(error, WRONG_OPTION)
    except (launcher.LaunchError, RunHeld) as error:
        return fail(error)
    restore_interrupts()
    set_threads(max(1, launcher.cores() // here), options.threads)
    lock = RunLock()
    try:
        if launcher.inside():
            start_mpi(options.watch, bool(options.elastic))
            launcher.begun()
            options = with_patience(options)
        else:
            for number in (signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGTERM or signal.getsignal(number) is signal.SIG_DFL:  # else as nohup has it
                    signal.signal(number, raise_interrupt)
        from parallel.command.training_run import train

        train(options, ignore_signals, lock)
        if options.elastic and (members := elastic_members()):
            members.leave()
        if launcher.inside():
            end_mpi(options.watch)
        return 0
    except KeyboardInterrupt as end:
        if launcher.inside():
            raise  # the excepthook ends all ranks
        print(f"\nended; to continue: {continue_with(with_directory(options, lock))}", file=sys.stderr)
        return TERMINATED if end.args else INTERRUPTED
    except OptionError as error:
        return fail(error, WRONG_OPTION)
    except (ValueError, TypeError, ArithmeticError, RuntimeError, OSError, MemoryError) as error:
        from nn.training.checkpoint_callback import Terminated

        if isinstance(error, Terminated):
            by_launcher = launcher.inside() and options.ranks  # then that one says the command
            more = "" if by_launcher else f"; to continue: {continue_with(with_directory(options, lock))}"
            return fail(f"{error}{more}", TERMINATED, "\n")
        if not launcher.inside() and (unwritten := output_error(error)):
            return report_lost_output(with_directory(options, lock), unwritten)
        return fail(error)
    except ImportError as error:
        if launcher.inside():
            raise  # what ends all ranks in order may need the same library
        return fail(f"{sys.executable} has not all that the project needs ({error}): install it with pip install -e .")
    except Exception as error:  # a mistake in the program: of one rank alone, the others go on
        if not elastic_members():
            raise
        traceback.print_exception(error)
        return fail(error)


def with_patience(options: Options) -> Options:
    """Return the options with the time that ranks may wait for each other where one of them may be silent."""
    if not options.elastic:
        return options
    from parallel.elastic.policy import Policy

    return replace(options, watch=Policy.parse(options.elastic).patience(options.watch))


def with_directory(options: Options, lock: RunLock) -> Options:
    """Return the options with the directory that the run has, if it came so far."""
    return replace(options, out=lock.directory or options.out)


def start_mpi(limit: float, survive: bool = False) -> None:
    """Start MPI, which waits for all ranks; after `limit` seconds (0: never) this rank ends, and so do all.

    MPI starts with the interpreter held, so that no thread of Python could look after it. Where ranks are to survive
    others there is a barrier, too: MPI never reports a rank that dies before it.
    """
    if limit:
        faulthandler.dump_traceback_later(limit, exit=True)
    from mpi4py import MPI  # before all that takes long to load: who waits for this rank waits no more in MPI

    if survive and not launcher.reason_all_end():
        with contextlib.suppress(MPI.Exception):  # ranks survive a death that MPI reports
            MPI.COMM_WORLD.Agree(1)
    faulthandler.cancel_dump_traceback_later()  # what follows may take as long as a busy machine needs to load it
    from collectives import check_world, install_excepthooks

    install_excepthooks()
    check_world()


def end_mpi(limit: float) -> None:
    """End MPI, which waits for all ranks once more; after `limit` seconds (0: never) this rank ends, and so do all.

    All is written: who is asked to end now ends as it would. Who is stopped when the others have gone is killed.
    """
    from mpi4py import MPI

    from collectives.failures.job_end import kill_in

    ignore_signals()
    if limit:
        faulthandler.dump_traceback_later(limit, exit=True)
        kill_in(limit + PATIENCE)
    MPI.Finalize()
    faulthandler.cancel_dump_traceback_later()


def restore_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which scripts/train.py has switched off: there is something to end."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_signals() -> None:
    """Ignore Ctrl-C, SIGTERM and SIGHUP: nothing is left that they could end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def raise_interrupt(number, frame) -> None:
    """End one process at SIGTERM, or SIGHUP of a terminal that is closed, as Ctrl-C does."""
    raise KeyboardInterrupt(number)


def start_ranks(options: Options, argv: list[str]) -> int:
    """Start --ranks ranks of this program on this machine, and end with their exit status."""
    inner, failures = [sys.argv[0], *argv], []
    try:
        restore_interrupts()
        status = run_ranks(options, inner, without_banners(sys.stdout, failures))
    except launcher.LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    except SystemExit as end:  # SIGTERM
        status = end.code
    except OSError as error:
        if not (unwritten := output_error(error)):
            return fail(error)
        status = OUTPUT_LOST
    if (directory := Path(options.resume or options.out)).is_dir():  # and was not renamed meanwhile
        with contextlib.suppress(RunHeld, OSError), held(options):  # one rank ends all, another may be writing
            remove_unfinished(directory)
    if status == OUTPUT_LOST:
        return report_lost_output(options, unwritten)
    if status in (INTERRUPTED, TERMINATED):
        print(f"\nended, and all ranks with it; to continue: {continue_with(options)}", file=sys.stderr)
    elif status > SIGNALLED or status == launcher.LOST or (status and not failures):
        print(f"error: {launcher.ending(status)}; to continue: {continue_with(options)}", file=sys.stderr)
    return status


@contextlib.contextmanager
def held(options: Options) -> Iterator[None]:
    """In this block nobody trains in the run's directory; raises RunHeld where somebody does."""
    lock = RunLock()
    lock.hold(Path(options.resume or options.out))
    try:
        yield
    finally:
        lock.release()


def open_standard_files() -> None:
    """Let what this program writes go nowhere where stdout or stderr are closed, and its input be empty.

    Otherwise the next files that are opened would have these numbers, and be written to.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 for as long as the process lives


def output_error(error: Exception) -> OSError | None:
    """The error if it, or a like one, is that stdout cannot be written: a full disk, a closed terminal; else None."""
    if isinstance(error, BrokenPipeError):
        return error
    if isinstance(error, OSError) and error.filename is None:  # of no file that was opened
        try:
            os.write(1, b"\n")
        except OSError as again:
            return again
    return None


def report_lost_output(options: Options, why: OSError) -> int:
    """Say that nobody gets what this program writes, as after `| head`; returns the exit status that shells have."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter would complain of what is left to write
    reason = "nobody reads the output any more"
    if not isinstance(why, BrokenPipeError):
        reason = f"the output cannot be written ({why.strerror})"
    with contextlib.suppress(OSError):
        print(f"error: {reason}: ended; to continue: {continue_with(options)}", file=sys.stderr)
    return OUTPUT_LOST if isinstance(why, BrokenPipeError) else 1


def run_ranks(options: Options, inner: list[str], out: Callable[[str], object]) -> int:
    """Return the exit status of the ranks; those that survive others are started again where all have gone or hung."""
    if not options.elastic:
        return launcher.run(inner, options.ranks, stdout=out, patience=SAVING, silent=options.watch)
    from parallel.elastic.policy import Policy
    from parallel.elastic.supervisor import run_with_restarts

    policy, directory = Policy.parse(options.elastic), Path(options.resume or options.out)
    return run_with_restarts(inner, options.ranks, policy, directory, out, SAVING)


def without_banners(out: IO[str], failures: list[str]) -> Callable[[str], object]:
    """Return a receiver of lines that drops what mpiexec adds about a failed job: the program itself says why.

    Lines that say why are also added to `failures`. A rank that was killed cannot say so: of mpiexec's banner that is
    kept. What ranks print because mpiexec ends them is dropped: that they have ended is printed once, for all.
    """
    held = ""  # a line of dashes or, of MPICH and Intel MPI, =, which may begin a banner
    banner = ""

    def receive(line: str) -> None:
        nonlocal held, banner
        rule = len(line) > 60 and set(line.strip()) in ({"-"}, {"="})
        if banner:
            banner += line
            if rule:
                if died := re.search(r"process rank (\d+) .*exited on\s+signal (\d+)\b", banner, re.DOTALL):
                    how = "was killed" if died[2] == "9" else f"ended by {signal.Signals(int(died[2])).name}"
                    banner = f"error: rank {died[1]} {how}\n"
                    failures.append(banner)
                    out.write(banner)
                    out.flush()
                banner = ""
            return
        banner = line if held and line.startswith(BANNERS) else ""
        if not banner and not ENDED_BY_SIGNAL.fullmatch(line) and not NOISE.match(line):
            if EXPLANATION.search(line):
                failures.append(line)
            out.write(held + ("" if rule else line))
            out.flush()
        held = line if rule else ""

    return receive


def set_threads(threads: int, asked: int | None = None) -> None:
    """Limit the BLAS threads of this process: to those that --threads asks for, else what the environment says, else
    `threads`.

    NumPy reads the environment as it is imported; where an option with keys needed it before, its thread pool is set.
    """
    given = [name for name in blas.THREADS if name in os.environ]
    if asked:
        os.environ.update(blas.settings(asked))
    else:
        blas.set_environment(threads)
    if "numpy" in sys.modules and (asked or not given):
        from threadpoolctl import threadpool_limits

        threadpool_limits(asked or threads, user_api="blas")


def local_ranks() -> int:
    """Return the ranks on this host by the launcher's variables (Open MPI, MPICH, Slurm); 1 without a launcher."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"):
        if count := launcher.number(name):
            return count
    tasks = re.match(r"[1-9]\d*", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # such as "4(x2),3"
    if launcher.inside() and tasks:
        return int(tasks[0])
    return launcher.size_from_environment() or 1


def fail(error: Exception | str, status: int = 1, begin: str = "error: ") -> int:
    """Say what went wrong, once, and end all ranks; returns the exit status.

    Where all ranks fail alike (a wrong option, a loss that is not finite), rank 0 prints it and all leave quietly.
    Where some do not, they would wait for ever: so after a moment the failing rank aborts the job.
    """
    if os.environ.get("RINGPROP_TRACEBACK") and isinstance(error, Exception):
        traceback.print_exception(error)
    message = shortened(str(error).removeprefix(f"[Errno {getattr(error, 'errno', None)}] "))
    if not launcher.inside():
        print(f"{begin}{message}", file=sys.stderr)
        return status
    from mpi4py import MPI

    from collectives.failures.job_end import kill_in

    members = elastic_members()
    if launcher.is_replacement() and not members:
        print(f"error: a rank cannot take the place of a lost one: {message}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)  # a death, which ends the wait of the others
    ignore_signals()  # mpiexec sends one to all as soon as the first rank has left
    world = members.root if members else MPI.COMM_WORLD
    if world.rank == 0:
        print(f"{begin}{message}", file=sys.stderr, flush=True)
    failing, end = all_ranks_fail(world), time.monotonic() + PATIENCE
    while not next(failing):
        if time.monotonic() > end:
            if world.rank:
                rank = members.number if members else world.rank
                print(f"error on rank {rank}: {message}", file=sys.stderr, flush=True)
            if members:
                os.kill(os.getpid(), signal.SIGKILL)  # a death, which the others learn from MPI
            world.Abort(status)
        time.sleep(0.01)
    if members:
        members.leave(status)
    sys.stdout.flush()
    kill_in(SAVING)
    MPI.Finalize()
    os._exit(status)  # not sys.exit: `python -m mpi4py` would abort


def elastic_members():
    """Return the members of a run that goes on where ranks die; None of another one."""
    if not launcher.inside():
        return None
    from parallel.elastic import recovery

    return recovery.current and recovery.current.members


def all_ranks_fail(world) -> Iterator[bool]:
    """Yield whether all ranks have called this: each sends a message to rank 0, which answers all.

    By single messages: a collective operation would be taken for another one by ranks that do not fail.
    """
    others = range(1, world.size) if world.rank == 0 else (0,)
    for sends in (False, True) if world.rank == 0 else (True, False):
        requests = [(world.Isend if sends else world.Irecv)(bytearray(0), rank, FAILED) for rank in others]
        while not completed(requests):
            yield False
    while True:
        yield True


def completed(requests) -> bool:
    """Return whether all requests have completed; those of a rank that has died never do."""
    from mpi4py import MPI

    try:
        return MPI.Request.Testall(requests)
    except MPI.Exception:
        return False
