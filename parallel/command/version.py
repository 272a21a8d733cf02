"""Which ringprop this is: its version, and the commit where that can be known.

Read from files, for a rank of MPI had better not start git.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

PACKAGE = "ringprop"
HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def version() -> str:
    """The version of the installed package; "unknown" where nothing was installed."""
    from importlib import metadata  # takes milliseconds, which the ranks that write no run directory need not spend

    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "unknown"


def commit(root: Path | None = None) -> str | None:
    """The commit of the checkout that this runs from, or of the git address that was installed; None for others.

    Changes that are not committed are not shown.
    """
    root = root or Path(__file__).resolve().parents[2]
    return _of_checkout(root / ".git") or _of_installation()


def _of_checkout(git: Path) -> str | None:
    """What HEAD stands for, as git's own layout has it: a hash, or a name that a file or packed-refs has."""
    try:
        if git.is_file():  # a worktree, or a submodule
            git = git.parent / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head if HASH.fullmatch(head) else None
        name = head.removeprefix("ref:").strip()
        shared = git / "commondir"
        for place in [git, *([git / shared.read_text().strip()] if shared.exists() else [])]:
            if (place / name).is_file():
                found = (place / name).read_text().strip()
                return found if HASH.fullmatch(found) else None
            if (place / "packed-refs").is_file():
                for line in (place / "packed-refs").read_text().splitlines():
                    if line.endswith(f" {name}"):
                        return line.split()[0]
    except (OSError, UnicodeDecodeError):
        pass
    return None


def _of_installation() -> str | None:
    """Of `pip install git+https://...`: what pip has noted (PEP 610)."""
    from importlib import metadata

    try:
        noted = metadata.distribution(PACKAGE).read_text("direct_url.json")
        found = json.loads(noted or "{}").get("vcs_info", {}).get("commit_id")
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) and HASH.fullmatch(found) else None
