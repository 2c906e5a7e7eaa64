"""An engine rank's receiver: commands in order, and an outcome in the store for each of them."""

import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mcore_rl.tools.doctor.toy_engine import FusedEngine, make_tensors, row_cut
from mcore_rl.weight_sync.draft_model import list_loaded_parameters
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.receiver import WeightReceiver, renew_derived
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weight_sync.wire import Action, Command, Link, Report, StageRequest
from tests.support.link_ends import make_link, run_ranks

TIMEOUT_S = 60.0


class Rank:
    """The only rank of an engine, and the trainer rank that feeds it the weights of seed 1."""

    def __init__(self) -> None:
        self.model = FusedEngine(0, 1, torch.float32)
        self.model.load_weights(make_tensors(seed=0).items())
        self.receiver = WeightReceiver()
        shards, tensors = row_cut(make_tensors(seed=1), 0, 1, "float32")
        self.sender = WeightSender(shards, tensors, 0)

    def handle(self, link: Link, action: Action, version: int | None = None) -> Report:
        tensors = dict(self.model.named_parameters())
        command = Command(link, action, version)
        return self.receiver.handle(command, 0, self.model.load_weights, tensors)

    def connect(self, link: Link) -> Report:
        sent, received = run_ranks(
            [lambda: self.sender.connect(link), lambda: self.handle(link, "connect")]
        )
        assert sent.error is None
        return received

    def holds(self, seed: int) -> bool:
        expected = FusedEngine(0, 1, torch.float32)
        expected.load_weights(make_tensors(seed).items())
        found = dict(self.model.named_parameters())
        return all(torch.equal(found[name], t) for name, t in expected.named_parameters())

    def close(self) -> None:
        self.sender.disconnect("engine-0")
        self.receiver.close()


def wait(store: LinkStore, action: Action) -> Report:
    """The report of the engine's rank, once there is one."""
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s:
        report = store.take_report(action, 1)
        if report is not None:
            return report
        time.sleep(0.005)
    raise AssertionError(f"no report on {action}")


def take(store: LinkStore, action: Action) -> Report:
    report = store.take_report(action, 1)
    assert report is not None
    return report


def test_in_place_a_version_is_received_into_the_parameters_by_command() -> None:
    store, link = make_link(timeout_s=TIMEOUT_S)
    rank = Rank()
    assert rank.connect(link) == take(store, "connect")
    _, received = run_ranks(
        [
            lambda: rank.sender.send(1, ["engine-0"], TIMEOUT_S)["engine-0"],
            lambda: rank.handle(link, "receive", 1),
        ]
    )
    assert received.error is None and received == take(store, "receive")
    assert rank.holds(1)
    rank.close()


def test_staged_a_version_shows_only_after_the_swap() -> None:
    store, link = make_link(timeout_s=TIMEOUT_S)
    link = replace(link, staged=True)
    rank = Rank()
    assert rank.connect(link).error is None
    store.put_stage_request(0, StageRequest(1))
    assert rank.sender.send(1, ["engine-0"], TIMEOUT_S)["engine-0"].error is None
    assert wait(store, "receive").error is None
    assert rank.holds(0)
    assert rank.handle(link, "swap", 1).error is None
    assert rank.holds(1)
    rank.close()


def test_a_version_that_is_not_staged_is_refused_and_ends_the_link() -> None:
    store, link = make_link(timeout_s=TIMEOUT_S)
    link = replace(link, staged=True)
    rank = Rank()
    rank.connect(link)
    report = rank.handle(link, "swap", 4)
    assert report.error == "version 4 is to be swapped in, but None is staged"
    assert report == take(store, "swap")
    report = rank.handle(link, "swap", 4)
    assert report.error is not None and "is not connected by this link" in report.error
    rank.close()


def test_a_command_by_another_link_is_refused() -> None:
    _store, link = make_link(timeout_s=TIMEOUT_S)
    _other_store, other = make_link(timeout_s=TIMEOUT_S)
    rank = Rank()
    assert "connect it again" in str(rank.handle(link, "receive", 1).error)
    rank.connect(link)
    assert "connect it again" in str(rank.handle(other, "receive", 1).error)
    rank.close()


def test_a_loader_that_cannot_be_traced_is_reported_by_name() -> None:
    store, link = make_link(timeout_s=TIMEOUT_S)
    rank = Rank()
    rank.model.norm = nn.Parameter(torch.zeros(5), requires_grad=False)  # its tensor has 12
    sent, received = run_ranks(
        [lambda: rank.sender.connect(link), lambda: rank.handle(link, "connect")]
    )
    assert received.error is not None and "'norm.weight'" in received.error
    assert "parameters on cpu, in load_weights (" in received.error
    assert received == take(store, "connect")
    assert sent.error is not None and sent.peer_lost


def test_parameters_that_no_checkpoint_fills_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    model.bias._skip_weight_check = True  # type: ignore[attr-defined]
    assert [*list_loaded_parameters(model)] == ["weight"]


def test_scales_of_a_kv_cache_come_back_after_its_memory_was_released() -> None:
    attention: Any = nn.Module()
    attention.k_scale, attention.k_scale_float = nn.Parameter(torch.tensor(1.5)), 1.5
    attention.v_scale, attention.v_scale_float = nn.Parameter(torch.tensor(1.0)), 1.0
    plain: Any = nn.Module()
    plain.k_scale = plain.k_scale_float = None
    with torch.no_grad():
        attention.k_scale.fill_(7e8)
        attention.v_scale.fill_(-3.0)
    renew_derived(nn.ModuleList([attention, plain]))
    assert (float(attention.k_scale), float(attention.v_scale)) == (1.5, 1.0)
