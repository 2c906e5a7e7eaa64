"""Counts GPU memory that a process of a run keeps while another process has the GPU.

buffers   of the weight sync: on a sender for each receiver of its machine, and for each other link
pairs     communicators of NCCL between a trainer rank and an engine rank on other machines
graphs    CUDA graphs of an engine
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mcore_rl.config import RolloutConfig, SyncConfig
from mcore_rl.planning.deployment import choose_served, does_relay, record_layouts
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.weight_sync.buckets import bound_message_bytes
from mcore_rl.weight_sync.transports.gpu_pairs import MAX_CTAS
from mcore_rl.weight_sync.transports.transport import NUM_SLOTS
from mcore_rl.weights.layouts.layout import Layout
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.plan.local import Flow, plan_recvs, plan_sends
from mcore_rl.weights.plan.shares import RegularHosts

MIB = 2**20
PAIR_CHANNEL_BYTES = 12 * MIB
"""Bytes that NCCL allocates for a channel between two ranks that send and receive: 10 MiB at the
receiving end and 2 MiB at the sending one (github.com/NVIDIA/nccl/issues/1685)."""
DECODE_GRAPH_BYTES = 2 * MIB
"""Bytes that SGLang reserves for graphs per request that is decoded at once, and below per length
of a prefill (sglang/srt/arg_groups/memory_hook.py)."""
PREFILL_GRAPH_BYTES = 8 * MIB
_PREFILL_LENGTHS = 42
"""Lengths of prefills up to 2,048 tokens, its default, for which SGLang captures a graph."""
_MOST_DECODED = 512
"""The largest batch for which SGLang captures a graph by default, on GPUs of 80 GB or more."""


@dataclass(frozen=True)
class SyncMemory:
    """Memory that links take for good on trainer rank 0 and on engine rank 0, and alike on others.

    buffer_bytes    the trainer rank's buffers
    sender_pairs    engine ranks to which the trainer rank sends by NCCL
    receiver_pairs  trainer ranks that send to the engine rank so, and engines beside it
    """

    buffer_bytes: int
    sender_pairs: int
    receiver_pairs: int

    @staticmethod
    def count(run: PlannedRun) -> "SyncMemory":
        """Plan the links of both ranks. Raises ValueError naming a slice that cannot be sent."""
        links = _Links.make(run)
        relays = does_relay(run.sync, run.rollout, run.cluster)
        neighbors = min(2, run.rollout.engines - 1) if relays else 0
        return SyncMemory(
            *links.count_sender(count_sync_buffers(run.sync)), links.count_far_senders() + neighbors
        )


NO_LINKS = SyncMemory(buffer_bytes=0, sender_pairs=0, receiver_pairs=0)
"""Memory of ranks without engines."""


def count_sync_buffers(sync: SyncConfig) -> int:
    """Bytes of the buffers at one end of a link of the weight sync, padding included."""
    return NUM_SLOTS * bound_message_bytes(int(sync.bucket_mib * MIB))


def count_pair_bytes(num_pairs: int) -> int:
    """Bytes of the communicators of so many pairs on one rank, at most."""
    return num_pairs * MAX_CTAS * PAIR_CHANNEL_BYTES


def count_graph_bytes(rollout: RolloutConfig) -> int:
    """Bytes of an engine rank's CUDA graphs, as SGLang estimates them."""
    num_bytes = 0
    if _has_graphs(rollout, "decode"):
        most = int(rollout.sglang.get("cuda_graph_max_bs_decode") or _MOST_DECODED)
        num_bytes += min(most, rollout.max_concurrency) * DECODE_GRAPH_BYTES
    if _has_graphs(rollout, "prefill"):
        num_bytes += _PREFILL_LENGTHS * PREFILL_GRAPH_BYTES
    return num_bytes


def _has_graphs(rollout: RolloutConfig, phase: str) -> bool:
    options = rollout.sglang
    is_disabled = options.get(f"cuda_graph_backend_{phase}") == "disabled"
    return not (is_disabled or options.get(f"disable_{phase}_cuda_graph"))


@dataclass(frozen=True)
class _Links:
    """The trainer's layout and that of one engine, as a link has them, and where engines are."""

    source: Layout
    engine: Layout
    per_host: int
    engines: int
    first_host: int

    @staticmethod
    def make(run: PlannedRun) -> "_Links":
        one = replace(SGLangSizes.from_config(run.rollout), engines=1)
        quantization = run.rollout.quantization
        policy = choose_served(run.models.policy, run.rollout)
        recorded = record_layouts(policy, run.dtype, run.parallel, one, quantization=quantization)
        source = recorded.source()
        per_host = run.plan.ranks_per_host
        first_host = 0 if run.cluster.colocated else -(-source.num_ranks // per_host)
        return _Links(source, recorded.target(), per_host, run.rollout.engines, first_host)

    def count_sender(self, most: int) -> tuple[int, int]:
        """Return trainer rank 0's bytes of buffers, and its pairs of NCCL, over all links.

        Receivers of its machine open buffers of their own there, the others of a link share some.
        `most`: bytes of the buffers that a pair, or a link, has at most.
        """
        buffer_bytes = 0
        num_pairs = 0
        for first_host, num_links in self._count_links().items():
            hosts = RegularHosts(self.per_host, self.per_host, first_host)
            flows = plan_sends(0, self.source, self.engine, hosts)
            near = [flow for flow in flows if hosts.target_host(flow.peer) == 0]
            far = [flow for flow in flows if hosts.target_host(flow.peer) != 0]
            shared = sum(min(flow.num_bytes, most) for flow in near)
            buffer_bytes += num_links * (shared + _bound(far, most))
            num_pairs += num_links * len(far)
        return buffer_bytes, num_pairs

    def count_far_senders(self) -> int:
        """Return the trainer ranks on other machines that send to an engine's rank 0."""
        if self.first_host == 0 and self.source.num_ranks <= self.per_host:
            return 0
        hosts = RegularHosts(self.per_host, self.per_host, self.first_host)
        flows = plan_recvs(0, self.source, self.engine, hosts)
        return sum(hosts.source_host(flow.peer) != self.first_host for flow in flows)

    def _count_links(self) -> dict[int, int]:
        """Return an engine's first host -> links of trainer rank 0 to engines that are placed so.

        Engines without ranks on host 0, which is the trainer rank's, are alike: one stands for all.
        """
        counts: Counter[int] = Counter()
        elsewhere = -1
        for engine in range(self.engines):
            first = self.first_host + engine * self.engine.num_ranks // self.per_host
            if first > 0:
                elsewhere = first if elsewhere < 0 else elsewhere
                first = elsewhere
            counts[first] += 1
        return counts


def _bound(flows: Iterable[Flow], most: int) -> int:
    return min(sum(flow.num_bytes for flow in flows), most)
