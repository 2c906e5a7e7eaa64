"""A loader that treats one expert of one layer in its own way is linked by samples, and found."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

from mcore_rl.weight_sync import full_trace
from mcore_rl.weight_sync.full_trace import FullTrace
from mcore_rl.weight_sync.link_store import LinkStore
from mcore_rl.weight_sync.receiver import WeightReceiver
from mcore_rl.weight_sync.sender import WeightSender
from mcore_rl.weight_sync.wire import Action, Command, Report, StageRequest
from mcore_rl.weights.box import Box, Shard, contiguous_strides
from mcore_rl.weights.layouts.engine_trace import trace_load_weights
from mcore_rl.weights.layouts.repeated_layers import split_layer
from tests.support.link_ends import make_link, run_ranks

NUM_LAYERS = 5
NUM_EXPERTS = 128
TIMEOUT_S = 60.0
IN_NO_SAMPLE = "model.layers.2.mlp.experts.60.up_proj.weight"


def make_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(NUM_LAYERS):
        weights[f"model.layers.{layer}.norm.weight"] = torch.randn(3, generator=generator)
        for expert in range(NUM_EXPERTS):
            name = f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
            weights[name] = torch.randn(2, 3, generator=generator)
    return weights


TYPED = {name: (tuple(t.shape), t.dtype) for name, t in make_weights(0).items()}


class Model(nn.Module):
    """Layers of stacked experts; in the layers `exchanged`, experts 60 and 61 trade places.

    The tensor IN_NO_SAMPLE raises `error`, or is loaded times two, which cannot be traced.
    """

    def __init__(
        self, exchanged: Iterable[int] = (), error: Exception | None = None, doubles: bool = False
    ) -> None:
        super().__init__()
        self.exchanged = set(exchanged)
        self.error = error
        self.doubles = doubles
        self.num_given = 0
        self.layers = nn.ModuleList(nn.Module() for _ in range(NUM_LAYERS))
        for layer in self.layers:
            layer.norm = nn.Parameter(torch.zeros(3), requires_grad=False)
            layer.up = nn.Parameter(torch.zeros(NUM_EXPERTS, 2, 3), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, loaded in weights:
            self.num_given += 1
            if name == IN_NO_SAMPLE:
                if self.error is not None:
                    raise self.error
                loaded = loaded * 2 if self.doubles else loaded
            layer = split_layer(name).layer
            if "norm" in name:
                parameters[f"layers.{layer}.norm"].data.copy_(loaded)
                continue
            expert = int(name.split(".")[5])
            if layer in self.exchanged:
                expert = {60: 61, 61: 60}.get(expert, expert)
            parameters[f"layers.{layer}.up"].data[expert].copy_(loaded)


class Rank:
    """The only rank of a staged engine, and the trainer rank that feeds it."""

    def __init__(self, model: Model, *, staged: bool = True, trace_all: bool = False) -> None:
        self.model = model
        self.receiver = WeightReceiver()
        weights = make_weights(seed=0)
        shards = [
            Shard(
                Box(n, (0,) * t.dim(), tuple(t.shape)), n, 0, contiguous_strides(t.shape), "float32"
            )
            for n, t in weights.items()
        ]
        self.tensors = weights
        self.sender = WeightSender(shards, weights, 0)
        self.store, link = make_link(timeout_s=TIMEOUT_S, bucket_bytes=4096)
        self.link = replace(link, staged=staged, trace_all=trace_all)
        self.num_stages = 0
        sent, received = run_ranks(
            [lambda: self.sender.connect(self.link), lambda: self.handle("connect")]
        )
        assert sent.error is None and received.error is None, received.error

    def handle(self, action: Action, version: int | None = None) -> Report:
        command = Command(self.link, action, version)
        tensors: Mapping[str, Tensor] = dict(self.model.named_parameters())
        return self.receiver.handle(command, 0, self.model.load_weights, dict(tensors))

    def sync(self, version: int) -> Report:
        """Stage and swap in the weights of seed `version`; the report of the swap."""
        for name, tensor in make_weights(version).items():
            self.tensors[name].copy_(tensor)
        self.store.put_stage_request(self.num_stages, StageRequest(version))
        self.num_stages += 1
        assert self.sender.send(version, ["engine-0"], TIMEOUT_S)["engine-0"].error is None
        assert wait_report(self.store).error is None
        return self.handle("swap", version)

    def holds(self, version: int) -> bool:
        expected = Model(self.model.exchanged)
        expected.load_weights(make_weights(version).items())
        found = dict(self.model.named_parameters())
        return all(torch.equal(found[name], wanted) for name, wanted in expected.named_parameters())

    @property
    def trace(self) -> FullTrace | None:
        return self.receiver._full_trace

    def close(self) -> None:
        self.sender.disconnect("engine-0")
        self.receiver.close()


def wait_report(store: LinkStore) -> Report:
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s:
        report = store.take_report("receive", 1)
        if report is not None:
            return report
        time.sleep(0.002)
    raise AssertionError("no report of the stager")


@pytest.fixture(autouse=True)
def _little_rest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(full_trace, "REST_PER_WORK", 0.1)
    yield


def test_a_loader_that_treats_layers_alike_is_confirmed_beside_syncs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swaps move the parameters while they are traced."""
    monkeypatch.setattr(full_trace, "REST_PER_WORK", 1e9)
    monkeypatch.setattr(full_trace, "_MOST_REST_S", 0.005)
    caplog.set_level(logging.INFO, "mcore_rl")
    rank = Rank(Model())
    num_at_link = rank.model.num_given
    assert num_at_link < 2 * NUM_EXPERTS, "samples of all layers but one"
    assert rank.trace is not None and not rank.trace.done
    for version in range(1, 6):
        assert rank.sync(version).error is None
        assert rank.holds(version)
        assert version > 2 or not rank.trace.done
    assert rank.trace.wait(TIMEOUT_S) and rank.trace.fault is None
    assert rank.model.num_given == num_at_link + len(make_weights(0))
    assert "all tensors are loaded as their samples" in caplog.text
    assert rank.sync(6).error is None and rank.holds(6)
    rank.close()


def test_one_expert_of_one_layer_that_goes_elsewhere_fails_the_next_sync_by_name() -> None:
    """Experts 60 and 61 of layer 3 are in no sample, so the link is made, and weights are wrong."""
    rank = Rank(Model(exchanged=[3]))
    assert rank.sync(1).error is None
    assert not rank.holds(1), "the samples show nothing: else this test plants no fault"
    assert rank.trace is not None and rank.trace.wait(TIMEOUT_S)
    error = rank.sync(2).error
    assert error is not None
    assert "treats 2 tensors otherwise than a sample of their like told" in error
    assert (
        "model.layers.3.mlp.experts.60.up_proj.weight: it goes to layers.3.up at element 366"
        in error
    )
    assert "not to layers.3.up at element 360" in error
    assert "sync.trace=full" in error
    again = rank.handle("swap", 2).error
    assert again is not None and "is not connected by this link" in again
    rank.close()


@pytest.mark.parametrize(("staged", "trace_all"), [(True, True), (False, False)])
def test_a_full_trace_before_the_link_is_right_from_the_first_sync(
    staged: bool, trace_all: bool
) -> None:
    """In place it is always full, because nothing can be traced later."""
    rank = Rank(Model(exchanged=[3]), staged=staged, trace_all=trace_all)
    assert rank.trace is None
    assert rank.model.num_given == len(make_weights(0))
    if staged:
        assert rank.sync(1).error is None
    else:
        for name, tensor in make_weights(1).items():
            rank.tensors[name].copy_(tensor)
        _, received = run_ranks(
            [
                lambda: rank.sender.send(1, ["engine-0"], TIMEOUT_S)["engine-0"],
                lambda: rank.handle("receive", 1),
            ]
        )
        assert received.error is None
    assert rank.holds(1)
    rank.close()


def test_a_loader_that_cannot_be_traced_where_no_sample_was_is_a_fault() -> None:
    rank = Rank(Model(doubles=True))
    assert rank.sync(1).error is None and rank.trace is not None and rank.trace.wait(TIMEOUT_S)
    error = rank.sync(2).error
    assert error is not None and "the trace of all tensors failed" in error
    assert "aten.mul" in error and IN_NO_SAMPLE in error
    rank.close()


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("out of memory"), RuntimeError("another thread"), OSError("no file")],
)
def test_a_trace_that_breaks_off_is_told_and_syncs_go_on(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A loader may fail beside decoding, or in a second thread: it has shown nothing then."""
    rank = Rank(Model(error=error))
    assert rank.sync(1).error is None
    trace = rank.trace
    assert trace is not None and trace.wait(TIMEOUT_S) and trace.fault is None
    [told] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert told.startswith("rank 0 of engine engine-0: the trace of all tensors broke off")
    assert f"{type(error).__name__}: {error}" in told and "Set sync.trace=full" in told
    rank.model.error = None
    assert rank.sync(2).error is None and rank.holds(2)
    assert rank.trace is trace, "the link is the first one"
    rank.close()


def test_a_link_that_ends_ends_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_trace, "REST_PER_WORK", 1e9)
    monkeypatch.setattr(full_trace, "_MOST_REST_S", 0.01)
    rank = Rank(Model(exchanged=[3]))
    assert rank.sync(1).error is None
    trace = rank.trace
    assert trace is not None
    rank.close()
    assert trace._thread is not None
    trace._thread.join(TIMEOUT_S)
    assert not trace.done and trace.fault is None
    assert rank.model.num_given < 4 * NUM_EXPERTS


def test_the_trace_stands_still_while_parameters_change() -> None:
    model = Model()
    tensors = dict(model.named_parameters())
    traced = trace_load_weights(model.load_weights, TYPED, tensors)
    trace = FullTrace("engine-0", traced, model.load_weights, TYPED, tensors)
    with trace.let_parameters_change():
        before = model.num_given
        trace.start()
        time.sleep(0.1)
        assert model.num_given == before
        for parameter in tensors.values():
            parameter.data = parameter.data.clone()
    assert trace.wait(TIMEOUT_S) and trace.fault is None


class Compared(list[Shard]):
    """Shards that try, when they are compared, whether the parameters may change meanwhile."""

    may_change: bool | None = None
    trace: FullTrace

    def __iter__(self) -> Iterator[Shard]:
        changing = Thread(target=self.trace.let_parameters_change().__enter__, daemon=True)
        changing.start()
        changing.join(5.0)
        self.may_change = not changing.is_alive()
        return super().__iter__()


def test_parameters_may_change_while_traces_are_compared() -> None:
    """The comparison covers all shards, which takes long in a large model."""
    model = Model()
    tensors = dict(model.named_parameters())
    traced = trace_load_weights(model.load_weights, TYPED, tensors)
    shards = Compared(traced.shards)
    traced = replace(traced, shards=shards)
    shards.trace = FullTrace("engine-0", traced, model.load_weights, TYPED, tensors)
    shards.trace.start()
    assert shards.trace.wait(TIMEOUT_S) and shards.trace.fault is None
    assert shards.may_change
