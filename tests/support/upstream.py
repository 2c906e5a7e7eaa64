"""Assertions that fail once upstream makes one of our patches or stand-ins unnecessary."""

from collections.abc import Iterator
from contextlib import contextmanager


def assert_defect(patch: str, defect: object) -> None:
    """Fail unless `defect`, a sign that upstream without the patch is still defective, is true."""
    assert defect, f"upstream works without {patch}: delete it and its entry in device/replaced"


@contextmanager
def fails_without(patch: str, *errors: type[BaseException]) -> Iterator[None]:
    """Fail unless the body, which runs without the patch, raises one of `errors`."""
    try:
        yield
    except errors:
        return
    assert_defect(patch, False)
