"""Numbers of a forward pass that are not finite are refused, with their place, as are gradients."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_rl.algo.sequences import SequenceSum
from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.train.stats import NotFiniteError, check_finite
from mcore_rl.types import TrainBatch
from tests.support.distributed import run_ranks
from tests.support.tiny_training import NUM_TOKENS, make_actor, make_batches, write_hf_model


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_by_place(bad: float) -> None:
    good_T = torch.tensor([-1.0, 0.0, -30.0])
    check_finite("values", [good_T, good_T])
    bad_T = torch.tensor([-1.0, bad, bad])
    message = rf"2 of 3 values of micro-batch 1 are not finite, the first at token 1 \({bad}\)"
    with pytest.raises(NotFiniteError, match=message):
        check_finite("values", [good_T, bad_T])


def overflow(rank: int, world_size: int, port: int, hf_dir: Path) -> str:
    """Take a step whose gradient is infinite; return what is said of it."""

    def loss(
        logprobs_T: Tensor, entropy_T: Tensor, batch: TrainBatch, sums: SequenceSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return logprobs_T * math.inf, {}

    actor = make_actor(rank, world_size, port, ModelConfig(path=str(hf_dir)), ParallelConfig())
    with pytest.raises(NotFiniteError) as raised:
        actor.train_step(make_batches(), loss, temperature=1.0, num_tokens=NUM_TOKENS)
    return str(raised.value)


def test_a_gradient_that_is_not_finite_ends_the_step(tmp_path: Path) -> None:
    [message] = run_ranks(overflow, 1, write_hf_model(tmp_path))
    assert message.startswith("the gradient of optimizer step 0 has norm nan")
