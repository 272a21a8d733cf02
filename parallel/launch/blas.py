"""Environment variables for the BLAS library, set before NumPy loads it: its threads, and the kernels that fit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import takewhile
from types import MappingProxyType

THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
CORE = "OPENBLAS_CORETYPE"
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}  # what the kernels named SkylakeX use
ZEN5 = 26  # AMD's name of that family of processors


def settings(
    threads: int, environment: Mapping[str, str] = MappingProxyType({}), cpuinfo: str = "/proc/cpuinfo"
) -> dict[str, str]:
    """Return the environment variables for a number of threads on this machine, and for its kernels.

    OpenBLAS and MKL read a variable of their own before OMP_NUM_THREADS; an OMP_NUM_THREADS of the environment is
    therefore set for them, too.
    """
    of_the_job = environment.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2": of nested loops, the outer first
    return dict.fromkeys(THREADS, of_the_job or str(threads)) | kernels(cpuinfo)


def kernels(cpuinfo: str = "/proc/cpuinfo") -> dict[str, str]:
    """Return, for AMD's processors from Zen 5 on, the variable that selects OpenBLAS's AVX-512 kernels.

    OpenBLAS 0.3.31 (NumPy 2.4) takes a Zen 5 that it has no name for as a Haswell; with these kernels a training step
    takes 0.7 of the time. Other processors and libraries are left alone, and so is what the user has said.
    """
    if CORE in os.environ:
        return {}
    try:
        with open(cpuinfo) as file:
            first = takewhile(str.strip, file)  # a processor's lines; an empty one ends them
            about = {name.strip(): value for name, _, value in (line.partition(":") for line in first)}
        newer = about["vendor_id"].strip() == "AuthenticAMD" and int(about["cpu family"]) >= ZEN5
        return {CORE: "SkylakeX"} if newer and set(about["flags"].split()) >= AVX512 else {}
    except (OSError, KeyError, ValueError):  # not Linux, or not x86
        return {}


def set_environment(threads: int | None = None) -> None:
    """Set them for this process and its children, unless the user has; without `threads` only the kernels."""
    for name, value in (kernels() if threads is None else settings(threads, os.environ)).items():
        os.environ.setdefault(name, value)
