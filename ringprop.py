"""The command `ringprop`, in a module whose name nobody else has: so it can say where another file hides a package."""

import sys


def main() -> int:
    """parallel/command/commands.py, if that is what `parallel` is here."""
    try:
        from parallel.command.commands import main as command
    except ImportError as error:
        package = sys.modules.get("parallel")
        own = hasattr(package, "_HOME")
        place = getattr(package, "__file__", None) or next(iter(getattr(package, "__path__", ["?"])))
        said = f"{place} hides ringprop's parallel: rename it, or take its place out of PYTHONPATH"
        print(f"error: {error if own or package is None else said}", file=sys.stderr)
        return 2
    return command()


if __name__ == "__main__":
    sys.exit(main())
