"""The gradient of episodes is the same however their turns are cut into rows, in every layout.

It is also the same where what rows have in common at their beginning is computed once. For losses
over whole samples see test_whole_samples.py.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.agents.turn_tree import Cut, TurnTree, at_leaves, at_turns
from mcore_rl.batches.batch import with_loss_weights
from mcore_rl.batches.shared_prefixes import find_batch_sharing
from mcore_rl.config import CheckpointConfig, ModelConfig, ParallelConfig, TrainConfig
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.run.roles.trainer import PackedTokenTrainer, Packing
from mcore_rl.types import Prompt, TrainBatch
from tests.support.calls_together import CallsTogether
from tests.support.distributed import run_ranks
from tests.support.gradients import Boxed, boxed_gradients, check_gradients, whole_gradients
from tests.support.laid_out import make_train_batch
from tests.support.tiny_training import VOCAB, make_actor, write_hf_model
from tests.support.turn_trees import random_tree, sample_of

NUM_TREES = 100
NUM_BATCHES = 10
LAYOUTS = [{"tp": 2}, {"cp": 2}, {"pp": 2}, {"dp": 2, "ep": 1}, {"ep": 2}]
TOLERANCE = 2e-6
"""Share of the largest gradient. Rounding alone is 1.04e-6 of it without AVX-512."""


def one_more(tree: TurnTree) -> list[int]:
    """End rows at the leaves and, before them, at a turn in the middle."""
    return [len(tree.turns) // 2, *at_leaves(tree)]


CUTS: list[Cut] = [at_leaves, at_turns, one_more]


def make_batch(number: int, cut: Cut) -> TrainBatch:
    """Return the episodes of a tenth of the trees, each with an advantage of its own."""
    generator = random.Random(number)
    prompt = Prompt(0, (1,), (), "unit", None)
    samples = []
    for i in range(NUM_TREES // NUM_BATCHES):
        tree = random_tree(generator, generator.randint(1, 8), VOCAB, with_experts=False)
        samples.append(sample_of(tree, prompt, i, cut))
    batch = with_loss_weights(make_train_batch(samples), "sequence_mean", 64)
    assert batch.sample_N is not None
    of_sample = torch.tensor([generator.uniform(-1, 1) for _ in samples])
    of_row = of_sample[torch.tensor(batch.sample_N)]
    advantages_T = of_row.repeat_interleave(torch.tensor(batch.lens_N)) * batch.loss_mask_T
    # The loss takes no sums over samples, so there is no pass for them.
    return TrainBatch(**{**vars(batch), "advantages_T": advantages_T, "sums_from": "rows"})


def gradients(
    rank: int,
    world_size: int,
    port: int,
    model: ModelConfig,
    layout: dict[str, Any],
    jobs: list[tuple[int, Cut]],
    share_prefixes: bool = False,
) -> list[Boxed]:
    """Return the gradients of each job's batch: (number of the batch, cut)."""
    parallel = ParallelConfig(**layout)
    options: dict[str, Any] = {"router_aux_loss_coef": 0.0, "share_prefixes": share_prefixes}
    actor = make_actor(rank, world_size, port, model, parallel, **options)
    train = TrainConfig(max_tokens_per_microbatch=128, share_prefixes=share_prefixes)
    found = []
    start = {name: p.detach().clone() for name, p in actor.weight_layout()[1].items()}
    for number, cut in jobs:
        trainer = PackedTokenTrainer(
            CallsTogether(actor),
            RunFolder("unused"),
            packing=Packing.from_config(parallel, train),
            temperature=1.0,
            checkpoint=CheckpointConfig(),
        )
        trainer.train_step(make_batch(number, cut))
        found.append(boxed_gradients(actor))
        with torch.no_grad():
            for name, parameter in actor.weight_layout()[1].items():
                parameter.copy_(start[name])
    return found


def in_layouts(
    rank: int,
    world_size: int,
    port: int,
    model: ModelConfig,
    layouts: list[dict[str, int]],
    number: int,
    share_prefixes: bool,
) -> list[list[Boxed]]:
    jobs = [(number, cut) for cut in CUTS]
    return [
        gradients(rank, world_size, port, model, layout, jobs, share_prefixes) for layout in layouts
    ]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("numbers", "layouts"),
    [
        pytest.param(range(1), [{"cp": 2}, {"ep": 2}], id="quick"),
        pytest.param(range(1, NUM_BATCHES), LAYOUTS, id="all", marks=pytest.mark.slow),
    ],
)
def test_any_cut_gives_the_same_gradient_in_every_layout(
    tmp_path: Path, numbers: range, layouts: list[dict[str, int]]
) -> None:
    model = ModelConfig(path=str(write_hf_model(tmp_path / "model")))
    jobs = [(number, cut) for number in numbers for cut in CUTS]
    [alone] = run_ranks(gradients, 1, model, {}, jobs, timeout_s=300)
    [shared] = run_ranks(gradients, 1, model, {}, jobs, True, timeout_s=300)
    first: dict[str, torch.Tensor] = {}
    for i, number in enumerate(numbers):
        here = slice(i * len(CUTS), (i + 1) * len(CUTS))
        of_batch = alone[here]
        assert any(find_batch_sharing(make_batch(number, at_turns)).starts), "nothing is shared"
        wanted = whole_gradients(of_batch[0])
        first = first or wanted
        assert max(g.abs().max().item() for g in wanted.values()) > 1e-3
        for boxed, cut in zip(of_batch, CUTS, strict=True):
            check_gradients([boxed], wanted, (number, cut), TOLERANCE)
        for boxed, cut in zip(shared[here], CUTS, strict=True):
            check_gradients([boxed], wanted, (number, cut, "shared"), TOLERANCE)
    sharing = [layout for layout in layouts if "cp" not in layout]
    for chosen, share_prefixes in ((layouts, False), (sharing, True)):
        per_rank = run_ranks(
            in_layouts, 2, model, chosen, numbers[0], share_prefixes, timeout_s=300
        )
        for layout, *of_ranks in zip(chosen, *per_rank, strict=True):
            for cut, *boxed in zip(CUTS, *of_ranks, strict=True):
                check_gradients(boxed, first, (layout, cut, share_prefixes), TOLERANCE)
