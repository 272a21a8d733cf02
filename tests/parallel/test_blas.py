"""What a BLAS library is told before NumPy loads it."""

import os
import subprocess
import sys

import pytest

from parallel.launch import blas

FLAGS = "fpu avx avx2 avx512f avx512dq avx512cd avx512bw avx512vl"
PROCESSOR = """processor\t: 0
vendor_id\t: {vendor}
cpu family\t: {family}
model name\t: of today: the newest
flags\t\t: {flags}

processor\t: 1
vendor_id\t: another
"""


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "expected"),
    [
        ("AuthenticAMD", 26, FLAGS, {"OPENBLAS_CORETYPE": "SkylakeX"}),
        ("AuthenticAMD", 27, FLAGS + " more", {"OPENBLAS_CORETYPE": "SkylakeX"}),
        ("AuthenticAMD", 25, FLAGS, {}),  # OpenBLAS has names for them
        ("AuthenticAMD", 26, FLAGS.replace(" avx512vl", ""), {}),  # as a virtual machine may hide it
        ("GenuineIntel", 26, FLAGS, {}),
        ("AuthenticAMD", "?", FLAGS, {}),
    ],
)
def test_only_amds_newer_processors_with_avx512_are_told_their_kernels(
    tmp_path, monkeypatch, vendor, family, flags, expected
):
    told = tmp_path / "cpuinfo"
    told.write_text(PROCESSOR.format(vendor=vendor, family=family, flags=flags))
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    assert blas.kernels(str(told)) == expected
    assert blas.settings(3, {}, str(told)) == dict.fromkeys(blas.THREADS, "3") | expected
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert blas.kernels(str(told)) == {}, "the user has said it"


def test_a_machine_that_does_not_tell_is_left_alone(tmp_path):
    assert blas.kernels(str(tmp_path / "none")) == {}
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: asimd\n\n")
    assert blas.kernels(str(tmp_path / "arm")) == {}


def test_the_library_takes_the_kernels_and_what_the_user_says_stays(monkeypatch):
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    code = (
        "import os, sys; from parallel.launch import blas; blas.set_environment(); assert 'numpy' not in sys.modules\n"
    )
    code += "import numpy; from threadpoolctl import threadpool_info\n"
    code += "print(*[p['architecture'] for p in threadpool_info() if p['internal_api'] == 'openblas'])"
    for given, kernels in (({}, blas.kernels()), ({"OPENBLAS_CORETYPE": "Haswell"}, {"OPENBLAS_CORETYPE": "Haswell"})):
        env = os.environ | given
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        if kernels and done.stdout.strip():
            assert done.stdout.split() == [kernels["OPENBLAS_CORETYPE"]]


@pytest.mark.parametrize("given, expected", [("1", "1"), ("4,2", "4"), ("", "3")])
def test_the_jobs_omp_num_threads_counts_for_every_library(given, expected):
    """OpenBLAS and MKL would read a variable of their own first."""
    found = blas.settings(3, {"OMP_NUM_THREADS": given})
    assert {found[name] for name in blas.THREADS} == {expected}
