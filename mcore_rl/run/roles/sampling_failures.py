"""Counts the failures of engines during background sampling."""

from mcore_rl.rollout.transport import RolloutError


class SamplingFailures:
    """Keeps the error since the last recovery and counts the failures in a row.

    A lost engine makes many groups fail, some of them late. All failures of groups that began after
    the same recovery count as one.
    """

    def __init__(self) -> None:
        self.error: RolloutError | None = None
        """Why the engines could not sample; None from a recovery to the next failure."""
        self.num_in_row = 0
        """Failures without a group that was sampled in between."""
        self.num_recoveries = 0

    def note(self, error: RolloutError, begun_after: int) -> None:
        """Keep the error of a group that began when `num_recoveries` was `begun_after`."""
        if begun_after == self.num_recoveries:
            self.num_in_row += self.error is None
            self.error = error

    def note_success(self) -> None:
        self.num_in_row = 0

    def recover(self) -> None:
        """Forget the error, and count the recovery."""
        self.error = None
        self.num_recoveries += 1
