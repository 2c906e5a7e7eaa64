"""What a weight sync came to: reports of ranks in, one verdict per engine and the metrics of the sync out."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.stream.wire import Report


@dataclass(frozen=True)
class EngineSyncResult:
    """What one engine's sync took; `error` is None if it serves the new version.

    pause_seconds   from before the engine was told to stop generating to after it was told to go on
    upstream        the engine that passed the slices on; None if trainer ranks sent them
    silent          a rank of it said nothing
    """

    url: str
    num_bytes: int = 0
    num_buckets: int = 0
    transfer_seconds: float = 0.0
    pause_seconds: float = 0.0
    error: str | None = None
    upstream: str | None = None
    silent: bool = False


@dataclass(frozen=True)
class SyncReport:
    """`seconds`: of the whole sync; the transfer is the part in which bytes move."""

    version: int
    seconds: float
    engines: tuple[EngineSyncResult, ...]

    @property
    def failed(self) -> dict[str, str]:
        """Engine url -> why this sync failed on it."""
        return {engine.url: engine.error for engine in self.engines if engine.error is not None}

    @property
    def serving(self) -> tuple[str, ...]:
        return tuple(engine.url for engine in self.engines if engine.error is None)

    def metrics(self) -> dict[str, float]:
        return {
            "sync/seconds": self.seconds,
            "sync/transfer_seconds": max(engine.transfer_seconds for engine in self.engines),
            "sync/pause_s": max(engine.pause_seconds for engine in self.engines),
            "sync/mib": sum(engine.num_bytes for engine in self.engines) / 2**20,
            "sync/trainer_mib": sum(e.num_bytes for e in self.engines if e.upstream is None)
            / 2**20,
            "sync/engines_failed": float(len(self.failed)),
        }


def agreement(reports: Sequence[Report], answer: BaseException | None = None) -> str | None:
    """None if every rank and the engine report success with one plan, else the error nearest the cause."""
    failed = sorted((r for r in reports if r.error is not None), key=lambda r: r.peer_lost)
    if failed:
        others = f" (and {len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
        return f"{failed[0].rank}: {failed[0].error}{others}"
    if answer is not None:
        return str(answer)
    digests = {report.digest for report in reports}
    return None if len(digests) == 1 else f"ranks followed different plans: {sorted(digests)}"


def summary(url: str, received: Sequence[Report], error: str | None) -> EngineSyncResult:
    """Of what the ranks of one engine received."""
    return EngineSyncResult(
        url,
        sum(report.num_bytes for report in received),
        sum(report.num_buckets for report in received),
        max(report.seconds for report in received),
        error=error,
        silent=any(report.silent for report in received),
    )
