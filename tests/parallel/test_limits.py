"""What a process may use: containers, Slurm and systemd limit cores and memory by cgroups."""

import os

import pytest

from parallel.launch import limits

CORES = len(os.sched_getaffinity(0))
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def made(tmp_path, own, files):
    """Write /proc/self/cgroup and files of the tree; return the arguments for limits.cores and limits.memory."""
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(tmp_path / "tree"), str(tmp_path / "own")


@pytest.mark.parametrize(
    ("own", "files", "cores", "memory"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000", "a/b/memory.max": "4096"}, 1, 4096),
        ("0::/a/b\n", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000", "a/memory.max": "8192"}, 1, 8192),
        (
            "0::/\n",
            {"cpu.max": "150000 100000"},
            1,
            MACHINE,
        ),  # of a container; half a core is none
        ("0::/not/here\n", {"cpu.max": "100000 100000", "memory.max": "4096"}, 1, 4096),
        (
            "4:memory:/job\n2:cpu,cpuacct:/job\n",
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "100000",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
                "memory/job/memory.limit_in_bytes": "4096",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            },
            1,
            4096,
        ),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, CORES, MACHINE),
        ("0::/\n", {"cpu.max": "max 100000", "memory.max": "max"}, CORES, MACHINE),
        ("rubbish\n0\n\n", {"cpu.max": "1 0", "memory.max": ""}, CORES, MACHINE),
        ("", {}, CORES, MACHINE),
    ],
)
def test_the_smallest_limit_on_the_way_up_counts(tmp_path, own, files, cores, memory):
    place = made(tmp_path, own, files)
    assert (limits.cores(*place), limits.memory(*place)) == (min(cores, CORES), memory)


def test_elsewhere_than_on_linux_there_are_none(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    nowhere = str(tmp_path / "tree"), str(tmp_path / "own")
    assert (limits.cores(*nowhere), limits.memory(*nowhere)) == (os.cpu_count(), MACHINE)
