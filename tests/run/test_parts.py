"""The parts of a run: what is loaded in which order, and what a recipe does without."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cluster.answers import RankError
from mcore_rl.config import (
    CheckpointConfig,
    Config,
    CriticConfig,
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from mcore_rl.config.recipe import load_recipe
from mcore_rl.data.source import ShuffledStream
from mcore_rl.logs.progress import say_once, tell_progress
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.loops.sampling import SamplingOptions
from mcore_rl.process.log_files import find_segments
from mcore_rl.process.signals import StoppedEarlyError, TerminatedError
from mcore_rl.run.kept_start import Origin
from mcore_rl.run.links import make_links, make_record
from mcore_rl.run.parts import (
    StartedRun,
    complete_saves,
    finish_run,
    load_checkpoint,
    load_models,
    make_critic,
    make_log,
    make_stored_trainer,
    make_token_trainer,
    sample_in_background,
    share_teacher,
)
from mcore_rl.run.roles.colocation import EngineMemory, SharedGpus, SharingCritic
from mcore_rl.run.roles.trainer import PackedCritic, Packing, TrainSpeed
from mcore_rl.run.rollouts import Rollouts
from mcore_rl.run.startup import Started
from mcore_rl.weight_sync.controller.factor_sync import FactorSync, choose_factors
from mcore_rl.weight_sync.controller.sync import SyncController
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.flops import ModelFlops
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from tests.support.checkpoint_folders import write_checkpoint


@dataclass
class Ranks:
    """Ranks of one model; they log what they are asked for."""

    role: str
    log: list[tuple[str, ...]]
    state: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 3
    listeners: list[Callable[[ParallelConfig], None]] = field(default_factory=list)

    def start_over(self) -> None:
        """These ranks are new, and go on from no earlier controller."""

    def tell_resized(self, listener: Callable[[ParallelConfig], None]) -> None:
        self.listeners.append(listener)

    def snapshot_reference(self) -> None:
        self.log.append((self.role, "snapshot_reference"))

    def peak_flops(self) -> float | None:
        return 1e15

    def load(self, folder: str, *, verify: bool = True) -> Mapping[str, Any]:
        self.log.append((self.role, "load", folder, f"verify={verify}"))
        return self.state

    def finish_save(self, deadline_s: float | None = None) -> None:
        self.log.append((self.role, "finish_save"))

    def export_hf(self, folder: str) -> None:
        self.log.append((self.role, "export_hf", folder))


Log = list[tuple[str, ...]]


def start(log: Log, state: Mapping[str, Any], with_critic: bool = True) -> Started:
    """Return a run whose models have GPUs of their own."""
    trainer: Any = Ranks("trainer", log, state)
    critic: Any = Ranks("critic", log) if with_critic else None
    engines: Any = None
    return Started(trainer, critic, engines, SharedGpus(EngineMemory((), 5.0), fail))


def fail(_: object) -> None:
    raise AssertionError("nothing shares GPUs")


def test_a_run_continues_after_the_step_that_was_saved(tmp_path: Path) -> None:
    folder, log = RunFolder(tmp_path), Log()
    checkpoint = CheckpointConfig(verify=False)
    stream = ShuffledStream(list("abcd"), seed=0)
    taken = stream.take(3)
    started = start(log, {"step": 4, "data": stream.state_dict()})
    again = ShuffledStream(list("abcd"), seed=0)
    parts, newest = {"data": again}, folder.checkpoint(4)
    origin = Origin(newest)
    assert load_models(checkpoint, started, folder, parts, origin, with_reference=True) == 4
    assert log == [
        ("trainer", "snapshot_reference"),
        ("trainer", "load", str(newest), "verify=False"),
        ("critic", "load", str(folder.critic_checkpoint(4)), "verify=False"),
    ]
    assert [*taken, *again.take(1)] == ShuffledStream(list("abcd"), seed=0).take(4)


def test_without_a_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    log = Log()
    started = start(log, {"step": 4})
    folder = RunFolder(tmp_path)
    checkpoint = CheckpointConfig()
    assert load_models(checkpoint, started, folder, {}, Origin(None), with_reference=False) == 0
    assert log == []


def test_a_checkpoint_without_the_state_of_a_run_is_refused(tmp_path: Path) -> None:
    trainer: Any = Ranks("trainer", Log())
    with pytest.raises(ValueError, match=r"a model without the state of a run: .* another run.dir"):
        load_checkpoint(trainer, CheckpointConfig(), {}, tmp_path)


@pytest.mark.parametrize("export", [True, False])
def test_the_end_completes_saves_and_exports_what_the_recipe_wants(
    tmp_path: Path, export: bool
) -> None:
    folder, log = RunFolder(tmp_path, has_critic=True), Log()
    for step in (1, 2, 3):
        write_checkpoint(folder.checkpoint(step))
        write_checkpoint(folder.critic_checkpoint(step))
    finish_run(CheckpointConfig(keep=1, export_hf=export), start(log, {}), folder)
    exports = [("critic", str(folder.critic_export)), ("trainer", str(folder.export))]
    exported = [(role, what[1]) for role, *what in log if what[0] == "export_hf"]
    assert exported == (exports if export else [])
    assert [role for role, *what in log if what == ["finish_save"]] == ["critic", "trainer"]
    left = sorted(path.name for path in folder.checkpoints.iterdir())
    assert left == ["critic_000003", "step_000003"]


@dataclass
class SavingRanks(Ranks):
    """Ranks that complete the write of `path`, unless they meet an error themselves."""

    path: Path = Path()
    error: BaseException | None = None

    def finish_save(self, deadline_s: float | None = None) -> None:
        super().finish_save()
        if self.error is not None:
            raise self.error
        self.log.append((f"within {deadline_s}",))
        write_checkpoint(self.path)


INTERRUPT = KeyboardInterrupt()
ENGINE_DIED = RankError("an engine died")
DIED = RankError("a trainer rank died")


@pytest.mark.parametrize(
    ("error", "begun", "ranks_meet", "saves", "deadline_s"),
    [
        (INTERRUPT, (2, 4), None, True, None),
        (INTERRUPT, (4,), KeyboardInterrupt(), False, None),
        (INTERRUPT, (2,), None, False, None),
        (TerminatedError(), (2, 4), None, True, 30.0),
        (TerminatedError(), (2,), None, False, None),
        (StoppedEarlyError(), (2, 4), None, True, None),
        (ENGINE_DIED, (4,), None, True, 30.0),
        (ENGINE_DIED, (2,), None, False, None),
        (DIED, (4,), RankError("finish_save after the ranks were stopped"), False, None),
    ],
)
def test_a_checkpoint_that_was_begun_is_completed_whatever_ends_the_run(
    tmp_path: Path,
    error: BaseException,
    begun: tuple[int, ...],
    ranks_meet: BaseException | None,
    saves: bool,
    deadline_s: float | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = RunFolder(tmp_path)
    write_checkpoint(folder.checkpoint(2))
    folder.begun_steps += begun
    ranks: Any = SavingRanks("trainer", [], path=folder.checkpoint(4), error=ranks_meet)
    with tell_progress(), pytest.raises(type(error)) as raised, complete_saves(folder, ranks):
        say_once(lambda: folder.is_saved(4), "saved step 4")
        raise error
    second_interrupt = isinstance(ranks_meet, KeyboardInterrupt)
    assert raised.value is (ranks_meet if second_interrupt else error)
    printed = capsys.readouterr().out
    again = "another SIGTERM" if isinstance(error, TerminatedError) else "Ctrl-C"
    assert (f"completing the checkpoint of step 4; {again} drops it" in printed) == (4 in begun)
    assert folder.is_saved(4) == ("saved step 4" in printed) == saves
    assert ((f"within {deadline_s}",) in ranks.log) == saves


def test_trainer_and_critic_are_packed_by_their_own_layouts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    train, checkpoint = TrainConfig(max_tokens_per_microbatch=100), CheckpointConfig()
    nobody: Any = None
    policy = ModelFacts.read("recipes/model/qwen3_30b_a3b")
    flops = ModelFlops.from_facts(policy)
    rollouts = Rollouts(nobody, nobody, nobody, RewardConfig(), has_teacher=False)
    run = StartedRun(policy, folder, nobody, start(Log(), {}), rollouts)
    packing = Packing.from_config(ParallelConfig(dp=3), train, flops)
    optimizer = OptimizerConfig(max_nonfinite=7)
    trainer = make_token_trainer(run.started.trainer, folder, packing, checkpoint, optimizer)
    config = Config(
        parallel=ParallelConfig(dp=3),
        train=replace(train, optimizer=optimizer),
        checkpoint=checkpoint,
        rollout=RolloutConfig(temperature=0.5),
    )
    stored = make_stored_trainer(config, run)
    assert stored._temperature == 0.5
    assert stored._skipped._most == trainer._skipped._most == 7
    assert stored._packing == trainer._packing == packing
    assert stored._speed == trainer._speed == TrainSpeed(flops, num_ranks=3, peak_flops=1e15)
    apart = make_critic(CriticConfig(), train, checkpoint, run)
    assert isinstance(apart, PackedCritic) and apart._packing.dp_size == 1
    assert apart._packing.max_tokens == 100
    values = apart._packing.flops
    assert values is not None
    vocabulary = 2.0 * 2048 * (151936 - 1)
    assert values == replace(flops, per_token=values.per_token)
    assert flops.per_token - values.per_token == vocabulary, "the value head"
    ranks: Any = run.started
    for listener in ranks.trainer.listeners:
        listener(ParallelConfig(dp=2))
    assert trainer._packing.dp_size == stored._packing.dp_size == 2
    assert trainer._speed == stored._speed == TrainSpeed(flops, num_ranks=2, peak_flops=1e15)
    [resize] = ranks.critic.listeners
    resize(ParallelConfig(dp=1))
    colocated = make_critic(CriticConfig(colocated=True), train, checkpoint, run)
    assert isinstance(colocated, SharingCritic)
    without = replace(run, started=start(Log(), {}, with_critic=False))
    assert make_critic(CriticConfig(), train, checkpoint, without) is None


def test_a_recipe_without_a_teacher_has_none() -> None:
    nobody: Any = None
    no_teacher = Rollouts(nobody, nobody, nobody, RewardConfig(), has_teacher=False)
    assert share_teacher(no_teacher, SharedGpus(EngineMemory((), 5.0), fail)) is None


def test_a_synchronous_run_samples_nothing_in_the_background() -> None:
    unused: Any = None
    options = SamplingOptions(RolloutConfig())
    context = sample_in_background(options, 0, unused, 0, unused, unused, unused, "")
    assert isinstance(context, nullcontext)


def test_rows_after_the_step_to_continue_from_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    config = Config(log=LogConfig(console=False, tensorboard=False))
    with make_log(config, folder, total_steps=9, start_step=0) as log:
        for step in (1, 2, 3):
            log.log(step, {"reward/mean": step / 10})
    with make_log(config, folder, total_steps=9, start_step=2) as log:
        log.log(3, {"reward/mean": 0.7})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.1), (2, 0.2), (3, 0.7)]


def test_files_of_rows_become_segments_of_the_size_of_the_recipe(tmp_path: Path) -> None:
    options = LogConfig(console=False, tensorboard=False, rotate_mib=1)
    row = {f"time/stage_{i:05}": 0.5 for i in range(20_000)}
    with make_log(Config(log=options), RunFolder(tmp_path), total_steps=9, start_step=0) as log:
        for step in (1, 2, 3):
            log.log(step, row)
    assert len(find_segments(tmp_path / "metrics.jsonl")) == 1


def links_of(config: Config, start_step: int = 0) -> SyncController:
    nobody: Any = None
    policy = ModelFacts.read("recipes/model/qwen3_30b_a3b")
    return make_links(
        config.model,
        config.parallel,
        config.rollout,
        config.sync,
        policy,
        nobody,
        keys=None,
        host="127.0.0.1",
        timeout_s=1.0,
        start_step=start_step,
        is_colocated=config.cluster.colocated,
        is_rounded=config.train.fake_quantization != "none",
        factors=choose_factors(config.train.lora, config.model, config.rollout, policy, 0),
    )


@pytest.mark.parametrize(
    ("settings", "stamp"),
    [
        ((), None),
        (("train.lora.rank=8",), (8, 4.0, 48 * (4 + 3 * 128), True)),
        (("train.lora.rank=4", "train.lora.targets=[q_proj]"), (4, 8.0, 48, True)),
        (("train.lora.rank=8", "train.lora.sync=merged"), None),
        (("train.lora.rank=8", "rollout.stage_weights=false"), None),
    ],
)
def test_engines_merge_factors_if_they_stage_weights(
    settings: tuple[str, ...], stamp: tuple[int, float, int, bool] | None
) -> None:
    config = load_recipe(
        "tiny_moe_grpo",
        ["model.path=m", "model.init=random", "train.router_aux_loss_coef=0", *settings],
    )
    strategy = links_of(config)._strategy
    options = strategy._options if isinstance(strategy, FactorSync) else None
    found = options and (
        *(options.stamp.rank, options.stamp.scale, options.stamp.num_matrices),
        len(options.stamp.base) == 64,
    )
    assert found == stamp


def test_layouts_are_recorded_anew_for_fewer_ranks() -> None:
    policy = ModelFacts.read("recipes/model/qwen3_30b_a3b")
    config, smaller = Config(parallel=ParallelConfig(dp=2)), ParallelConfig(dp=1)
    sizes = SGLangSizes.from_config(config.rollout)
    links = links_of(config)
    before = links._record_layouts(sizes)
    links.record_by(make_record(config.model, smaller, config.rollout, policy))
    expected = links_of(replace(config, parallel=smaller))._record_layouts(sizes)
    assert links._record_layouts(sizes) == expected != before


@pytest.mark.parametrize("staged", [True, False])
def test_syncs_are_read_back_as_the_recipe_says(staged: bool) -> None:
    """The default is each tenth, after the first ones of a link."""
    config = Config()
    config.rollout.stage_weights = staged
    assert links_of(config)._strategy._verify_every == 10
    config.sync.verify_every = 3
    assert links_of(config)._strategy._verify_every == 3
    config.sync.verify = "transfer"
    assert links_of(config)._strategy._verify_every == 0


@pytest.mark.parametrize(
    ("settings", "start_step", "is_compared"),
    [
        ((), 0, True),
        ((), 3, False),
        (("model.init=random",), 0, False),
        (("model.dtype=bfloat16", "rollout.quantization=fp8"), 0, False),
        (("train.fake_quantization=int4",), 0, False),
        (("sync.verify=transfer",), 0, False),
        (("cluster.colocated=true", "rollout.stage_weights=false", "rollout.restarts=0"), 0, False),
    ],
)
def test_the_first_sync_is_compared_with_what_engines_loaded_if_they_did(
    settings: Sequence[str], start_step: int, is_compared: bool
) -> None:
    config = load_recipe("tiny_moe_grpo", ["model.path=m", *settings])
    assert links_of(config, start_step)._loaded == is_compared
