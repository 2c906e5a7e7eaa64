"""Recorded rules of Megatron's layouts agree with real models of every family, rank by rank."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import ParallelConfig, TrainConfig
from mcore_rl.planning.memory import count_parameters
from mcore_rl.train.model import make_chunks
from mcore_rl.train.muon import is_matrix
from mcore_rl.train.runtime import init_distributed
from mcore_rl.train.transformer_config import make_transformer_config
from mcore_rl.train.weights import weight_layout
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.layouts.layout import check_rank
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.models import family_of
from tests.support.distributed import run_ranks
from tests.support.tiny_models import write_model

NUM_RANKS = 8
Layouts = list[Mapping[str, Any]]
CASES: dict[str, tuple[str, dict[str, Any], Layouts]] = {
    "qwen3_moe": (
        "qwen3_moe",
        {"mlp_only_layers": [1], "num_hidden_layers": 6},
        [
            {"tp": 2, "cp": 2, "pp": 2, "ep": 4},
            {
                **{"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 2, "dp": 2},
                "stage_layers": [2, 1, 1, 2],
            },
            {"pp": 4, "stage_layers": [1, 2, 2, 1], "dp": 2},
        ],
    ),
    "qwen3_moe_tied": (
        "qwen3_moe",
        {"tie_word_embeddings": True},
        [{"tp": 2, "pp": 2, "ep": 4, "dp": 2}],
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {},
        [
            {"tp": 2, "cp": 2, "pp": 2, "ep": 4},
            {"tp": 2, "etp": 4, "ep": 2, "dp": 4},
            {"pp": 2, "stage_layers": [1, 3], "tp": 2, "ep": 2, "dp": 2},
        ],
    ),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": [2]}, [{"tp": 4, "pp": 2, "ep": 2, "etp": 2}]),
    "mixtral": ("mixtral", {}, [{"tp": 2, "cp": 2, "pp": 2, "ep": 4}]),
    "olmoe": ("olmoe", {}, [{"tp": 4, "pp": 2, "ep": 4}]),
    "glm4_moe": ("glm4_moe", {}, [{"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "dp": 2}]),
    "minimax_m2": ("minimax_m2", {}, [{"tp": 4, "ep": 4, "etp": 2, "dp": 2}]),
    "gpt_oss": ("gpt_oss", {}, [{"tp": 4, "pp": 2, "ep": 2}]),
    "deepseek_v2": ("deepseek_v2", {}, [{"tp": 4, "pp": 2, "ep": 4}]),
    "qwen2": ("qwen2", {}, [{"tp": 4, "pp": 2}]),
    "qwen3_next": (
        "qwen3_next",
        {},
        [{"tp": 4, "pp": 2, "ep": 2, "etp": 2}, {"tp": 2, "cp": 2, "pp": 2, "ep": 4}],
    ),
    "qwen3_5": ("qwen3_5", {"tie_word_embeddings": True}, [{"tp": 4, "pp": 2}]),
    "qwen3": (
        "qwen3",
        {"tie_word_embeddings": True},
        [{"tp": 2, "cp": 2, "pp": 2, "vpp": 2}, {"pp": 2, "stage_layers": [1, 3], "dp": 4}],
    ),
}
"""Name -> (family, changes to its config.json, layouts of eight ranks)."""
QUICK = ("qwen3_moe", "deepseek_v3", "qwen3_next", "qwen3")
"""Those of `make test`."""


def check_cases(rank: int, world_size: int, port: int, folder: Path, names: Sequence[str]) -> int:
    """Check cases on this rank; return the number of boxes checked."""
    return sum(
        check_case(rank, world_size, port, folder / name, ParallelConfig(**layout))
        for name in names
        for layout in CASES[name][-1]
    )


def check_case(
    rank: int, world_size: int, port: int, hf_dir: Path, parallel: ParallelConfig
) -> int:
    init_distributed(rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60)
    hf_config = read_hf_config(hf_dir)
    config = make_transformer_config(hf_config, parallel, torch.float32, TrainConfig())
    chunks = make_chunks(config, hf_config)
    shards, _ = weight_layout(chunks, hf_config)
    sizes = MegatronSizes.from_config(parallel, hf_config)
    layout = MegatronLayout(family_of(hf_config), hf_config, sizes, "float32")
    assert layout.num_ranks == world_size
    predicted = count_parameters(layout, sizes, rank // sizes.stage_ranks)
    assert predicted.total == sum(
        parameter.numel() for chunk in chunks for parameter in chunk.parameters()
    )
    assert predicted.expert == sum(
        p.numel() for chunk in chunks for name, p in chunk.named_parameters() if ".experts." in name
    )
    assert sum(predicted.matrices) == sum(
        p.numel() for chunk in chunks for n, p in chunk.named_parameters() if is_matrix(n, p)
    )
    try:
        check_rank(layout, rank, shards)
    except ValueError as error:
        raise AssertionError(f"{hf_dir.name}, {parallel}: {error}") from error
    with pytest.raises(ValueError, match=f"rank {rank}: the recorded layout of"):
        check_rank(layout, rank, shards[1:])
    return len(shards)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param(sorted(CASES.keys() - QUICK), id="further", marks=pytest.mark.slow),
    ],
)
def test_every_rank_holds_what_the_rule_says(tmp_path: Path, names: Sequence[str]) -> None:
    for name in names:
        kind, changes, _ = CASES[name]
        write_model(kind, tmp_path / name, **changes)
    assert all(run_ranks(check_cases, NUM_RANKS, tmp_path, names, timeout_s=300))
