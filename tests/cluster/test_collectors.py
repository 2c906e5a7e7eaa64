"""Collectors as Ray processes on fake engines: samples, rewards, columns, work on tokens, death."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from mcore_rl.algo.estimator import Advantages
from mcore_rl.batches.stored_batch import PART_TOKENS, cut_by_prompts, make_stored_batch
from mcore_rl.cluster import collectors
from mcore_rl.cluster.collectors import CollectorGroup, CollectorLimits
from mcore_rl.cluster.group import RankError
from mcore_rl.cluster.placement import reserve
from mcore_rl.cluster.session import open_ray_session
from mcore_rl.config import AlgorithmConfig, ClusterConfig, RewardConfig, RolloutConfig
from mcore_rl.planning.bundles import plan_ranks
from mcore_rl.planning.slots import Slot
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.rollout.collector_pool import CollectorPool
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.request import Sampling
from mcore_rl.run.roles.advantages import StoredAdvantages
from mcore_rl.run.rollouts import Rollouts
from mcore_rl.types import Prompt, StoredColumn, TrainBatch, WeightVersion
from mcore_rl.types.scores import Scores
from mcore_rl.workers.collector_worker import CollectorSpec
from tests.support.fake_sglang import FakeSGLang
from tests.support.laid_out import estimate

pytestmark = pytest.mark.e2e
ROLLOUT = RolloutConfig(max_response_len=3, retries=0)
PROMPTS = [Prompt(i, (1, 2 + i), (), "unit", str(i)) for i in range(3)]
REWARD = """
def reward(*, data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth) + len(solution_str) / 100
"""


class Scene:
    """One collector with both engines, or two with one each; engines run in the test's process."""

    def __init__(self, folder: Path, num_collectors: int = 1) -> None:
        self.loop = EventLoop()
        self.run = self.loop.run
        self.engines = [FakeSGLang(self.loop), FakeSGLang(self.loop)]
        (folder / "reward.py").write_text(REWARD)
        scorer = partial(Scorer, RewardConfig(path=str(folder / "reward.py")), 3)
        [slots] = reserve([plan_ranks(1, 0.5, gpus_per_node=0)], timeout_s=20)
        engine_slots = [slots, slots]
        if num_collectors == 2:
            engine_slots[1] = [replace(slots[0], node="another")]
        limits = CollectorLimits(60, 60, 60, 60)
        self.group = CollectorGroup(engine_slots, folder / "logs", limits)
        self.group.start_build(CollectorSpec(ROLLOUT, (9,), str, None, scorer))
        self.group.connect([engine.address for engine in self.engines], {})
        self.pool = CollectorPool(
            self.group.list_calls(),
            self.group.engines_of,
            EngineHealth([engine.url for engine in self.engines]),
            ROLLOUT.max_concurrency,
        )

    def sample(self, num_samples: int = 2) -> list[Any]:
        return self.run(self.pool.generate(PROMPTS, num_samples, Sampling(3)))


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with open_ray_session(ClusterConfig(object_store_mib=80), num_cpus=2):
        yield


@pytest.fixture(scope="module")
def scene(session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("collectors"))
    yield scene
    scene.loop.close()


@pytest.fixture
def two_collectors(session: None, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path, num_collectors=2)
    yield scene
    scene.group.close()
    scene.loop.close()


def doubled(batch: TrainBatch) -> tuple[TrainBatch, dict[str, int]]:
    values_T = 2 * batch.token_ids_T.float()
    return replace(batch, values_T=values_T), {"tokens": len(values_T), "process": os.getpid()}


def test_one_collector_serves_the_engines_of_a_node(scene: Scene) -> None:
    assert [len(engines) for engines in scene.group.engines_of] == [2]
    samples = scene.sample()
    assert [s.prompt.index for s in samples] == [0, 0, 1, 1, 2, 2]
    assert all(engine.sampled for engine in scene.engines)
    whole = scene.run(scene.group.samples(samples[::-1]))
    assert [s.prompt.index for s in whole] == [2, 2, 1, 1, 0, 0]
    assert whole[0].response_ids == (10, 11, 12) and whole[0].text == "(10, 11, 12)"


def test_rewards_are_computed_beside_the_samples(scene: Scene) -> None:
    scores = scene.run(scene.group.score(scene.sample()[::-1]))
    assert scores.rewards_N == pytest.approx([2.12, 2.12, 1.12, 1.12, 0.12, 0.12])


def test_tokens_are_read_and_computed_on_where_they_are(scene: Scene) -> None:
    samples = scene.sample()
    batch = make_stored_batch(samples, WeightVersion(1))
    whole = scene.group.stores.assemble(batch)
    assert whole.token_ids_T.tolist()[:5] == [1, 2, 10, 11, 12]
    assert whole.stale_T is not None and whole.stale_T.tolist()[:5] == [False] * 2 + [True] * 3
    [(batch, told)] = scene.run(scene.group.apply([(doubled, batch)]))
    assert batch.values_T == StoredColumn("values") and told["tokens"] == 30
    values_T = scene.group.stores.assemble(batch).values_T
    assert values_T is not None and torch.equal(values_T, 2 * whole.token_ids_T.float())


def test_two_collectors_compute_advantages_of_the_tokens_that_they_hold(
    two_collectors: Scene,
) -> None:
    """No call brings a token of one to the other, and advantages are normalized over both."""
    run, group = two_collectors.run, two_collectors.group
    assert [group.find_home(engine) for engine in range(4)] == [0, 1, 0, 1], "two are added later"
    samples = two_collectors.sample(4)
    batch = make_stored_batch(samples)
    parts = cut_by_prompts(batch, samples, PART_TOKENS)
    made = run(group.apply([(doubled, part.batch) for part in parts]))
    assert [set(part.store_N.tolist()) for part, _ in made] in ([{0}, {1}], [{1}, {0}])
    assert len({told["process"] for _, told in made}) == 2
    assert sum(told["tokens"] for _, told in made) == sum(batch.lens_N)

    batch = replace(batch, values_T=StoredColumn("values"))
    here = replace(group.stores.assemble(batch), advantages_T=None)
    scores = Scores([float(n * n % 7) for n in range(len(samples))])
    config = AlgorithmConfig(advantage="gae", gamma=0.9, gae_lambda=0.8)
    expected, metrics = estimate(Advantages(config), scores, samples, here)
    estimate_stored = StoredAdvantages(
        Advantages(config), lambda works: run(group.apply(works)), has_teacher=False
    )
    batch, same = estimate_stored(scores, samples, batch)
    assert same == pytest.approx(metrics)
    there = group.stores.assemble(batch)
    assert expected.advantages_T is not None and there.advantages_T is not None
    assert expected.advantages_T.any()
    torch.testing.assert_close(there.advantages_T, expected.advantages_T, rtol=1e-6, atol=1e-6)
    assert there.returns_T is not None and expected.returns_T is not None
    assert torch.equal(there.returns_T, expected.returns_T)


def test_groups_come_back_from_the_file_that_a_collector_wrote(
    scene: Scene, tmp_path: Path
) -> None:
    run = scene.run
    rollouts = Rollouts(scene.pool, scene.group, run, RewardConfig(), has_teacher=False)
    samples = scene.sample()
    leases = list({sample.lease: None for sample in samples})
    numbers = [lease.group for lease in leases]
    [file] = run(rollouts.write_groups(tmp_path, leases)).values()
    moved = run(rollouts.read_groups(tmp_path, file, numbers))
    assert not {lease.group for lease in moved.values()} & set(numbers)
    again = [replace(sample, lease=moved[sample.lease.group]) for sample in samples]
    assert run(scene.group.samples(again)) == run(scene.group.samples(samples))
    (tmp_path / file.name).write_bytes(b"damaged")
    with pytest.raises(RankError, match=r"store_0.pickle is damaged: its 7 bytes"):
        run(rollouts.read_groups(tmp_path, file, numbers))
    with pytest.raises(RankError, match="No such file"):
        run(rollouts.read_groups(tmp_path / "none", file, numbers))


def test_an_unknown_sample_is_refused_by_store(scene: Scene) -> None:
    batch = make_stored_batch(scene.sample())
    batch.group_N[0] = 999_999
    with pytest.raises(
        RuntimeError, match=r"sample store 0 .* of group 999999 is not in the store"
    ):
        scene.group.stores.assemble(batch)
    assert isinstance(batch.group_N, np.ndarray)


def test_a_collector_that_dies_comes_back_and_costs_its_samples_only(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene.group, "_limits", replace(scene.group._limits, restarts=1))
    before = scene.sample()
    batch = make_stored_batch(before, WeightVersion(1))
    [pid] = scene.group._group.pids()
    for engine in scene.engines:
        engine.num_free = 0

    async def kill() -> list[Any]:
        task = asyncio.ensure_future(scene.pool.generate(PROMPTS, 2, Sampling(3)))
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        for engine in scene.engines:
            await engine.let_go()
        return await asyncio.wait_for(task, 60)

    samples = scene.run(kill())
    assert len(samples) == 6 and scene.pool.num_lost == 6
    assert scene.pool.num_losses == 1, "one death counts once"
    assert all(map(scene.pool.is_lost, before)) and not any(map(scene.pool.is_lost, samples))
    assert scene.group._group.pids() != [pid]
    assert scene.run(scene.group.score(samples)).rewards_N == pytest.approx(
        [0.12, 0.12, 1.12, 1.12, 2.12, 2.12]
    )
    with pytest.raises(SamplesLostError, match=r"sample store 0 .* was started again: .*sample 0"):
        scene.run(scene.group.score(before))
    with pytest.raises(SamplesLostError, match=r"sample store 0") as lost:
        scene.group.stores.assemble(batch)
    assert lost.value.stores == {0}
    whole = scene.group.stores.assemble(make_stored_batch(samples, WeightVersion(1)))
    assert whole.token_ids_T.tolist()[:5] == [1, 2, 10, 11, 12]
    scene.group.close()


def test_a_collector_without_room_is_lost_for_good_and_no_read_waits_for_it(
    two_collectors: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's node is gone, as there has never been one."""

    async def find_no_room(slots: Sequence[Slot], timeout_s: float) -> bool:
        return False

    monkeypatch.setattr(collectors, "find_room", find_no_room)
    scene = two_collectors
    before = scene.sample(4)
    of_second = [sample for sample in before if sample.lease.store == 1]
    assert of_second and len(of_second) < len(before)
    os.kill(scene.group._group.pids()[1], signal.SIGKILL)
    scene.run(asyncio.wait_for(_wait_for_loss(scene.pool), 60))
    samples = scene.sample(4)
    assert len(samples) == 12 and {sample.lease.store for sample in samples} == {0}
    with pytest.raises(SamplesLostError, match=r"sample store 1 .* died \(") as lost:
        scene.group.stores.assemble(make_stored_batch(before))
    assert lost.value.stores == {1}


@pytest.mark.slow
def test_a_collector_that_is_stopped_is_killed_and_costs_its_samples_only(
    session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)
    limits = replace(scene.group._limits, stopped_s=2.0)
    monkeypatch.setattr(scene.group, "_limits", limits)
    before = scene.sample()
    [pid] = scene.group._group.pids()
    os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    scene.run(asyncio.wait_for(_wait_for_loss(scene.pool), 30))
    assert time.monotonic() - began_s < 15
    assert all(map(scene.pool.is_lost, before))
    samples = scene.sample()
    assert len(samples) == 6 and not any(map(scene.pool.is_lost, samples))
    assert scene.group._group.pids() != [pid] and not psutil.pid_exists(pid)
    scene.group.close()
    scene.loop.close()


async def _wait_for_loss(pool: CollectorPool) -> None:
    while not pool.num_losses:
        await asyncio.sleep(0.1)


@pytest.mark.slow
def test_a_collector_that_dies_again_and_again_ends_the_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectors, "NODE_LOSS_SHOWS_S", 0.5)
    monkeypatch.setattr(scene.group, "_limits", replace(scene.group._limits, restarts=0))
    [pid] = scene.group._group.pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 0 \(collector, .*died (once|\d times .*); see"):
        scene.sample()
