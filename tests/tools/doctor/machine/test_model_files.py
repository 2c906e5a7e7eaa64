"""Model directories with planted damage; only headers are read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.tools.doctor.machine.needs import MachineNeeds, NamedModel
from mcore_rl.tools.doctor.machine.space import check_folder, check_models
from mcore_rl.weights.hf.folder import INDEX
from tests.support.machine_doctor import run_doctor

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    for number, name in enumerate(SHARDS):
        save_file({f"layer{number}": torch.ones(100, number + 1)}, tmp_path / name)
    weight_map = {"layer0": SHARDS[0], "layer1": SHARDS[1]}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def test_a_missing_shard_is_named(model: Path) -> None:
    (model / SHARDS[1]).unlink()
    run = run_doctor("--only", "model", "--model", str(model))
    [finding] = run.outcome("model")
    assert run.status == 1
    assert finding.outcome == "failed"
    assert f"the shard {SHARDS[1]} is missing" in finding.text
    assert finding.remedy


def test_a_whole_model_is_ok_with_and_without_an_index(model: Path) -> None:
    [finding] = check_folder(model, "model.path", with_weights=True)
    assert finding.outcome == "ok" and "2 files" in finding.text
    assert finding.figures["bytes"] == sum((model / name).stat().st_size for name in SHARDS)
    (model / INDEX).unlink()
    assert check_folder(model, "model.path", with_weights=True)[0].outcome == "ok"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        (SHARDS[0], cut, "its header says"),
        (SHARDS[0], lengthen, "its header says"),
        (SHARDS[0], lambda p: p.write_bytes(b"abc"), "3 bytes, too few for a header"),
        (SHARDS[0], lambda p: p.write_bytes(b"\xff" * 64), "its header alone would have"),
        (SHARDS[0], lambda p: p.write_bytes(b"\x08" + bytes(7) + b"not json"), "no JSON"),
        (
            SHARDS[0],
            lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid x\n"),
            "git lfs pull",
        ),
        (SHARDS[0], lambda p: save_file({"a": torch.ones(3)}, p), "lacks layer0"),
        (INDEX, lambda p: p.write_text("{}"), f"{INDEX} cannot be read"),
        ("config.json", lambda p: p.unlink(), "config.json is missing"),
        ("config.json", lambda p: p.write_text("{"), "config.json is no JSON"),
        ("tokenizer.json", lambda p: p.unlink(), "there is no tokenizer"),
    ],
)
def test_damage_is_named(model: Path, name: str, damage, text: str) -> None:
    damage(model / name)
    [finding] = check_folder(model, "model.path", with_weights=True)
    assert finding.outcome == "failed"
    assert text in finding.text


def test_random_weights_need_no_files(model: Path) -> None:
    for name in SHARDS:
        (model / name).unlink()
    assert check_folder(model, "model.path", with_weights=False)[0].outcome == "ok"
    assert check_folder(model, "model.path", with_weights=True)[0].outcome == "failed"


@pytest.mark.parametrize(
    ("path", "offline", "outcome"),
    [("own/name", "", "ok"), ("own/name", "1", "failed"), ("/no/such", "", "failed")],
)
def test_a_hub_model_that_is_not_in_the_cache_can_be_fetched_online_alone(
    path: str, offline: str, outcome: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    needs = MachineNeeds(models=(NamedModel("model.path", path),))
    [finding] = check_models(needs)
    assert finding.outcome == outcome
    assert f"model.path={path}" in finding.text
