"""Calls and programs in a fork of the tests' process, which has imported NumPy and the packages already.

A fork starts in milliseconds where a new interpreter takes some tenths of a second to import. What it changes or
breaks ends with it.
"""

import os
import runpy
import sys
import tempfile
import traceback

import nn  # noqa: F401 - before any fork, so that each finds it imported
from collectives.pricing import price  # noqa: F401
from parallel.launch import launcher  # noqa: F401


def in_a_fork(call, *arguments):
    """(exit status, stdout, stderr) of a call in a fork of this process."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        if not (child := os.fork()):
            status = 1
            try:
                for descriptor, file in (1, out), (2, errors):
                    os.dup2(file.fileno(), descriptor)
                sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115 - to the end
                call(*arguments)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)  # what is to be cleaned up is the parent's
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, *(file.seek(0) or file.read() for file in (out, errors))


def run_program(path, *arguments):
    """(exit status, stdout, stderr) of `python path arguments...`."""
    return in_a_fork(_program, str(path), arguments)


def _program(path, arguments):
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as leaving:
        is_message = leaving.code is not None and not isinstance(leaving.code, int)
        if is_message:
            print(leaving.code, file=sys.stderr)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(1 if is_message else leaving.code or 0)
