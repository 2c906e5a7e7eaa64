"""Pipeline stages know the shapes of what they exchange, and say where one differs."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.train.schedule import KnownShapes, _check, _order_shapes
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)

TABLE = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
"""(micro-batch, chunk) of two stages with two chunks each."""


def numbers(shapes: Iterator[Any]) -> list[int]:
    return [shape[0] for shape in shapes]


def test_a_stage_expects_every_micro_batch_once_per_chunk_but_at_the_ends() -> None:
    shapes = [[[10 * chunk + n, 1, 8] for n in range(4)] for chunk in range(2)]
    assert numbers(_order_shapes(shapes, TABLE, None)) == [0, 1, 10, 11, 2, 3, 12, 13]
    assert numbers(_order_shapes(shapes, TABLE, 0)) == [10, 11, 12, 13]
    assert numbers(_order_shapes(shapes[:1], [(n, 0) for n in range(4)], 0)) == []


def test_a_tensor_of_another_shape_is_not_sent() -> None:
    _check(None, iter([]), "next")
    _check(torch.zeros(3, 1, 8), iter([[3, 1, 8]]), "next")
    with pytest.raises(AssertionError, match=r"the previous stage expects \[3, 1, 8\], not \[4,"):
        _check(torch.zeros(4, 1, 8), iter([[3, 1, 8]]), "previous")


def step_without_exchange(
    rank: int, world_size: int, port: int, path: str, layout: dict[str, Any]
) -> list[Any]:
    """Return what is left of each communicator's expectations after two passes."""
    actor = make_actor(
        rank, world_size, port, ModelConfig(path=path), ParallelConfig(**layout), recompute="moe"
    )
    made: list[KnownShapes] = []
    init = KnownShapes.__init__

    def remember(self: KnownShapes, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    with (
        mock.patch.object(P2PCommunicator, "_communicate_shapes", side_effect=AssertionError),
        mock.patch.object(KnownShapes, "__init__", remember),
    ):
        actor.compute_logprobs(my_batches())
        actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    assert len(made) == 2
    forward_only, train = made
    assert list(forward_only._from_previous) == list(forward_only._to_next) == []
    queues = (train._from_previous, train._to_next, train._from_next, train._to_previous)
    return [list(queue) for queue in queues]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
        {"pp": 2, "vpp": 2},
        pytest.param({"pp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_shape_is_sent_and_all_expectations_are_met(
    tmp_path: Any, layout: dict[str, Any]
) -> None:
    path = str(write_hf_model(tmp_path))
    world_size = ParallelConfig(**layout).world_size
    for left in run_ranks(step_without_exchange, world_size, path, layout):
        assert left == [[], [], [], []]
