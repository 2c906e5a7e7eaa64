"""Adapters that `mcore-rl serve` cannot serve are refused before a server starts."""

import json
from pathlib import Path

import pytest
import torch

from mcore_rl.run.serving import make_slots
from mcore_rl.weights.hf.config import parse_hf_config
from mcore_rl.weights.lora.base import compute_base_sum
from mcore_rl.weights.lora.facts import AdapterFacts
from mcore_rl.weights.lora.peft_files import CONFIG, write_peft
from tests.support.tiny_models import write_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3_moe", tmp_path_factory.mktemp("model"))


def write(base: Path, folder: Path, rank: int, targets: tuple[str, ...], base_sum: str) -> Path:
    config = parse_hf_config(base)
    facts = AdapterFacts(rank, 8.0, False, targets, False, base_sum, str(base))
    shapes = facts.list_factor_shapes(config)
    write_peft(folder, facts, config, {key: torch.zeros(shape) for key, shape in shapes.items()})
    return folder


def test_slots_have_room_for_all_adapters(base: Path, tmp_path: Path) -> None:
    own = compute_base_sum(base)
    first = write(base, tmp_path / "first", 2, ("o_proj",), own)
    second = write(base, tmp_path / "second", 5, ("v_proj",), own)
    slots = make_slots([f"a={first}", f"b={second}"], base, pp=1)
    assert slots is not None
    assert (slots.names, slots.rank, slots.default) == (("a", "b"), 5, "base")
    assert slots.modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert make_slots([], base, pp=2) is None


@pytest.mark.parametrize(
    ("given", "pp", "message"),
    [
        (["{good}"], 1, "give NAME=DIR"),
        (["a={good}", "a={good}"], 1, "each name once"),
        (["base={good}"], 1, "none base"),
        (["a={good}"], 2, "--adapter with --pp=2"),
        (["a={experts}"], 1, "no factors of routed experts; merge it"),
        (["a={other}"], 1, "has factors of another base"),
        (["a={dora}"], 1, "use_dora=True"),
        (["a={nowhere}"], 1, "has no adapter_config.json"),
    ],
)
def test_what_cannot_be_served_is_refused(
    base: Path, tmp_path: Path, given: list[str], pp: int, message: str
) -> None:
    own = compute_base_sum(base)
    folders = {
        "good": write(base, tmp_path / "good", 2, ("o_proj",), own),
        "other": write(base, tmp_path / "other", 2, ("o_proj",), "ab" * 32),
        "dora": write(base, tmp_path / "dora", 2, ("o_proj",), own),
        "nowhere": tmp_path / "nowhere",
    }
    config = parse_hf_config(base)
    facts = AdapterFacts(2, 8.0, False, ("down_proj",), True, own, str(base))
    shapes = facts.list_factor_shapes(config)
    folders["experts"] = tmp_path / "experts"
    zeros = {key: torch.zeros(shape) for key, shape in shapes.items()}
    write_peft(folders["experts"], facts, config, zeros)
    changed = json.loads((folders["dora"] / CONFIG).read_text()) | {"use_dora": True}
    (folders["dora"] / CONFIG).write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=message):
        make_slots([each.format(**folders) for each in given], base, pp)
