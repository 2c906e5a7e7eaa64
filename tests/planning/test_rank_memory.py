"""The values of a memory plan."""

from mcore_rl.config import ParallelConfig
from mcore_rl.planning.peak_memory import RankMemory, encode_ranks, name_stage


def test_a_rank_adds_up_and_names_its_largest_use() -> None:
    rank = RankMemory("engine", "engine ranks", "weight sync", {"weights": 1.6, "KV cache": 2.6})
    assert rank.num_bytes == 1.6 + 2.6
    assert rank.largest == "KV cache"
    assert encode_ranks([rank]) == [
        {
            "who": "engine ranks",
            "moment": "weight sync",
            "bytes": 4,
            "uses": {"weights": 2, "KV cache": 3},
        }
    ]


def test_a_pipeline_stage_is_a_range_of_ranks() -> None:
    parallel = ParallelConfig(tp=2, pp=2, dp=2)
    assert name_stage("trainer", 0, 2, parallel) == "trainer ranks 0-3"
    assert name_stage("critic", 1, 2, parallel) == "critic ranks 4-7"
