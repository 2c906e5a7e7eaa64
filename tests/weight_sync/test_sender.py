"""A trainer rank's sender: links come and go one by one; every failure of a link is a report."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from mcore_rl.tools.doctor.toy_engine import FusedEngine, make_tensors, row_cut
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.receiver import WeightReceiver
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weight_sync.wire import Command, Link, Report
from tests.support.link_ends import make_link, run_ranks


class Engine:
    """An engine of one rank, linked in place."""

    def __init__(self, name: str, timeout_s: float = 60.0) -> None:
        self.store, link = make_link(timeout_s=timeout_s)
        self.link = replace(link, engine=name)
        self.model = FusedEngine(0, 1, torch.float32)
        self.receiver = WeightReceiver()

    def handle(self, command: Command) -> Report:
        tensors = dict(self.model.named_parameters())
        return self.receiver.handle(command, 0, self.model.load_weights, tensors)

    def connect(self, sender: WeightSender) -> tuple[Report, Report]:
        sent, received = run_ranks(
            [
                lambda: sender.connect(self.link),
                lambda: self.handle(Command(self.link, "connect")),
            ]
        )
        return sent, received

    def holds(self, seed: int) -> bool:
        expected = FusedEngine(0, 1, torch.float32)
        expected.load_weights(make_tensors(seed).items())
        found = dict(self.model.named_parameters())
        return all(torch.equal(found[name], t) for name, t in expected.named_parameters())


def make_sender(seed: int = 1) -> WeightSender:
    shards, tensors = row_cut(make_tensors(seed), 0, 1, "float32")
    return WeightSender(shards, tensors, 0)


@contextmanager
def linked(*names: str) -> Iterator[tuple[WeightSender, list[Engine]]]:
    sender = make_sender()
    engines = [Engine(name) for name in names]
    for engine in engines:
        sent, received = engine.connect(sender)
        assert sent.error is None and received.error is None
        assert sent.digest == received.digest and sent.num_bytes == received.num_bytes > 0
    try:
        yield sender, engines
    finally:
        for engine in engines:
            sender.disconnect(engine.link.engine)
            engine.receiver.close()


def send_and_receive(
    sender: WeightSender, names: Sequence[str], receiving: Sequence[Engine]
) -> tuple[dict[str, Report], list[Report]]:
    """Send version 5 to the engines `names`; the sender's reports, and those of `receiving`."""
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, 5, names, 60.0)
        received = run_ranks(
            [lambda e=engine: e.handle(Command(e.link, "receive", 5)) for engine in receiving]
        )
        return sending.result(), received


def test_all_engines_are_sent_the_same_version_at_once() -> None:
    with linked("a", "b") as (sender, engines):
        reports, received = send_and_receive(sender, ["a", "b"], engines)
        assert [report.error for report in received] == [None, None]
        assert {name: report.error for name, report in reports.items()} == {"a": None, "b": None}
        assert all(engine.holds(1) for engine in engines)


def test_an_engine_that_does_not_receive_loses_its_link_and_the_other_does_not() -> None:
    with linked("a", "b") as (sender, (a, b)):
        b.receiver.close()
        reports, received = send_and_receive(sender, ["a", "b"], [a])
        assert reports["a"].error is None and received[0].error is None
        assert "rank 0 of engine b" in str(reports["b"].error) and reports["b"].peer_lost
        with pytest.raises(ValueError, match=r"engines \['b'\] are not connected; call connect"):
            sender.send(6, ["a", "b"], 60.0)


def test_a_link_whose_engine_does_not_come_is_reported() -> None:
    store = LinkStore.serve("127.0.0.1", 0.2)
    report = make_sender().connect(Link("a", "127.0.0.1", store.port, store.key, 1, 1, 700, 0.2))
    assert report.error is not None and "the facts of rank 0 of engine a" in report.error
    assert report.peer_lost


def test_a_store_that_is_not_served_is_reported() -> None:
    store = LinkStore.serve("127.0.0.1", 1.0)
    link = Link("a", "127.0.0.1", store.port, store.key, 1, 1, 700, 0.5)
    del store
    report = make_sender().connect(link)
    assert report.rank == "trainer rank 0" and report.error is not None and not report.peer_lost
