"""Cores and memory that this process may use, as its cgroups (containers, Slurm, systemd) limit them.

A limit holds for a group and all groups within it, so the smallest on the way up counts. Version 2 of cgroups has
cpu.max and memory.max in one tree, version 1 a tree for each controller. Inside a container the path may not exist: the
container's own group is the root of the tree then. Elsewhere than on Linux there are no limits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

TREE, OWN = "/sys/fs/cgroup", "/proc/self/cgroup"


def cores(tree: str = TREE, own: str = OWN) -> int:
    """Return how many cores this process may use: those it may run on, at most its share of time (at least 1)."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [float(there)]
    for group in _groups("cpu", tree, own):
        quota = _read(group / "cpu.max") or _read(group / "cpu.cfs_quota_us") + _read(group / "cpu.cfs_period_us")
        if len(quota) == 2 and all(map(str.isdecimal, quota)) and int(quota[1]):  # "max", or -1: none
            shares.append(int(quota[0]) / int(quota[1]))
    return max(1, int(min(shares)))


def memory(tree: str = TREE, own: str = OWN) -> int:
    """Return how many bytes this process may use: the machine's memory, at most its limit."""
    bounds = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in _groups("memory", tree, own):
        for file in ("memory.max", "memory.limit_in_bytes"):
            bounds += [int(word) for word in _read(group / file)[:1] if word.isdecimal()]  # "max": none
    return min(bounds)


def _groups(controller: str, tree: str, own: str) -> Iterator[Path]:
    """The directories of the groups that this process is in, from its own up to the root, in both versions."""
    for line in _lines(own):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        roots = (controllers, controller) if controllers else ("", "unified")  # of version 1, of version 2
        for root in (Path(tree, name) for name in roots):
            group = root / path.lstrip("/")
            yield from (place for place in (group, *group.parents) if place.is_relative_to(root))


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except (OSError, ValueError):
        return []


def _read(path: Path) -> list[str]:
    """The words of a file's first line; none where it cannot be read."""
    return next(iter(_lines(path)), "").split()
