"""The packed trainer and critic: whatever the layout, answers come in the order of the batch."""

import asyncio
import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.batches.assembly import columns_of
from mcore_rl.batches.batch import with_loss_weights
from mcore_rl.batches.stored_batch import with_stored_weights
from mcore_rl.config import CheckpointConfig, ParallelConfig, TrainConfig
from mcore_rl.logs.progress import tell_progress
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process.disk import UnwritableError
from mcore_rl.process.event_loop import EventLoop, run_both
from mcore_rl.run.roles import skipped_steps
from mcore_rl.run.roles.failed_saves import note_failed_saves, refuse_lost_end
from mcore_rl.run.roles.skipped_steps import NotFiniteStepsError, SkippedSteps
from mcore_rl.run.roles.trainer import (
    PackedCritic,
    PackedStoredTrainer,
    PackedTokenTrainer,
    Packing,
)
from mcore_rl.types import (
    FailedSaves,
    LogprobOptions,
    StepStats,
    StoredBatch,
    StoredColumn,
    TokenScores,
    TrainBatch,
    WeightVersion,
)
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.flops import ModelFlops
from tests.support.checkpoint_folders import write_checkpoint
from tests.support.policy import ROOT
from tests.support.stored import store_batch


@pytest.fixture
def interruptible() -> Iterator[Callable[[], None]]:
    """Return a function that sends the main thread a Ctrl-C, also where the shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    yield lambda: signal.pthread_kill(main_thread, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


class EchoRanks:
    """Ranks whose log-probs are the token ids, and whose loss is the sum of the loss weights."""

    def __init__(self) -> None:
        self.saved: list[str] = []
        self.temperatures: list[float | None] = []
        self.grad_norm = 1.0
        self.learning_rate = 1e-5
        self.metrics: dict[str, float] = {}

    def compute_logprobs(
        self, per_dp: Sequence[Sequence[TrainBatch]], options: LogprobOptions
    ) -> list[list[TokenScores[torch.Tensor]]]:
        self.temperatures.append(options.temperature)

        def score(ids_T: torch.Tensor) -> TokenScores[torch.Tensor]:
            return TokenScores(ids_T.float(), ids_T, ids_T / 2 if options.sum_squares else None)

        return [[score(batch.token_ids_T) for batch in rank] for rank in per_dp]

    def train_step(
        self, per_dp: Sequence[Sequence[TrainBatch]], *, temperature: float, num_tokens: int
    ) -> StepStats:
        batches = [batch for rank in per_dp for batch in rank]
        assert num_tokens == sum(len(b.token_ids_T) for b in batches if not b.is_filler)
        loss = sum(float(b.loss_weights_T.sum()) for b in batches if b.loss_weights_T is not None)
        return StepStats(loss, self.grad_norm, self.learning_rate, num_tokens, self.metrics)

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        write_checkpoint(folder)
        self.saved.append(folder)

    def finish_save(self) -> None:
        self.saved.append("finished")


def make_batch(lens_N: tuple[int, ...]) -> TrainBatch:
    ids_T = torch.arange(sum(lens_N))
    mask_T = torch.cat([torch.arange(n) > 0 for n in lens_N])
    return with_loss_weights(TrainBatch(ids_T, mask_T, lens_N), "token_mean", 8)


def make_trainer(
    tmp_path: Path, dp_size: int, multiple_of: int, asynchronous: bool = True
) -> PackedTokenTrainer:
    return PackedTokenTrainer(
        EchoRanks(),
        RunFolder(tmp_path),
        packing=Packing(dp_size, multiple_of, max_tokens=12),
        temperature=1.0,
        checkpoint=CheckpointConfig(keep=2, asynchronous=asynchronous),
    )


@pytest.mark.parametrize(("dp_size", "multiple_of"), [(1, 1), (2, 1), (2, 2), (4, 3)])
def test_answers_come_back_in_order_and_no_weight_is_lost(
    tmp_path: Path, dp_size: int, multiple_of: int
) -> None:
    batch = make_batch((5, 3, 9, 2, 7, 4, 4))
    trainer = make_trainer(tmp_path, dp_size, multiple_of)
    scores = trainer.compute_logprobs(batch)
    assert torch.equal(scores.logprobs_T, batch.token_ids_T.float())
    assert scores.router_flips_T is not None and torch.equal(
        scores.router_flips_T, batch.token_ids_T
    )
    assert scores.sum_squares_T is None
    squares_T = trainer.compute_logprobs(batch, LogprobOptions(sum_squares=True)).sum_squares_T
    assert squares_T is not None and torch.equal(squares_T, batch.token_ids_T / 2)
    assert trainer.num_steps == 0
    assert trainer.train_step(batch).loss == pytest.approx(1.0)
    assert trainer.num_steps == 1


def test_ranks_get_shares_of_a_stored_batch_and_return_columns(tmp_path: Path) -> None:
    class StoredRanks(EchoRanks):
        shares: Sequence[StoredBatch] = ()

        def compute_logprobs(self, per_dp: Any, options: LogprobOptions) -> Any:
            self.shares = per_dp
            return [[TokenScores(StoredColumn("old_logprobs"))] for _ in per_dp]

    ranks: Any = StoredRanks()
    trainer = PackedStoredTrainer(
        ranks,
        RunFolder(tmp_path),
        packing=Packing(2, 1, max_tokens=12),
        temperature=1.0,
        checkpoint=CheckpointConfig(),
    )
    batch = store_batch(make_batch((5, 3, 9, 2, 7, 4, 4)))[1]
    assert trainer.compute_logprobs(batch).logprobs_T == StoredColumn("old_logprobs")
    assert len(ranks.shares) == 2 and ranks.shares[0].parts
    groups = sorted(group for share in ranks.shares for group in share.group_N.tolist())
    assert groups == batch.group_N.tolist()


@pytest.mark.parametrize(
    ("grad_norm", "learning_rate", "num_steps"), [(1.0, 1e-9, 1), (0.0, 1e-5, 0), (1.0, 0.0, 0)]
)
def test_steps_that_cannot_change_the_policy_do_not_count(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    grad_norm: float,
    learning_rate: float,
    num_steps: int,
) -> None:
    trainer = make_trainer(tmp_path, 1, 1)
    ranks: Any = trainer._ranks
    ranks.grad_norm = grad_norm
    ranks.learning_rate = learning_rate
    trainer.train_step(make_batch((5, 3)))
    assert trainer.num_steps == num_steps
    assert not caplog.messages
    ranks.metrics = {"train/skipped_share": 1.0}
    trainer.train_step(make_batch((5, 3)))
    assert trainer.num_steps == num_steps, "a skipped step changes nothing"
    [message] = caplog.messages
    assert message.startswith("an optimizer step of the policy was skipped: its gradient norm ")


def test_batches_of_steps_that_are_not_finite_are_kept_until_one_is_too_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, ranks = RunFolder(tmp_path), EchoRanks()
    trainer = PackedTokenTrainer(
        ranks,
        folder,
        packing=Packing(1, 1, max_tokens=12),
        temperature=1.0,
        checkpoint=CheckpointConfig(),
        skipped=SkippedSteps(folder, "policy", most=2),
    )
    logprobs_T = -torch.arange(8.0)
    logprobs_T[4] = math.nan
    batch = replace(make_batch((5, 3)), rollout_logprobs_T=logprobs_T)

    def step(grad_norm: float) -> None:
        ranks.grad_norm = grad_norm
        ranks.metrics = {"train/skipped_share": float(not math.isfinite(grad_norm))}
        trainer.train_step(batch)

    for grad_norm in (math.nan, math.inf, 1.0, math.nan, math.nan):
        step(grad_norm)
    assert [m.rpartition("(")[2] for m in caplog.messages] == [
        f"{k} in a row, at most 2)" for k in (1, 2, 1, 2)
    ]
    with pytest.raises(NotFiniteStepsError, match="step 3 in a row, and max_nonfinite=2"):
        step(math.nan)
    assert trainer.num_steps == 1
    files = sorted((tmp_path / "skipped").iterdir())
    assert [file.name for file in files] == [f"policy_{k:06d}.jsonl" for k in range(1, 6)]
    first, second = map(json.loads, files[0].read_text().splitlines())
    assert first == {
        "sequence": 0,
        "token_ids": [0, 1, 2, 3, 4],
        "trained": [1, 2, 3, 4],
        "rollout_logprobs": [-1.0, -2.0, -3.0, None],
    }
    assert second["token_ids"] == [5, 6, 7] and second["rollout_logprobs"] == [-6.0, -7.0]


class FullRanks(EchoRanks):
    """Ranks whose disk is full at some steps."""

    def __init__(self, folder: RunFolder, full_at: Collection[int]) -> None:
        super().__init__()
        self._failing = {str(folder.checkpoint(step)) for step in full_at}
        self._failed: FailedSaves = ()

    def train_step(self, *args: Any, **kwargs: Any) -> StepStats:
        failed, self._failed = self._failed, ()
        return replace(super().train_step(*args, **kwargs), failed_saves=failed)

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        if folder in self._failing:
            self._failed = ((folder, "rank 0 cannot write a: no space left on device"),)
        else:
            super().save(folder, extra)


def test_a_run_outlives_saves_that_fail_and_tells_each_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    trainer = PackedTokenTrainer(
        FullRanks(folder, full_at=(2, 3)),
        folder,
        packing=Packing(1, 1, max_tokens=12),
        temperature=1.0,
        checkpoint=CheckpointConfig(on_error="continue"),
    )
    counts = []
    with tell_progress():
        for step in range(1, 6):
            counts.append(trainer.train_step(make_batch((5, 3))).metrics["checkpoint/failed"])
            trainer.save(step, {})
    assert counts == [0.0, 0.0, 1.0, 2.0, 0.0]
    lost = [line for line in capsys.readouterr().out.splitlines() if "is lost" in line]
    assert [line.partition("the checkpoint of step ")[2] for line in lost] == [
        f"{step} is lost, and the run goes on (checkpoint.on_error=continue): rank 0 cannot write"
        f" a: no space left on device. The newest checkpoint is that of step 1"
        for step in (2, 3)
    ]
    refuse_lost_end(folder)
    folder.begun_steps.append(6)
    note_failed_saves(folder, ((str(folder.checkpoint(6)), "full"),))
    with pytest.raises(UnwritableError, match=r"of step 6, is lost: full\. .* that of step 5"):
        refuse_lost_end(folder)
    trainer.save(6, {})
    refuse_lost_end(folder)


def test_the_batch_of_a_skipped_step_says_where_its_samples_lie_and_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipped_steps, "MAX_TOKENS", 10)
    monkeypatch.setattr(skipped_steps, "MAX_FILES", 1)
    stores, batch = store_batch(make_batch((5, 3, 4)))
    skipped = SkippedSteps(RunFolder(tmp_path), "critic", most=9, fetch=stores.assemble)
    for _ in range(2):
        assert skipped.note(batch, StepStats(math.nan, 1.0, 1e-5, 12, {"train/skipped_share": 1.0}))
    [file] = (tmp_path / "skipped").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["token_ids"] for row in rows] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    places = [(row["store"], row["group"], row["index"]) for row in rows]
    columns = (batch.store_N, batch.group_N, batch.index_N)
    assert places == list(zip(*(column[:2].tolist() for column in columns), strict=True))


def test_rows_that_share_a_beginning_count_it_once_in_a_micro_batch() -> None:
    prompt = list(range(20, 28))
    ids_T = torch.tensor([*prompt, 1, *prompt, 2, *prompt, 3])
    mask_T = torch.tensor([*[False] * 8, True] * 3)
    batch = TrainBatch(ids_T, mask_T, (9, 9, 9))
    assert len(Packing(1, 1, max_tokens=13).plan(batch)[0]) == 3
    train = TrainConfig(max_tokens_per_microbatch=13, share_prefixes=True)
    packing = Packing.from_config(ParallelConfig(), train)
    assert packing.plan(batch) == [[[0, 1, 2]]]


def test_a_runs_packing_balances_work_not_tokens() -> None:
    lens_N = (80_000, 40_000, 40_000, 40_000, 40_000)
    long = TrainBatch(torch.ones(240_000, dtype=torch.int64), torch.ones(240_000).bool(), lens_N)
    train = TrainConfig(max_tokens_per_microbatch=240_000)
    parallel = ParallelConfig(dp=2)
    flops = ModelFlops.from_facts(ModelFacts.read(str(ROOT / "recipes/model/qwen3_30b_a3b")))
    by_work = Packing.from_config(parallel, train, flops).plan(long)
    assert by_work == [[[1, 2, 3, 4]], [[0]]], "80k tokens cost 3.0, four times 40k cost 3.5"
    by_tokens = Packing.from_config(parallel, train).plan(long)
    assert sorted(len(part) for [part] in by_tokens) == [2, 3]


@pytest.mark.parametrize(("asked", "used"), [(None, 0.7), (1.0, 1.0)])
def test_logprobs_are_at_the_rollouts_temperature_unless_another_is_given(
    tmp_path: Path, asked: float | None, used: float
) -> None:
    ranks = EchoRanks()
    trainer = PackedTokenTrainer(
        ranks,
        RunFolder(tmp_path),
        packing=Packing(1, 1, max_tokens=12),
        temperature=0.7,
        checkpoint=CheckpointConfig(),
    )
    trainer.compute_logprobs(make_batch((3, 4)), LogprobOptions(temperature=asked))
    assert ranks.temperatures == [used]


def test_checkpoints_are_named_by_step_and_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tmp_path, 1, 1, asynchronous=False)
    with tell_progress():
        for step in (5, 10, 15):
            trainer.save(step, {})
    told = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert told == [f"{what} step {step}" for step in (5, 10, 15) for what in ("saving", "saved")]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step_000010",
        "step_000015",
    ]


@pytest.mark.timeout(30)
def test_exports_come_with_the_checkpoints_of_their_steps(tmp_path: Path) -> None:
    ranks, folder = EchoRanks(), RunFolder(tmp_path)
    trainer = PackedTokenTrainer(
        ranks,
        folder,
        packing=Packing(1, 1, max_tokens=12),
        temperature=1.0,
        checkpoint=CheckpointConfig(every_steps=2, export_every_steps=4),
        export=ranks.saved.append,
    )
    for step in (2, 4, 7, 8):
        trainer.save(step, {})
    written = [folder.checkpoint(2), folder.checkpoint(4), folder.step_export(4)]
    written += [folder.checkpoint(7), folder.checkpoint(8), folder.step_export(8)]
    assert ranks.saved == [str(path) for path in written]


@pytest.mark.parametrize("every_steps", [0, 3])
def test_exports_without_checkpoints_are_refused(every_steps: int) -> None:
    with pytest.raises(
        ValueError, match=r"export_every_steps=4 must be a multiple .* such as to 4"
    ):
        CheckpointConfig(every_steps=every_steps, export_every_steps=4)


def test_the_event_loop_goes_on_while_its_caller_does_something_else(
    interruptible: Callable[[], None],
) -> None:
    loop, ended = EventLoop(), []

    async def count() -> None:
        try:
            while True:
                counted.append(len(counted))
                await asyncio.sleep(0.001)
        finally:
            ended.append("counting")

    counted: list[int] = []
    counting = loop.start(count())
    while len(counted) < 3:
        time.sleep(0.01)

    async def fail() -> None:
        raise ValueError("told to the caller")

    with pytest.raises(ValueError, match="told to the caller"):
        loop.run(fail())

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waiting")

    threading.Timer(0.1, interruptible).start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(wait())
    before = len(counted)
    while len(counted) <= before:
        time.sleep(0.01)
    loop.close()
    assert sorted(ended) == ["counting", "waiting"] and counting.cancelled()


VALUES = StoredColumn("values")


class ReadingCritics:
    """Ranks that note what they would read of stores; `num_images` counts their images."""

    def __init__(self) -> None:
        self.num_images = 0
        self.read: set[str] = set()

    def compute_values(self, per_dp: Sequence[StoredBatch]) -> list[list[StoredColumn]]:
        every = [share.nums_images_N for share in per_dp if share.nums_images_N is not None]
        self.num_images += sum(int(nums_N.sum()) for nums_N in every)
        return [[VALUES] for _ in per_dp]

    def train_step(self, per_dp: Sequence[StoredBatch], *, num_tokens: int) -> StepStats:
        self.read = {field for share in per_dp for field in columns_of(share)}
        assert all(share.loss_weights_N is not None for share in per_dp)
        assert num_tokens == sum(sum(share.lens_N) for share in per_dp)
        return StepStats(0.0, 0.0, 0.0, num_tokens)

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        write_checkpoint(folder)

    def finish_save(self) -> None: ...


def test_the_critic_gets_what_it_reads_and_a_checkpoint_counts_with_both_parts(
    tmp_path: Path,
) -> None:
    folder, checkpoint = RunFolder(tmp_path, has_critic=True), CheckpointConfig(keep=1)
    packing = Packing(2, 2, max_tokens=12)
    ranks = ReadingCritics()
    critic = PackedCritic(ranks, folder, packing=packing, checkpoint=checkpoint)
    trainer = PackedTokenTrainer(
        EchoRanks(), folder, packing=packing, temperature=1.0, checkpoint=checkpoint
    )
    batch = store_batch(make_batch((5, 3, 9, 2, 7, 4, 4)))[1]
    batch = with_stored_weights(batch, "token_mean", 8)
    assert critic.compute_values(batch) == VALUES
    batch = replace(
        batch, values_T=VALUES, returns_T=VALUES, old_logprobs_T=VALUES, version=WeightVersion(0)
    )
    assert critic.train_step(batch).num_tokens == sum(batch.lens_N)
    always = {"token_ids_T", "rollout_logprobs_T"}
    assert ranks.read == always | {"loss_mask_T", "values_T", "returns_T"}
    for step in (1, 2):
        critic.save(step)
        assert folder.newest_checkpoint() == (folder.checkpoint(1) if step == 2 else None)
        trainer.save(step, {})
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "critic_000002",
        "step_000002",
    ]
    shutil.rmtree(folder.critic_checkpoint(2))
    assert folder.newest_checkpoint() is None


def test_the_critic_sees_the_images_of_its_sequences(tmp_path: Path) -> None:
    ranks = ReadingCritics()
    critic = PackedCritic(
        ranks,
        RunFolder(tmp_path, has_critic=True),
        packing=Packing(2, 2, max_tokens=12),
        checkpoint=CheckpointConfig(),
    )
    batch = store_batch(make_batch((5, 3, 9)))[1]
    critic.compute_values(replace(batch, nums_images_N=np.array([1, 0, 2])))
    assert ranks.num_images == 3


def test_two_calls_run_at_once_and_either_may_fail() -> None:
    meet = threading.Barrier(2, timeout=10)
    assert run_both(lambda: meet.wait() >= 0, lambda: meet.wait() >= 0) == (True, True)
    for calls in ((lambda: 1 / 0, lambda: 1), (lambda: 1, lambda: 1 / 0)):
        with pytest.raises(ZeroDivisionError):
            run_both(*calls)
