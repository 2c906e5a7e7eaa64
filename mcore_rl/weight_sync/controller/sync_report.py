"""Turns the ranks' reports of a weight sync into one result per engine and into metrics."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mcore_rl.weight_sync.wire import Report


@dataclass(frozen=True)
class EngineSyncResult:
    """The outcome of a sync on one engine; `error` is None if the engine serves the new version.

    num_bytes         of weights that all ranks received
    transfer_seconds  of the slowest rank
    pause_seconds     from before the engine was told to pause until after it was told to resume
    saved_bytes       of num_bytes, bytes that did not travel because they had not changed
    relay             the engine that forwarded the slices; None if trainer ranks sent them
    missing_reports   a rank sent no report
    verified          the version was read back from the parameters and equals the sent one
    num_slices        of weights that all ranks received
    num_changed       of num_slices, slices that differ from the link's last version, if any
    """

    url: str
    num_bytes: int = 0
    num_buckets: int = 0
    transfer_seconds: float = 0.0
    pause_seconds: float = 0.0
    saved_bytes: int = 0
    error: str | None = None
    relay: str | None = None
    missing_reports: bool = False
    verified: bool = False
    num_slices: int = 0
    num_changed: int | None = None


@dataclass(frozen=True)
class SyncReport:
    """The outcome of a sync; `seconds` is its whole duration, the transfer included."""

    version: int
    seconds: float
    engines: tuple[EngineSyncResult, ...]

    @property
    def failed(self) -> dict[str, str]:
        """Engine url -> why this sync failed on it."""
        return {engine.url: engine.error for engine in self.engines if engine.error is not None}

    @property
    def serving(self) -> tuple[str, ...]:
        """Urls of the engines that serve the new version."""
        return tuple(engine.url for engine in self.engines if engine.error is None)

    @property
    def verified(self) -> frozenset[str]:
        """Urls of the engines whose live parameters were read back and equal the sent weights."""
        return frozenset(engine.url for engine in self.engines if engine.verified)

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Urls of the engines that got the same bytes as in the previous version."""
        return tuple(engine.url for engine in self.engines if engine.num_changed == 0)

    def metrics(self) -> dict[str, float]:
        num_bytes = sum(engine.num_bytes for engine in self.engines)
        trainer_bytes = sum(e.num_bytes for e in self.engines if e.relay is None)
        shares = [e.num_changed / e.num_slices for e in self.engines if e.num_changed is not None]
        changed = {"sync/changed_share": min(shares)} if shares else {}
        return {
            **changed,
            "sync/engines_verified": float(len(self.verified)),
            "sync/seconds": self.seconds,
            "sync/transfer_seconds": max(engine.transfer_seconds for engine in self.engines),
            "sync/pause_s": max(engine.pause_seconds for engine in self.engines),
            "sync/mib": num_bytes / 2**20,
            "sync/trainer_mib": trainer_bytes / 2**20,
            "sync/saved_mib": sum(engine.saved_bytes for engine in self.engines) / 2**20,
            "sync/engines_failed": float(len(self.failed)),
        }


def find_root_error(
    reports: Sequence[Report], answer: BaseException | None = None, digests: Collection[str] = ()
) -> str | None:
    """Return the error closest to the cause; None if engine and ranks succeeded with one plan.

    `answer` is the engine's own error, if any; `digests` are the plans' digests of ranks without a
    report. A rank that lost a peer is farther from the cause than a rank with its own error.
    """
    failed = sorted((r for r in reports if r.error is not None), key=lambda r: r.peer_lost)
    if failed:
        more = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
        return f"{failed[0].rank}: {failed[0].error}{more}"
    if answer is not None:
        return str(answer)
    plans = {*digests, *(report.digest for report in reports)}
    return None if len(plans) == 1 else f"ranks followed different plans: {sorted(plans)}"


def summarize(url: str, received: Sequence[Report], error: str | None) -> EngineSyncResult:
    """Return the result of one engine, from the reports of all its ranks."""
    return EngineSyncResult(
        url,
        num_bytes=sum(report.num_bytes for report in received),
        saved_bytes=sum(report.saved_bytes for report in received),
        num_buckets=sum(report.num_buckets for report in received),
        transfer_seconds=max(report.seconds for report in received),
        error=error,
        missing_reports=any(report.missing for report in received),
        num_slices=sum(report.num_slices for report in received),
        num_changed=_sum_changed(received),
    )


def _sum_changed(received: Sequence[Report]) -> int | None:
    """Return how many slices changed over all ranks; None if a rank does not know."""
    changed = [report.num_changed for report in received if report.num_changed is not None]
    if len(changed) < len(received) or not sum(report.num_slices for report in received):
        return None
    return sum(changed)
