"""Finished samples that no step had are kept with a checkpoint, and trained after a resume."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from mcore_rl.batches.group_files import GroupFile, read_groups, write_groups
from mcore_rl.batches.kept_rows import BFLOAT16
from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.cluster.answers import RankError
from mcore_rl.logs.ledger.balance import count_trained, read_balance
from mcore_rl.logs.ledger.file import NAME, read_records
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout import client as client_module
from mcore_rl.run.roles.kept_samples import KeptSamples
from mcore_rl.types import GroupLease, Sample, VersionSpan, WeightVersion
from tests.run.roles.test_booked_background import ASYNC, ONE_STEP_OFF, BookedSampler
from tests.support.background_sampling import PROMPTS
from tests.support.fake_sglang import loop_with_quick_retries


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventLoop]:
    with loop_with_quick_retries(monkeypatch, client_module) as loop:
        yield loop


class Stores:
    """The store of a launch, with the calls of Rollouts for files of groups."""

    def __init__(self) -> None:
        self.local = LocalStores()

    def use(self, launch: BookedSampler) -> None:
        self.local = cast(Any, launch.sampler.background)._client.stores

    async def write_groups(
        self, folder: Path, leases: Sequence[GroupLease]
    ) -> Mapping[int, GroupFile]:
        numbers = [lease.group for lease in leases]
        kept = dict(zip(numbers, self.local.stores[0].find(numbers), strict=True))
        return {0: write_groups(folder / "store_0.pickle", kept)}

    async def read_groups(
        self, folder: Path, file: GroupFile, numbers: Sequence[int]
    ) -> Mapping[int, GroupLease]:
        try:
            groups = read_groups(folder, file)
        except ValueError as error:  # as a rank's error arrives at the controller
            raise RankError(str(error)) from error
        leases = {number: GroupLease(0, 1000 + number) for number in numbers}
        for number, group in groups.items():
            self.local.stores[0].adopt(leases[number].group, group)
        return leases


class Kept:
    """A launch that keeps its finished groups with the checkpoint of step 2, and then ends."""

    def __init__(
        self, folder: Path, loop: EventLoop, options: Mapping[str, Any], without: int = 0
    ) -> None:
        """`without`: so many of the oldest groups are not kept, as if they were not finished."""
        self.folder, self.loop, self.options = folder, loop, options
        stores = Stores()
        kept = KeptSamples(folder / "kept", "recipe", stores, 0)
        first = BookedSampler(folder, loop, options, kept=kept)
        stores.use(first)
        with first.sampler.background as background:
            first.train(2)
            first.sampler.wait_until_full()
            self.state = first.prompts.state_dict()
            first.ledger.note_save(2)
            self.groups = background._buffer.list_finished()[without:]
            background.keep(2)
            if without:
                loop.run(kept.write(2, self.groups))
            self.positions = {group.position for group in self.groups}
            self.samples = stores.local.samples([s for g in self.groups for s in g.samples])
        first.ledger.close(RuntimeError("stopped"))

    def resume(self, recipe: str = "recipe", **options: Any) -> tuple[BookedSampler, list[Sample]]:
        """Train two steps after the checkpoint; return the launch and the samples of both."""
        stores = Stores()
        kept = KeptSamples(self.folder / "kept", recipe, stores, 2)
        given = {**self.options, **options}
        launch = BookedSampler(self.folder, self.loop, given, self.state, 2, kept=kept)
        stores.use(launch)
        trained: list[Sample] = []
        take = launch.sampler.background.take

        def take_noted(version: WeightVersion) -> Any:
            found = take(version)
            trained.extend(stores.local.samples(found[0]))
            return found

        launch.sampler.background.take = take_noted  # type: ignore[method-assign]
        with launch.ledger, launch.sampler.background:
            launch.train(2)
        return launch, trained


def find_sampled(folder: Path) -> list[tuple[int, int]]:
    """Return (launch, position) of each group that the ledger has as sampled."""
    launch, found = 0, []
    for record in read_records(folder / NAME):
        launch += record["is"] == "launch"
        if record["is"] == "sampled":
            found.append((launch, record["at"]))
    return found


@pytest.mark.parametrize("options", [ONE_STEP_OFF, ASYNC])
def test_finished_samples_are_trained_after_a_resume_and_not_drawn_again(
    options: Mapping[str, Any], loop: EventLoop, tmp_path: Path
) -> None:
    kept = Kept(tmp_path, loop, options)
    assert kept.positions
    launch, trained = kept.resume()
    asked = [body["input_ids"] for body in launch.sampler.engine.sampled]
    prompts = [list(PROMPTS[position].token_ids) for position in kept.positions]
    assert not [ids for ids in asked if ids in prompts], "kept prompts were sampled again"
    of_kept = [s for s in trained if s.prompt.position in kept.positions]
    assert of_kept == kept.samples[: len(of_kept)] and len(of_kept) >= 4
    balance = read_balance(tmp_path)
    assert balance.holds, balance.imbalances
    assert set(count_trained(tmp_path).values()) == {1}


def test_prompts_stay_in_order_beside_a_group_that_was_not_finished(
    loop: EventLoop, tmp_path: Path
) -> None:
    kept = Kept(tmp_path, loop, ONE_STEP_OFF, without=1)
    assert kept.positions
    _, trained = kept.resume()
    positions = [sample.prompt.position for sample in trained]
    assert positions == sorted(positions) and len(set(positions)) == 4
    assert min(positions) < min(kept.positions)
    balance = read_balance(tmp_path)
    assert balance.holds, balance.imbalances


def test_kept_samples_that_are_too_stale_are_given_up(loop: EventLoop, tmp_path: Path) -> None:
    kept = Kept(tmp_path, loop, {**ASYNC, "stale": "drop", "max_staleness": 3})
    kept.resume(max_staleness=1)
    given_up = [r for r in read_records(tmp_path / NAME) if r["is"] == "given_up"]
    assert {r["why"] for r in given_up} == {"dropped_stale"}
    balance = read_balance(tmp_path)
    assert balance.holds, balance.imbalances


def test_samples_of_another_recipe_are_drawn_again(loop: EventLoop, tmp_path: Path) -> None:
    kept = Kept(tmp_path, loop, ASYNC)
    kept.resume(recipe="another one")
    assert {(2, position) for position in kept.positions} & {*find_sampled(tmp_path)}
    assert read_balance(tmp_path).holds


@pytest.mark.parametrize("name", ["store_0.pickle", "groups.pickle"])
def test_a_damaged_file_costs_its_samples_only(
    name: str, loop: EventLoop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(tmp_path, loop, ASYNC)
    path = tmp_path / "kept" / "step_000002" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    _, trained = kept.resume()
    assert "are drawn again" in caplog.text and "is damaged" in caplog.text
    assert len(trained) == 8 and read_balance(tmp_path).holds


def test_groups_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Log-probs in bfloat16, experts, chosen keys, and columns that were written later."""
    store = SampleStore(num_experts=8, logprob_dtype=BFLOAT16, limit_bytes=1)  # in files
    sample = replace(
        Sample(PROMPTS[0], 0, (5, 6, 7), (-0.3, -1e-6, -9.7), "stop", spans(0, 1, 3), "text"),
        routed_experts=torch.arange(32, dtype=torch.int16).view(4, 2, 4) % 8,
        indexer_topk=torch.arange(8, dtype=torch.int32).view(4, 1, 2),
    )
    store.put(3, [sample, replace(sample, sample_index=1, logprobs=(-0.5, -0.25, -2.0))])
    values = np.linspace(0, 1, 10, dtype=np.float32)
    store.write(np.array([3, 3]), np.array([0, 1]), {"teacher_logprobs": values})
    file = write_groups(tmp_path / "store_0.pickle", {3: store.find([3])[0]})
    other = SampleStore(num_experts=8, logprob_dtype=BFLOAT16)
    other.adopt(9, read_groups(tmp_path, file)[3])
    for before, after in zip(store.find([3])[0].rows, other.find([9])[0].rows, strict=True):
        assert before.versions == after.versions
        assert before.columns.keys() == after.columns.keys()
        for name, column in before.columns.items():
            assert column.dtype == after.columns[name].dtype, name
            np.testing.assert_array_equal(column, after.columns[name])
            assert not isinstance(after.columns[name], np.memmap)
    assert other.samples([9], [0])[0].response_ids == (5, 6, 7)


def spans(*edges: int) -> tuple[VersionSpan, ...]:
    """Return spans of versions 0, 1, ... between edges."""
    pairs = enumerate(pairwise(edges))
    return tuple(VersionSpan(a, b, WeightVersion(k)) for k, (a, b) in pairs)


def test_only_the_samples_of_two_checkpoints_are_there(loop: EventLoop, tmp_path: Path) -> None:
    stores = Stores()
    kept = KeptSamples(tmp_path, "recipe", stores, 0)
    for step in (2, 4, 6, 5):  # a run goes back to 4 and saves 5
        loop.run(kept.write(step, []))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000004", "step_000005"]
