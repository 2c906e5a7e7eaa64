"""Connections of ranks in threads: one agreed plan, and versions moved over it one by one."""

import time
from collections.abc import Callable, Sequence

import pytest
import torch

from mcore_rl.tools.doctor.toy_engine import column_cut, make_tensors, row_cut
from mcore_rl.weight_sync.connection import EngineConnection
from mcore_rl.weight_sync.execute import PlanExecutor, VerifiedBuckets
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.transports.select import select_transport
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Report
from mcore_rl.weights.box import Shard
from tests.support.link_ends import make_link, open_ends, run_ranks

NUM_SENDERS = 2
TIMEOUT_S = 20.0


def own_shards(end: LinkEnd) -> Sequence[Shard]:
    if end.is_sender:
        return row_cut(make_tensors(), end.side_rank, NUM_SENDERS, "float32")[0]
    return column_cut(make_tensors(), 0, 1, "float32")[0]


def connecting(end: LinkEnd) -> Callable[[], PlanExecutor]:
    return lambda: PlanExecutor.meet(end, lambda _: own_shards(end), select_transport)


def send(sender: PlanExecutor, version: int, tensors: dict[str, torch.Tensor]) -> Report:
    began_s = time.monotonic()
    sender.execute(version, tensors, began_s + TIMEOUT_S)
    return sender.make_report(began_s)


def test_versions_arrive_whole_and_both_sides_report_the_same() -> None:
    _store, link = make_link(num_senders=NUM_SENDERS)
    executors = run_ranks([connecting(end) for end in open_ends(link)])
    *senders, last = executors
    receiver = EngineConnection(last)
    assert [executor.end.name for executor in executors] == list(link.names)
    assert len({executor.plan.digest for executor in executors}) == 1
    _, target = column_cut(make_tensors(), 0, 1, "float32")
    for version in (1, 2):
        verified = VerifiedBuckets()
        acts: list[Callable[[], Report]] = []
        for rank, sender in enumerate(senders):
            _, source = row_cut(make_tensors(seed=version), rank, NUM_SENDERS, "float32")
            acts.append(lambda s=sender, t=source, v=version: send(s, v, t))
        acts.append(
            lambda v=version, b=verified: receiver.receive(v, target, TIMEOUT_S, verified=b)
        )
        *sent, received = run_ranks(acts)
        _, expected = column_cut(make_tensors(seed=version), 0, 1, "float32")
        assert all(torch.equal(target[name], tensor) for name, tensor in expected.items())
        assert sum(report.num_bytes for report in sent) == received.num_bytes > 0
        assert sum(report.num_buckets for report in sent) == received.num_buckets
        assert [report.error for report in (*sent, received)] == [None] * (NUM_SENDERS + 1)
        assert len(verified.wait(received.num_buckets - 1, deadline_s=0.0)) > 0
    for executor in executors:
        executor.close()


def test_a_peer_that_leaves_is_named() -> None:
    _store, link = make_link(num_senders=NUM_SENDERS)
    *senders, last = run_ranks([connecting(end) for end in open_ends(link)])
    receiver = EngineConnection(last)
    for sender in senders:
        sender.close()
    _, target = column_cut(make_tensors(), 0, 1, "float32")
    with pytest.raises(TransferError, match="trainer rank") as caught:
        receiver.receive(1, target, 1.0)
    assert caught.value.peer_lost
    receiver.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    _store, link = make_link(num_senders=NUM_SENDERS, timeout_s=0.5)
    with pytest.raises(TransferError, match="the facts of trainer rank 1, rank 0 of engine"):
        connecting(open_ends(link)[0])()
