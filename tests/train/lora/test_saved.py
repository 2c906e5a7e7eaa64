"""Checkpoints with the faults of other systems' adapters are refused before they are loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from mcore_rl.config import LoraConfig
from mcore_rl.train.checkpoint_save import start_save
from mcore_rl.train.lora.saved import check_saved_adapters
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.facts import FACTORS, FACTS, AdapterFacts, encode_adapters
from mcore_rl.weights.models.value_head import add_value_head
from tests.support.distributed import run_alone

QWEN = ModelFacts.read("recipes/model/qwen3_30b_a3b").config
FACTS_OF_RUN = AdapterFacts.make(LoraConfig(rank=2, targets=["k_proj"]), QWEN, "a" * 64, "/base")
NAME = "model.layers.7.self_attn.k_proj.weight"
A, B = f"{NAME}.A", f"{NAME}.B"
Factors = dict[str, Tensor]


def drop(factors: Factors) -> None:
    del factors[A], factors[B]


def halve(factors: Factors) -> None:
    del factors[A]


def transpose(factors: Factors) -> None:
    factors[A] = factors[A].T.contiguous()


def double(factors: Factors) -> None:
    factors[B] = torch.cat([factors[B], factors[B]], 1)


def leave(factors: Factors) -> None:
    pass


def take_for_a_critics(factors: Factors) -> None:
    pass


FAULTS: dict[Callable[[Factors], None], str] = {
    leave: "",
    drop: f"lacks the factors of 1 of 48 matrices, the first is '{NAME}'",
    halve: f"has factor B of '{NAME}' and no factor A: half an adapter",
    transpose: f"factor A of '{NAME}' has shape (2048, 2), not (2, 2048): it lies transposed",
    double: f"factor B of '{NAME}' has shape (512, 4), not (512, 2): it counts 2 times",
    take_for_a_critics: "holds the factors of a policy, and this run's are of a critic",
}


def write_and_check(root: Path) -> list[str]:
    """Write a checkpoint with each fault; return what is said of it."""
    said = []
    for spoil in FAULTS:
        shapes = FACTS_OF_RUN.list_factor_shapes(QWEN)
        factors = {key: torch.randn(shape) for key, shape in shapes.items()}
        spoil(factors)
        sharded: dict[str, Any] = {
            key: ShardedTensor.from_rank_offsets(FACTORS + key, factor)
            for key, factor in factors.items()
        }
        folder = root / spoil.__name__
        start_save(sharded, folder, texts={FACTS: encode_adapters({"": FACTS_OF_RUN})}).finish(60)
        config = add_value_head(QWEN) if spoil is take_for_a_critics else QWEN
        try:
            check_saved_adapters(folder, folder, {"": FACTS_OF_RUN}, config)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_faults_are_named(tmp_path: Path) -> None:
    said = run_alone(write_and_check, tmp_path)
    for message, (spoil, wanted) in zip(said, FAULTS.items(), strict=True):
        assert wanted in message if wanted else not message, spoil
        assert not message or str(tmp_path / spoil.__name__) in message
    assert FACTS in (tmp_path / "leave" / "checksums.json").read_text()


def test_facts_of_another_run_come_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds all weights of a model"):
        check_saved_adapters(tmp_path, tmp_path, {"": FACTS_OF_RUN}, QWEN)
