"""Describes a scene (trainer and engine ranks that sync without SGLang) and its outcome."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mcore_rl.tools.doctor.toy_engine import TINY, ToySizes
from mcore_rl.weight_sync.transports.choice import (
    MakeTransport,
    make_gloo_transport,
    make_gpu_pair_transport,
    make_routed_transport,
)
from mcore_rl.weight_sync.wire import Report
from mcore_rl.weights.box import Shard

Cut = Callable[[Mapping[str, Tensor], int, int, str], tuple[list[Shard], dict[str, Tensor]]]


@dataclass(frozen=True)
class Fault:
    """A fault on sender `rank` of a link, when it starts its message number `message`."""

    rank: int
    message: int
    kind: str
    """"corrupt": a byte changes in transit; "kill", "stop": the process gets SIGKILL, SIGSTOP."""


@dataclass(frozen=True)
class Scene:
    """`cut` deals HF tensors to the senders; receivers are FusedEngine ranks of `dtype`."""

    cut: Cut
    num_senders: int
    num_receivers: int
    dtype: str = "float32"
    sender_dtype: str = "float32"
    sizes: ToySizes = TINY
    bucket_bytes: int = 700
    timeout_s: float = 30.0
    num_syncs: int = 2
    fault: Fault | None = None
    absent_sender: int | None = None
    """This trainer rank never connects."""
    staged: bool = False
    releases_memory: bool = False
    """Before each sync the engine gives up its memory, and gets it back with other values in it."""
    between_machines: bool = False
    """Bytes take the route they take between machines."""
    on_gpu: tuple[bool, bool] = (False, False)
    """(senders, receivers): True if their tensors lie on GPUs, which the ranks take in turns."""

    @property
    def make_transport(self) -> MakeTransport:
        if not self.between_machines:
            return make_routed_transport
        return make_gpu_pair_transport if all(self.on_gpu) else make_gloo_transport


@dataclass(frozen=True)
class Received:
    """A receiver's results.

    reports       of connecting and of each sync
    differing     parameters that are not bit for bit what the engine's own loader makes
    swap_seconds  of each staged version
    """

    reports: list[Report]
    differing: list[str]
    swap_seconds: list[float]


@dataclass(frozen=True)
class SceneOutcome:
    """senders: each one's reports, None if it died; num_keys: keys left in the link's store."""

    senders: list[list[Report] | None]
    receivers: list[Received]
    num_keys: int

    @property
    def reports(self) -> list[Report]:
        """Reports of the ranks that are alive, by rank and then by action."""
        alive = [reports for reports in self.senders if reports is not None]
        by_rank = [*alive, *(received.reports for received in self.receivers)]
        return [report for reports in by_rank for report in reports]
