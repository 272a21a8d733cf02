"""What the mark `mpi` says of a test."""

import pytest

DIRECTORY = "RINGPROP_TEST_DIRECTORY"  # in the environment of ranks, and only there: where they write their logs


def ranks_of(item) -> int:
    """Return the number of ranks that a test runs on; 0 for a test without the mark."""
    if not item.get_closest_marker("mpi"):
        return 0
    try:
        return item.callspec.params["ranks"]
    except (AttributeError, KeyError):
        raise pytest.UsageError(
            f"{item.nodeid}: @pytest.mark.mpi is for test functions and methods of plain classes, "
            "this is another kind of test (a unittest.TestCase, a doctest): write it as a function"
        ) from None


def is_skipped(item) -> bool:
    """Whether a test is skipped before any rank is needed: by its marks, or by --most-ranks."""
    from _pytest.skipping import evaluate_skip_marks

    return evaluate_skip_marks(item) is not None
