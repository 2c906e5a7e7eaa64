"""GPU memory that processes keep while others have the GPU: buffers, communicators, graphs."""

import pytest

from mcore_rl.config import RolloutConfig
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.engine_memory import predict_engine
from mcore_rl.planning.memory import predict_trainer
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.resident_memory import (
    SyncMemory,
    count_graph_bytes,
    count_pair_bytes,
    count_sync_buffers,
)

MIB = 2**20


def plan_run(recipe: str, *settings: str) -> PlannedRun:
    return PlannedRun.make(load_recipe(recipe, list(settings)))


def test_receivers_of_the_machine_have_buffers_of_their_own() -> None:
    run = plan_run("qwen3_30b_a3b_grpo_8", "rollout.engines=1", "rollout.tp=8", "rollout.ep=8")
    counted = SyncMemory.count(run)
    near = SyncMemory.count(plan_run("qwen3_30b_a3b_grpo_8"))
    one = count_sync_buffers(run.sync)
    assert near.buffer_bytes == 4 * one, "an engine of two ranks has one on each side of a trainer"
    assert one < counted.buffer_bytes <= 8 * one, "one engine's ranks do not share buffers"
    assert counted.sender_pairs == counted.receiver_pairs == 0


def test_ranks_of_other_machines_share_a_links_buffers_and_are_pairs_of_nccl() -> None:
    run = plan_run("qwen3_30b_a3b_grpo_32")  # engines on machines of their own, as a chain
    counted = SyncMemory.count(run)
    assert counted.buffer_bytes == run.rollout.engines * count_sync_buffers(run.sync)
    alone = SyncMemory.count(plan_run("qwen3_30b_a3b_grpo_32", "sync.relay=false"))
    assert counted.receiver_pairs == alone.receiver_pairs + 2, "the engines before and after it"
    assert counted.sender_pairs == alone.sender_pairs > 0
    trainer, engine = predict_trainer(run)[0], predict_engine(run)[0]
    assert trainer["sync communicators"] == count_pair_bytes(counted.sender_pairs)
    assert engine["sync communicators"] == count_pair_bytes(counted.receiver_pairs)


def test_a_pair_takes_what_nccl_allocates_for_its_four_channels() -> None:
    assert count_pair_bytes(3) == 3 * 4 * 12 * MIB


@pytest.mark.parametrize(
    ("options", "expected_mib"),
    [
        ({}, 64 * 2 + 42 * 8),
        ({"cuda_graph_max_bs_decode": 16}, 16 * 2 + 42 * 8),
        ({"disable_prefill_cuda_graph": True}, 64 * 2),
        ({"cuda_graph_backend_prefill": "disabled", "disable_decode_cuda_graph": True}, 0),
    ],
)
def test_graphs_take_what_sglang_reserves_for_them(
    options: dict[str, object], expected_mib: int
) -> None:
    rollout = RolloutConfig(max_concurrency=64, sglang=options)
    assert count_graph_bytes(rollout) == expected_mib * MIB
