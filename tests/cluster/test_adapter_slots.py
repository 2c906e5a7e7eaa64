"""Engines without a trainer serve the adapter of train.lora.path, which is checked first."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rl.cluster.adapter_slots import list_served_names, make_adapter_slots
from mcore_rl.config import AdapterConfig, LoraConfig, ModelConfig
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.base import compute_base_sum
from mcore_rl.weights.lora.facts import AdapterFacts
from mcore_rl.weights.lora.peft_files import write_peft
from mcore_rl.weights.lora.recipe_checks import check_sampled_adapter
from tests.support.tiny_models import write_model

LORA = LoraConfig(rank=4, targets=["q_proj", "v_proj"], sync="adapter", name="ada")


def write_adapter(base: Path, folder: Path) -> LoraConfig:
    """Write random factors; return the options of a recipe that starts from them."""
    model = ModelFacts.read(base)
    facts = AdapterFacts.make(LORA, model.config, compute_base_sum(base), str(base))
    shapes = facts.list_factor_shapes(model.config)
    write_peft(folder, facts, model.config, {key: torch.randn(s) for key, s in shapes.items()})
    return replace(LORA, path=str(folder))


def test_a_command_without_a_trainer_serves_the_folder(tmp_path: Path) -> None:
    base = write_model("qwen3", tmp_path / "base")
    lora = write_adapter(base, tmp_path / "ada")
    slots = make_adapter_slots(lora, ModelFacts.read(base), has_trainer=False)
    assert slots is not None
    assert (slots.names, slots.default, slots.folders) == (("ada",), "ada", {"ada": lora.path})
    assert slots.rank == 4 and slots.modules == ("q_proj", "k_proj", "v_proj")
    trained = make_adapter_slots(lora, ModelFacts.read(base), has_trainer=True)
    assert trained is not None and trained == replace(slots, folders={})


def test_weights_alone_have_no_names(tmp_path: Path) -> None:
    assert list_served_names(LORA, has_trainer=True) == ("ada", "base")
    assert list_served_names(LORA, has_trainer=False) == ()
    assert list_served_names(replace(LORA, sync="merged"), has_trainer=True) == ()
    policy = ModelFacts.read(write_model("qwen3", tmp_path))
    assert make_adapter_slots(LORA, policy, has_trainer=False) is None


def test_several_adapters_have_a_place_each_and_none_is_the_default(tmp_path: Path) -> None:
    adapters = [AdapterConfig("ada", rank=8), AdapterConfig("bob")]
    lora = replace(LORA, name="policy", adapters=adapters)
    assert list_served_names(lora, has_trainer=True) == ("ada", "bob", "base")
    policy = ModelFacts.read(write_model("qwen3", tmp_path))
    slots = make_adapter_slots(lora, policy, has_trainer=True)
    assert slots is not None
    assert (slots.names, slots.rank, slots.default) == (("ada", "bob"), 8, "base")
    run = ModelConfig(path=str(policy.path)), policy, 0
    with pytest.raises(ValueError, match=r"names 2 adapters, which take turns in mcore-rl train"):
        check_sampled_adapter(lora, *run)


def test_a_folder_that_nothing_would_read_is_refused(tmp_path: Path) -> None:
    base = write_model("qwen3", tmp_path / "base")
    lora = write_adapter(base, tmp_path / "ada")
    run = ModelConfig(path=str(base)), ModelFacts.read(base), 0
    check_sampled_adapter(lora, *run)
    check_sampled_adapter(replace(lora, path="", sync="auto"), *run)
    with pytest.raises(ValueError, match=r"train\.lora\.sync=auto: no trainer of this command"):
        check_sampled_adapter(replace(lora, sync="auto"), *run)
    with pytest.raises(ValueError, match=r"has rank 4, and train\.lora\.rank=8"):
        check_sampled_adapter(replace(lora, rank=8), *run)
