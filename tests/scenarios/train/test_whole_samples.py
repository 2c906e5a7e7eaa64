"""Steps of losses over whole samples are those of one process and one row, in every layout.

The rows of an episode lie in several micro-batches and on several ranks. The loop itself takes two
optimizer steps, so that ratios leave 1 and the second step starts from what the first made. Every
entry of the registries of losses, corrections, KL estimators and aggregations then takes one step
from log-probs that differ from the current ones.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.agents.turn_tree import Cut, TurnTree, at_leaves, at_turns
from mcore_rl.algo.covariance import with_held_back
from mcore_rl.algo.lookup import needs_of
from mcore_rl.algo.registry import losses
from mcore_rl.algo.sample_sums import choose_sums
from mcore_rl.batches.batch import rows_of_samples, with_loss_weights
from mcore_rl.batches.summary import summarize_steps
from mcore_rl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    CorrectionConfig,
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.loops.roles import Roles
from mcore_rl.loops.training import StepOptions, add_logprobs, mini_batches, train_policy
from mcore_rl.run.roles.local_trainer import LocalTrainer
from mcore_rl.run.roles.trainer import PackedTokenTrainer, Packing
from mcore_rl.train.actor import Actor
from mcore_rl.types import Prompt, StepStats, SumsFrom, TrainBatch
from tests.support.algorithm_choices import choices
from tests.support.calls_together import CallsTogether
from tests.support.distributed import run_each, run_ranks
from tests.support.gradients import Boxed, boxed_gradients, check_gradients, whole_gradients
from tests.support.laid_out import make_train_batch
from tests.support.stored import store_batch
from tests.support.tiny_training import VOCAB, make_actor, write_hf_model
from tests.support.turn_trees import random_tree, sample_of

LAYOUTS = [{"tp": 2}, {"cp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2, "ep": 1}, {"ep": 2}]
MIXED = {"tp": 2, "dp": 2, "ep": 2, "etp": 1}
"""Four ranks."""
PLACES = [(layout, False) for layout in LAYOUTS] + [({"dp": 2, "ep": 1}, True)]
"""(layout, whether what rows have in common at their beginning is computed once)."""
SEED = 3
MAX_TOKENS = 64
NUM_CHOSEN = 4
"""Episodes of the steps of `choices`."""
OPTIMIZER = OptimizerConfig(lr=3e-2, eps=1e-2, clip_grad=0.0)
"""With this eps a gradient's rounding moves weights by no more than rounding."""
STANDING = replace(OPTIMIZER, lr=1e-30)
"""With this rate weights in float32 stay as they are, so that one model serves many steps."""
COMPARED = ("loss/", "clip/", "correction/", "kl/", "ratio/")


@dataclass(frozen=True)
class Case:
    """A recipe, and where the sums of its two steps must come from if samples have many rows."""

    algorithm: AlgorithmConfig
    mini_batches: int
    sums_from: tuple[SumsFrom, ...]


CASES = [
    Case(
        AlgorithmConfig(
            loss="gspo",
            aggregation="sequence_mean",
            clip_low=0.02,
            clip_high=0.02,
            correction=CorrectionConfig(weight="sequence", high=1.5),
        ),
        2,
        ("old", "current"),
    ),
    Case(
        AlgorithmConfig(
            loss="ppo_clip",
            correction=CorrectionConfig(weight="geometric", reject="sequence", reject_above=0.022),
        ),
        1,
        ("current",),
    ),
    Case(
        AlgorithmConfig(correction=CorrectionConfig(weight="token", high=1.1, normalize=True)),
        2,
        ("old", "old"),
    ),
]
JOBS: list[tuple[Case, Cut, bool]] = [
    (case, cut, False) for case in CASES for cut in (at_leaves, at_turns)
]


def make_batch(cut: Cut, num_episodes: int = 10) -> TrainBatch:
    """Return episodes whose turns continue one another: one row each if they are cut at leaves."""
    generator = random.Random(SEED)
    samples = []
    for i in range(num_episodes):
        tree = TurnTree()
        while not tree.turns or len(at_leaves(tree)) > 1:
            tree = random_tree(generator, generator.randint(2, 6), VOCAB, with_experts=False)
        samples.append(sample_of(tree, Prompt(0, (1,), (), "unit", None), i, cut))
    batch = make_train_batch(samples)
    assert batch.sample_N is not None
    of_sample = torch.tensor([generator.uniform(-1, 1) for _ in samples])
    of_row = of_sample[torch.tensor(batch.sample_N)]
    return replace(batch, advantages_T=of_row.repeat_interleave(torch.tensor(batch.lens_N)))


class Noting(PackedTokenTrainer):
    """Notes where sums come from; with `of_rows`, takes them from each row alone."""

    sums_from: tuple[SumsFrom, ...] = ()
    of_rows = False

    def train_step(self, batch: TrainBatch) -> StepStats:
        self.sums_from += (batch.sums_from,)
        return super().train_step(replace(batch, sums_from="rows") if self.of_rows else batch)


Step = tuple[Boxed, dict[str, float], tuple[SumsFrom, ...]]
"""(gradient, metrics, sources of sums); of several steps, the gradient of the last."""


def take_steps(
    rank: int,
    world_size: int,
    port: int,
    model: ModelConfig,
    jobs: list[tuple[Case, Cut, bool]],
    place: tuple[dict[str, Any], bool],
) -> tuple[list[Step], list[Step]]:
    """Return the steps of each job, and a step of each of `choices`.

    A job is (recipe, cut of the episodes, whether sums are taken from each row alone).
    """
    layout, shares = place
    parallel = ParallelConfig(**layout)
    options: dict[str, Any] = {"router_aux_loss_coef": 0.0, "share_prefixes": shares}
    found = []
    for case, cut, of_rows in jobs:
        actor = make_actor(rank, world_size, port, model, parallel, OPTIMIZER, **options)
        train = TrainConfig(
            mini_batches=case.mini_batches,
            max_tokens_per_microbatch=MAX_TOKENS,
            share_prefixes=shares,
        )
        trainer = make_trainer(actor, case.algorithm, Packing.from_config(parallel, train))
        trainer.of_rows = of_rows
        step_options = StepOptions(case.algorithm, train, CriticConfig(), 512)
        batch = make_batch(cut)
        if cut is at_leaves:  # as a batch has it whose samples have one row each
            batch = replace(batch, sample_N=None)
        # Engine and trainer differ by up to 0.3 nats, by a number that goes with the token.
        logprobs_T = trainer.compute_logprobs(batch).logprobs_T
        batch = replace(batch, rollout_logprobs_T=logprobs_T + noise(batch, 0.3))
        stores, stored = store_batch(batch)
        fields: dict[str, Any] = dict.fromkeys(Roles.__dataclass_fields__)
        beside = LocalTrainer(trainer, stores)
        roles = Roles(**{**fields, "trainer": beside, "on_tokens": stores.apply})
        stored = add_logprobs(step_options, beside, stored)
        metrics = train_policy(step_options, roles, stored, SEED)
        compared = {name: x for name, x in metrics.items() if name.startswith(COMPARED)}
        found.append((boxed_gradients(actor), compared, trainer.sums_from))
    actor = make_actor(rank, world_size, port, model, parallel, STANDING, **options)
    packing = Packing(parallel.dp_size, 1, MAX_TOKENS, shares)
    cut = at_leaves if world_size == 1 else at_turns
    return found, take_chosen_steps(actor, packing, make_batch(cut, NUM_CHOSEN))


def take_chosen_steps(actor: Actor, packing: Packing, batch: TrainBatch) -> list[Step]:
    """Return a step of each of `choices` from old, engine's and reference log-probs of its own."""
    logprobs_T = make_trainer(actor, AlgorithmConfig(), packing).compute_logprobs(batch).logprobs_T
    batch = replace(
        batch,
        old_logprobs_T=logprobs_T + noise(batch, 0.15),
        rollout_logprobs_T=logprobs_T + noise(batch, 0.3, 11.0),
        ref_logprobs_T=logprobs_T + noise(batch, 0.4, 13.0),
    )
    found: list[Step] = []
    for algorithm in choices():
        trainer = make_trainer(actor, algorithm, packing)
        step = replace(batch, sums_from=choose_sums(algorithm, batch, is_first=False))
        if (pick := needs_of(algorithm).held_back) is not None:
            step, _ = with_held_back(step, algorithm, pick, SEED)
        stats = trainer.train_step(with_loss_weights(step, algorithm.aggregation, 16))
        metrics = summarize_steps([stats])
        compared = {key: x for key, x in metrics.items() if key.startswith(COMPARED)}
        found.append((boxed_gradients(actor), compared, trainer.sums_from))
    return found


def make_trainer(actor: Actor, algorithm: AlgorithmConfig, packing: Packing) -> Noting:
    return Noting(
        CallsTogether(actor, algorithm),
        RunFolder("unused"),
        packing=packing,
        temperature=1.0,
        checkpoint=CheckpointConfig(),
    )


def noise(batch: TrainBatch, scale: float, frequency: float = 7.0) -> Tensor:
    """Return numbers of up to `scale` that go with the token and its turn, [T]."""
    assert batch.turn_T is not None
    return scale * torch.sin(frequency * batch.token_ids_T + batch.turn_T)


def test_rows_of_a_sample_lie_in_several_micro_batches_and_on_both_ranks() -> None:
    """Else the test below would show nothing."""
    packing = Packing(dp_size=2, multiple_of=1, max_tokens=MAX_TOKENS)
    for part in mini_batches(store_batch(make_batch(at_turns))[1], 2, 1, SEED):
        plan = packing.plan_stored(part)
        place = {
            row: (rank, number)
            for rank, microbatches in enumerate(plan)
            for number, rows in enumerate(microbatches)
            for row in rows
        }
        places = [{place[row] for row in rows} for rows in rows_of_samples(part)]
        assert any(len({rank for rank, _ in of_sample}) == 2 for of_sample in places)
        assert any(len({number for _, number in of_sample}) > 1 for of_sample in places)
    assert make_batch(at_leaves).sample_N == tuple(range(10))


@dataclass(frozen=True)
class OneProcess:
    """The steps of one process, whose rows are whole episodes.

    wanted   the step of each case, by the case's id
    chosen   the step of each of `choices`
    """

    model: ModelConfig
    wanted: dict[int, Step]
    chosen: list[Step]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    model = ModelConfig(path=str(write_hf_model(tmp_path_factory.mktemp("whole") / "model")))
    wrong_jobs = [(case, at_turns, True) for case in CASES if of_samples(case)]
    jobs = [*JOBS, *wrong_jobs]
    [(alone, chosen)] = run_ranks(take_steps, 1, model, jobs, ({}, False), timeout_s=300)
    wanted = {id(case): alone[2 * i] for i, case in enumerate(CASES)}
    check(({}, False), [alone[: len(JOBS)]], wanted)
    for (case, *_), (boxed, *_) in zip(wrong_jobs, alone[len(JOBS) :], strict=True):
        right = whole_gradients(wanted[id(case)][0])
        with pytest.raises(AssertionError):  # sums of rows are something else
            check_gradients([boxed], right, case, 1e-2)
    return OneProcess(model, wanted, chosen)


@pytest.mark.gloo
@pytest.mark.slow
def test_steps_over_whole_samples_are_those_of_one_row_in_every_layout(
    one_process: OneProcess,
) -> None:
    check_places(2, PLACES, one_process)


@pytest.mark.gloo
@pytest.mark.slow
def test_steps_over_whole_samples_are_those_of_one_row_in_a_mixed_layout(
    one_process: OneProcess,
) -> None:
    check_places(4, [(MIXED, False)], one_process)


def check_places(
    world_size: int, places: list[tuple[dict[str, int], bool]], one_process: OneProcess
) -> None:
    per_place = run_each(take_steps, world_size, places, one_process.model, JOBS, timeout_s=300)
    for place, of_ranks in zip(places, per_place, strict=True):
        check(place, [steps for steps, _ in of_ranks], one_process.wanted)
        check_chosen(place, [steps for _, steps in of_ranks], one_process.chosen)


def of_samples(case: Case) -> bool:
    return needs_of(case.algorithm).whole_samples


def check_chosen(
    place: tuple[dict[str, int], bool], of_ranks: list[list[Step]], chosen: list[Step]
) -> None:
    for algorithm, wanted, *answers in zip(choices(), chosen, *of_ranks, strict=True):
        where = (place, algorithm)
        right = whole_gradients(wanted[0])
        assert any((gradient != 0).any() for gradient in right.values())
        check_gradients([answer[0] for answer in answers], right, where, 3e-6)
        source = "current" if losses.needs(algorithm.loss).whole_samples else "old"
        needs = needs_of(algorithm)
        source = source if needs.whole_samples or needs.whole_batch else "rows"
        for _, found, sums_from in answers:
            assert found == pytest.approx(wanted[1], rel=1e-6, abs=5e-6), where
            assert sums_from == (source,), where


def check(
    place: tuple[dict[str, int], bool], of_ranks: list[list[Step]], wanted: dict[int, Step]
) -> None:
    for (case, cut, _), *answers in zip(JOBS, *of_ranks, strict=True):
        where = (place, case.algorithm.loss, cut.__name__)
        boxed, metrics, _ = wanted[id(case)]
        check_gradients([answer[0] for answer in answers], whole_gradients(boxed), where, 3e-6)
        for _, found, sums_from in answers:
            assert found == pytest.approx(metrics, rel=3e-6, abs=5e-6), where
            has_sums = cut is at_turns or not of_samples(case)  # else over the whole step
            sources = case.sums_from if has_sums else ("rows",) * case.mini_batches
            assert sums_from == sources, where
