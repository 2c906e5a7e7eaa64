"""An engine rank stages what it is asked for, in a thread of its own, and reports each outcome."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from mcore_rl.tools.doctor.toy_engine import column_cut, make_tensors, row_cut
from mcore_rl.weight_sync.adapter.engine import EngineAdapter
from mcore_rl.weight_sync.adapter.served import ServedAdapters
from mcore_rl.weight_sync.adapter.serving import SERVER
from mcore_rl.weight_sync.connection import EngineConnection
from mcore_rl.weight_sync.execute import PlanExecutor
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.staging import Staging, start_background_stager
from mcore_rl.weight_sync.transports.select import select_transport
from mcore_rl.weight_sync.wire import Report, StageRequest
from tests.support.link_ends import make_link, open_ends, run_ranks

TIMEOUT_S = 20.0


def connecting(end: LinkEnd) -> Callable[[], PlanExecutor]:
    cut = row_cut if end.is_sender else column_cut
    shards, _ = cut(make_tensors(), 0, 1, "float32")
    return lambda: PlanExecutor.meet(end, lambda _: shards, select_transport)


@contextmanager
def stager() -> Iterator[tuple[LinkStore, PlanExecutor, Staging]]:
    """Yield the link's store, the trainer rank's executor, and what the engine rank stages."""
    store, link = make_link(timeout_s=TIMEOUT_S)
    ends = open_ends(replace(link, staged=True))
    sender, receiver = run_ranks([connecting(end) for end in ends])
    shards, parameters = column_cut(make_tensors(seed=0), 0, 1, "float32")
    staging = Staging(parameters)
    connection = EngineConnection(receiver)
    adapter = EngineAdapter(connection, shards, parameters)
    served = ServedAdapters(connection, {}, SERVER.install)
    start_background_stager(connection, staging, adapter, served)
    try:
        yield store, sender, staging
    finally:
        sender.close()


def wait_report(store: LinkStore) -> Report:
    """Return the engine rank's report on the request it serves."""
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s:
        report = store.take_report("receive", 1)
        if report is not None:
            return report
        time.sleep(0.005)
    raise AssertionError("the engine rank did not report")


def source_of(version: int) -> dict[str, Tensor]:
    return row_cut(make_tensors(seed=version), 0, 1, "float32")[1]


def test_requests_are_served_in_order_and_the_parameters_wait_for_the_swap() -> None:
    with stager() as (store, sender, staging):
        assert staging.version is None
        for number, version in enumerate((1, 2)):
            store.put_stage_request(number, StageRequest(version))
            sender.execute(version, source_of(version), time.monotonic() + TIMEOUT_S)
            report = wait_report(store)
            assert report.error is None and report.num_bytes > 0
            assert staging.version == version
            _, expected = column_cut(make_tensors(seed=version), 0, 1, "float32")
            for name, tensor in expected.items():
                assert torch.equal(staging.tensors[name], tensor), name


def test_a_failure_to_receive_from_the_trainer_is_reported_and_nothing_is_staged() -> None:
    with stager() as (store, sender, staging):
        staging.version = 4
        sender.close()
        store.put_stage_request(0, StageRequest(5))
        report = wait_report(store)
        assert report.error is not None and "from trainer rank 0" in report.error
        assert report.peer_lost
        assert staging.version is None
