"""Reports: every outcome of an action becomes one; a lost store is no error of the action."""

import time

import pytest
import torch

from mcore_rl.weight_sync.link_store import LinkStore, publish_report, report_outcome
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import Report
from tests.support.link_ends import make_link

NAME = "rank 0 of engine engine-0"


@pytest.mark.parametrize(
    ("error", "message", "peer_lost"),
    [
        (TransferError("it was late", peer_lost=True), "it was late", True),
        (TransferError("a byte changed"), "a byte changed", False),
        (KeyError("weight"), "KeyError: 'weight'", False),
    ],
)
def test_an_error_becomes_the_report(error: Exception, message: str, peer_lost: bool) -> None:
    def act() -> Report:
        raise error

    report = report_outcome(NAME, act)
    assert (report.rank, report.error, report.peer_lost) == (NAME, message, peer_lost)
    assert not report.missing


def test_a_success_is_reported_as_it_is_and_without_gradients() -> None:
    def act() -> Report:
        return Report(NAME, digest=str(torch.is_grad_enabled()))

    assert report_outcome(NAME, act) == Report(NAME, digest="False")


def test_a_report_is_left_in_the_store_unless_that_is_gone() -> None:
    server, link = make_link(timeout_s=1.0)
    client = LinkStore.open(link)
    assert publish_report(client, "receive", 1, Report(NAME))
    assert server.take_report("receive", 1) == Report(NAME)
    del server
    outcomes = []
    for _ in range(20):  # the first bytes to a closed connection vanish without an error
        outcomes.append(publish_report(client, "receive", 1, Report(NAME)))
        time.sleep(0.01)
    assert not outcomes[-1]
