"""Adapters in PEFT's format: what is written, what is read, and what is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_rl.config import LoraConfig
from mcore_rl.weights.hf.config import read_hf_config
from mcore_rl.weights.lora.facts import AdapterFacts
from mcore_rl.weights.lora.peft_files import (
    CONFIG,
    WEIGHTS,
    check_start,
    find_lost_in_transformers,
    list_peft_targets,
    read_peft,
    write_peft,
)
from mcore_rl.weights.lora.targets import list_targets
from mcore_rl.weights.models.table import HfConfig
from tests.support.tiny_training import write_hf_model

RANK = 4
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
PREFIX = "base_model.model.model.layers.2.self_attn.q_proj"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> HfConfig:
    """Four layers, the second dense, the others of eight experts."""
    return read_hf_config(write_hf_model(tmp_path_factory.mktemp("peft") / "model"))


def make(config: HfConfig, **options: Any) -> tuple[AdapterFacts, dict[str, Tensor]]:
    facts = AdapterFacts.make(LoraConfig(rank=RANK, alpha=6, **options), config, "a" * 64, "/base")
    shapes = facts.list_factor_shapes(config)
    return facts, {key: torch.randn(shape) for key, shape in shapes.items()}


def test_factors_come_back_under_pefts_names(config: HfConfig, tmp_path: Path) -> None:
    facts, factors = make(config)
    write_peft(tmp_path, facts, config, factors)
    written = load_file(tmp_path / WEIGHTS)
    assert len(written) == len(factors)
    q_proj = "model.layers.2.self_attn.q_proj.weight"
    assert torch.equal(written[f"{PREFIX}.lora_A.weight"], factors[f"{q_proj}.A"])
    assert torch.equal(written[f"{PREFIX}.lora_B.weight"], factors[f"{q_proj}.B"])
    assert "base_model.model.model.layers.3.mlp.experts.7.up_proj.lora_B.weight" in written
    settings = json.loads((tmp_path / CONFIG).read_text())
    assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (RANK, 6, False)
    assert settings["base_model_name_or_path"] == "/base"
    read = read_peft(tmp_path)
    assert (read.rank, read.alpha, read.scale, read.base) == (RANK, 6.0, 1.5, "a" * 64)
    with read.open() as file:
        for key, factor in factors.items():
            assert torch.equal(file.read(key), factor), key
    check_start(read, facts, config)


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        ({}, [*ATTENTION, *MLP]),
        ({"targets": ["o_proj"]}, ["o_proj"]),
        (
            {"experts": False},
            [*ATTENTION, *(f"model.layers.1.mlp.{module}" for module in MLP)],
        ),
    ],
)
def test_target_modules_stand_for_what_is_adapted(
    config: HfConfig, options: dict[str, Any], targets: list[str]
) -> None:
    """A module is adapted whose name ends with a target, by PEFT's check_target_module_exists."""
    facts, _ = make(config, **options)
    names = list_targets(config, facts.targets, facts.experts)
    found = list_peft_targets(config, names)
    assert sorted(found) == sorted(targets)
    adapted = [
        name
        for name in list_targets(config, [])
        if any(f".{name.removesuffix('.weight')}".endswith(f".{target}") for target in found)
    ]
    assert sorted(adapted) == sorted(names)


def test_what_transformers_loses_is_known(config: HfConfig) -> None:
    names = list_targets(config, [])
    lost = find_lost_in_transformers(config, names)
    assert lost == [name for name in names if name.startswith("model.layers.1.mlp.")]


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{PREFIX}.lora_A.weight"], tensors[f"{PREFIX}.lora_B.weight"]


def halve(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{PREFIX}.lora_B.weight"]


def transpose(tensors: dict[str, Tensor]) -> None:
    name = f"{PREFIX}.lora_B.weight"
    tensors[name] = tensors[name].T.contiguous()


def double(tensors: dict[str, Tensor]) -> None:
    name = f"{PREFIX}.lora_A.weight"
    tensors[name] = torch.cat([tensors[name]] * 2)


def rename(tensors: dict[str, Tensor]) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop, "lacks the factors of 1 of 91 matrices, the first is 'model.layers.2.self_attn.q"),
        (halve, "has factor A of 'model.layers.2.self_attn.q_proj.weight' and no factor B"),
        (transpose, "factor B of .* has shape .4, 64., not .64, 4.: it lies transposed"),
        (double, "factor A of .* has shape .8, 64., not .4, 64.: it counts 2 times"),
        (rename, "tensor 'base_model.model.lm_head.weight' is no factor of a linear layer"),
    ],
)
def test_a_spoiled_adapter_is_refused(
    config: HfConfig,
    tmp_path: Path,
    spoil: Callable[[dict[str, Tensor]], None],
    message: str,
) -> None:
    facts, factors = make(config)
    write_peft(tmp_path, facts, config, factors)
    tensors = load_file(tmp_path / WEIGHTS)
    spoil(tensors)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=message):
        check_start(read_peft(tmp_path), facts, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 12.0}, r"has alpha 6, and train\.lora\.alpha=12\.0: set train\.lora\.alpha=6"),
        ({"rank": 8}, r"has rank 4, and train\.lora\.rank=8: set train\.lora\.rank=4"),
        ({"rslora": True}, r"rslora 0, and train\.lora\.rslora=true: set .*rslora=false"),
        ({"targets": ("q_proj",)}, r"has factors of .*, which is not among the adapted matrices"),
        ({"base": "b" * 64}, r"has factors of another base: .* checksum a{16}.*/base have b{16}"),
    ],
)
def test_a_run_starts_from_its_own_adapter_alone(
    config: HfConfig, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    facts, factors = make(config)
    write_peft(tmp_path, facts, config, factors)
    with pytest.raises(ValueError, match=message):
        check_start(read_peft(tmp_path), replace(facts, **change), config)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"use_dora": True}, "use_dora=True: only plain factors of linear layers are read"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern={'q_proj': 8}"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"r": "4"}, "is damaged"),
    ],
)
def test_other_kinds_of_adapters_are_refused(
    config: HfConfig, tmp_path: Path, setting: dict[str, Any], message: str
) -> None:
    facts, factors = make(config, targets=["q_proj"])
    write_peft(tmp_path, facts, config, factors)
    settings = json.loads((tmp_path / CONFIG).read_text()) | setting
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        read_peft(tmp_path)


def test_a_folder_without_files_is_refused(config: HfConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no adapter_config\.json: name a folder"):
        read_peft(tmp_path)
    facts, factors = make(config, targets=["q_proj"])
    write_peft(tmp_path, facts, config, factors)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"and no adapter_model\.safetensors: half an adapter"):
        read_peft(tmp_path)
