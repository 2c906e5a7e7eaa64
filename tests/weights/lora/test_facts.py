"""A checkpoint's lora.json is compared with the run: kind, scale, targets and base."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config import LoraConfig
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.facts import (
    FACTS,
    OF_CRITIC,
    AdapterFacts,
    encode_adapters,
    read_adapters,
    refuse_other_adapters,
)

QWEN = ModelFacts.read("recipes/model/qwen3_30b_a3b").config
OWN = AdapterFacts.make(LoraConfig(rank=8, alpha=16), QWEN, "a" * 64, "/models/base")


def write(folder: Path, facts: AdapterFacts) -> Path:
    (folder / FACTS).write_text(encode_adapters({"": facts}))
    return folder


def test_the_facts_come_back_from_their_file(tmp_path: Path) -> None:
    assert read_adapters(write(tmp_path, OWN)) == {"": OWN}
    refuse_other_adapters(tmp_path, {"": OWN})
    assert OWN.targets == (
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
    )
    assert OWN.experts


def test_defaults_that_are_spelled_out_are_the_same() -> None:
    spelled = LoraConfig(rank=8, alpha=16, targets=list(reversed(OWN.targets)))
    assert AdapterFacts.make(spelled, QWEN, OWN.base, OWN.base_path) == OWN


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (LoraConfig(rank=16, alpha=32), 2.0),
        (LoraConfig(rank=16, alpha=32, rslora=True), 8.0),
    ],
)
def test_the_scale_is_that_of_the_papers(config: LoraConfig, scale: float) -> None:
    assert AdapterFacts.make(config, QWEN, "", "").scale == scale


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (
            replace(OWN, rank=4),
            r"train\.lora\.rank=4, and this run has train\.lora\.rank=8: set train\.lora\.rank=4",
        ),
        (replace(OWN, alpha=8.0), r"train\.lora\.alpha=8, and this run has train\.lora\.alpha=16"),
        (replace(OWN, rslora=True), r"train\.lora\.rslora=true, and this run has .*=false"),
        (replace(OWN, targets=("q_proj",)), r"train\.lora\.targets=\[q_proj\], and this run has"),
        (replace(OWN, experts=False), r"train\.lora\.experts=false, and this run has .*=true"),
        (
            replace(OWN, base="b" * 64, base_path="/models/other"),
            "that began with /models/other has factors of another base: its weights have checksum"
            " b{16}, and those of /models/base have a{16}; name the directory",
        ),
    ],
)
def test_another_adapter_is_refused(tmp_path: Path, saved: AdapterFacts, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        refuse_other_adapters(write(tmp_path, saved), {"": OWN})
    assert str(tmp_path) in str(error.value)


def test_weights_are_no_factors_and_factors_no_weights(tmp_path: Path) -> None:
    refuse_other_adapters(tmp_path, {})
    with pytest.raises(ValueError, match=r"holds all weights.*train\.lora\.rank=8.*model\.path"):
        refuse_other_adapters(tmp_path, {"": OWN})
    with pytest.raises(ValueError, match=r"holds factors of rank 8 and no weights.*merge-lora"):
        refuse_other_adapters(write(tmp_path, OWN), {})
    with pytest.raises(ValueError, match=r"and critic\.lora\.rank=0 trains all weights"):
        refuse_other_adapters(tmp_path, {}, options=OF_CRITIC)


@pytest.mark.parametrize("damage", ["{", "[]", '{"rank": 8}', {"alpha": "16"}, {"targets": 1}])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str | dict[str, object]) -> None:
    text = (
        damage
        if isinstance(damage, str)
        else json.dumps(json.loads(encode_adapters({"": OWN})) | damage)
    )
    (tmp_path / FACTS).write_text(text)
    with pytest.raises(ValueError, match=rf"{FACTS} is damaged"):
        read_adapters(tmp_path)
