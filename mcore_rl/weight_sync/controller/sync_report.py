"""Turns the ranks' reports of a weight sync into one result per engine and into metrics."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mcore_rl.weight_sync.wire import Report


@dataclass(frozen=True)
class EngineSyncResult:
    """The outcome of a sync on one engine; `error` is None if the engine serves the new version.

    num_bytes         of weights, received by all its ranks
    transfer_seconds  of its slowest rank
    pause_seconds     from before the engine was told to pause until after it was told to resume
    saved_bytes       of num_bytes, what did not travel because it was as before
    relay             the engine that forwarded the slices; None if trainer ranks sent them
    missing_reports   a rank sent no report
    verified          the version was read back from the parameters and is what was sent
    num_slices        of weights, received by all its ranks
    num_changed       of num_slices, other bytes than in the last version; None for a link's first
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
    """The outcome of a sync; `seconds` is its whole duration, of which the transfer is a part."""

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
        """Urls of the engines whose live parameters were read back and are what was sent."""
        return frozenset(engine.url for engine in self.engines if engine.verified)

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Urls of the engines that got the same bytes as in the version before."""
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
    """Return None if all ranks and the engine succeeded with one plan, else the error nearest the
    cause.

    `answer` is the engine's own error, if any; `digests` are those of ranks without a report. A
    rank that lost a peer is farther from the cause than one with an error of its own.
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
    """Return the result of one engine from the receive reports of all its ranks."""
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
    """Return how many slices changed over all ranks; None if a rank cannot say or got none."""
    changed = [report.num_changed for report in received if report.num_changed is not None]
    if len(changed) < len(received) or not sum(report.num_slices for report in received):
        return None
    return sum(changed)
