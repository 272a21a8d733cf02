"""The command `ringprop`, in a module whose name nobody else has: so it can say where another file hides a package."""

import os
import sys


def main() -> int:
    """A command from its start to its end; Ctrl-C ends it without a traceback, a reader that leaves without a word."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `ringprop ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141  # as a program that SIGPIPE ended


def command() -> int:
    """parallel/command/commands.py, if that is what `parallel` is here."""
    try:
        from parallel.command.commands import main as found
    except ImportError as error:
        package = sys.modules.get("parallel")
        own = hasattr(package, "_MODULES")
        place = getattr(package, "__file__", None) or next(iter(getattr(package, "__path__", ["?"])))
        said = f"{place} hides ringprop's parallel: rename it, or take its place out of PYTHONPATH"
        print(f"error: {error if own or package is None else said}", file=sys.stderr)
        return 2
    return found()


if __name__ == "__main__":
    sys.exit(main())
