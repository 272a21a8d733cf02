"""The command `ringprop`: train, bench, data, report, ... each a script; those that are there are listed.

    ringprop                   the commands
    ringprop train --ranks 2   what `python scripts/train.py --ranks 2` does

The scripts lie beside the packages in a checkout, and in share/ringprop/scripts where a wheel was installed.
"""

from __future__ import annotations

import ast
import difflib
import os
import runpy
import sys
import sysconfig
import textwrap
from pathlib import Path

from parallel.command.version import commit, version

# What they are called on the command line, in the order of the list, and which file it is.
COMMANDS = {
    "train": "train.py",
    "supervise": "supervise.py",
    "predict": "predict.py",
    "sample": "sample.py",
    "report": "report.py",
    "estimate": "estimate.py",
    "bench": "bench.py",
    "data": "get_data.py",
    "workload": "workload.py",
    "grade": "grade.py",
    "doctor": "doctor.py",
}
WRONG = 2  # exit status


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    name, *rest = [*(sys.argv[1:] if argv is None else argv), ""][:-1] or [""]
    if name in ("-V", "--version"):
        print(f"ringprop {version()}" + (f", commit {commit()}" if commit() else ""))
        return 0
    found = there()
    if name in ("", "-h", "--help"):
        print(listed(found))
        return 0 if name else WRONG
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1)
        why = "its script is not installed here" if name in COMMANDS else f"there are {', '.join(found)}"
        hint = f"did you mean {near[0]}? " if near else ""
        print(f"error: ringprop has no command {name!r:.60}: {hint}{why}", file=sys.stderr)
        return WRONG
    script = found[name]
    if name in ("train", "estimate", "data"):  # what they name as the command that trains (run_directory.py)
        os.environ["RINGPROP_COMMAND"] = "ringprop train"
    sys.argv = [str(script), *rest]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    return 0


def there() -> dict[str, Path]:
    """The commands whose scripts are here, and these."""
    for directory in places():
        if (directory / "entry_point.py").is_file():
            return {name: directory / file for name, file in COMMANDS.items() if (directory / file).is_file()}
    return {}


def places() -> list[Path]:
    """Where scripts may lie: in a checkout, beside the packages; of a wheel, where its data were put."""
    beside = Path(__file__).resolve().parents[2]
    roots = [beside, *(Path(sysconfig.get_path("data", scheme)) for scheme in (_default(), f"{os.name}_user"))]
    return [beside / "scripts", *(root / "share" / "ringprop" / "scripts" for root in roots)]


def _default() -> str:
    return sysconfig.get_default_scheme()


def listed(found: dict[str, Path]) -> str:
    """The commands, with the first line of what each says of itself."""
    lines = ["usage: ringprop COMMAND [options]; each has --help", ""]
    for name, script in found.items():
        summary = (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n")[0]
        lines.append(
            textwrap.fill(
                summary, 100, initial_indent=f"  {name:15} ", subsequent_indent=" " * 18, break_on_hyphens=False
            )
        )
    return "\n".join([*lines, "", f"ringprop {version()}; --version shows the commit too"])
