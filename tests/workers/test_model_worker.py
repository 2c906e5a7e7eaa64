"""A rank of the policy outside Ray: it links engines with a sender that the first link makes.

tests/scenarios/test_ranks_and_engines.py has the group of ranks, on Ray and with Megatron.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_rl.tools.doctor.toy_engine import FusedEngine, make_tensors, row_cut
from mcore_rl.weight_sync.receiver import WeightReceiver
from mcore_rl.weight_sync.wire import Command, Report
from mcore_rl.workers.model_worker import TrainerWorker
from tests.support.link_ends import make_link, run_ranks


class Model:
    """The weights of a model in training, on one rank."""

    def round_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __init__(self) -> None:
        self.num_layouts = 0

    def adapter_layouts(self) -> dict[str, Any]:
        return {}

    def list_adapter_factors(self) -> dict[str, Any]:
        return {}

    def without_adapter(self) -> AbstractContextManager[None]:
        return nullcontext()

    def select_served_layout(self, *, drafts: bool) -> Any:
        self.num_layouts += 1
        return row_cut(make_tensors(1), 0, 1, "float32")


class Engine:
    """An engine of one rank, linked in place."""

    def __init__(self, name: str) -> None:
        self.store, link = make_link(timeout_s=20.0)
        self.link = replace(link, engine=name)
        self.model = FusedEngine(0, 1, torch.float32)
        self.receiver = WeightReceiver()

    def handle(self, command: Command) -> Report:
        parameters = dict(self.model.named_parameters())
        return self.receiver.handle(command, 0, self.model.load_weights, parameters)

    def holds(self, seed: int) -> bool:
        expected = FusedEngine(0, 1, torch.float32)
        expected.load_weights(make_tensors(seed).items())
        found = dict(self.model.named_parameters())
        return all(torch.equal(found[name], t) for name, t in expected.named_parameters())


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    engines = [Engine("a"), Engine("b")]
    yield engines
    for engine in engines:
        engine.receiver.close()


def test_one_sender_brings_the_models_weights_to_all_engines(engines: list[Engine]) -> None:
    worker: Any = TrainerWorker.__new__(TrainerWorker)
    worker._model, worker._rank, worker._quantization = Model(), 0, "none"
    worker._serves_drafts = False
    worker.describe()
    for engine in engines:
        reports = run_ranks(
            [
                lambda e=engine: worker._sender.connect(e.link),
                lambda e=engine: e.handle(Command(e.link, "connect")),
            ]
        )
        assert [report.error for report in reports] == [None, None]
    assert worker._model.num_layouts == 1
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(worker.send, 5, ["a", "b"], 20.0)
        received = run_ranks([lambda e=e: e.handle(Command(e.link, "receive", 5)) for e in engines])
        sent = sending.result()
    assert {name: report.error for name, report in sent.items()} == {"a": None, "b": None}
    assert [report.error for report in received] == [None, None]
    assert all(engine.holds(1) for engine in engines)
    for name in ("a", "b"):
        worker._sender.disconnect(name)
