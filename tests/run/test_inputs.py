"""Model directories and run folders are checked before a process is started."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.checks.inputs import check_no_trainer
from mcore_rl.config import AlgorithmConfig, ModelConfig, RolloutConfig
from mcore_rl.run.inputs import (
    check_critic,
    check_engines_load,
    open_policy,
    warn_of_cut_distribution,
)
from mcore_rl.weights.hf.config import ModelFacts
from tests.data.test_tokenizer import write_tokenizer_that_is_code


def open_model(model: ModelConfig, run_dir: Path) -> Any:
    return open_policy(model, AlgorithmConfig(), str(run_dir), {"data.train": ["x.jsonl"]})


def test_a_tokenizer_that_is_code_beside_the_model_is_run_if_trusted(tmp_path: Path) -> None:
    shutil.copy("recipes/model/kimi_k2/config.json", tmp_path)
    with pytest.raises(ValueError, match=r"model.path=.*no tokenizer there"):
        open_model(ModelConfig(str(tmp_path), init="random"), tmp_path / "run")
    write_tokenizer_that_is_code(tmp_path)
    distrusted = ModelConfig(str(tmp_path), init="random")
    with pytest.raises(ValueError, match=r"auto_map.*set model.trust_remote_code=true"):
        open_model(distrusted, tmp_path / "run")
    trusted = ModelConfig(str(tmp_path), init="random", trust_remote_code=True)
    assert open_model(trusted, tmp_path / "run")[1].was_run


def test_a_cut_distribution_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_cut_distribution(RolloutConfig())
        assert not caplog.records
        warn_of_cut_distribution(RolloutConfig(top_p=0.9))
        warn_of_cut_distribution(RolloutConfig(top_k=20))
    first, second = caplog.messages
    assert first.startswith("rollout.top_p=0.9 and rollout.top_k=-1 cut the distribution")
    assert second.startswith("rollout.top_p=1 and rollout.top_k=20 cut")


def test_an_evaluation_has_no_ranks_that_bring_weights() -> None:
    plain = ModelFacts(Path("hf"), {})
    check_no_trainer(RolloutConfig())
    check_engines_load(plain)
    rollout = RolloutConfig(quantization="fp8")
    with pytest.raises(ValueError, match=r"rollout.quantization=fp8: trainer ranks quantize"):
        check_no_trainer(rollout)
    for packing, name in (("int4", "INT4"), ("fp8", "FP8")):
        with pytest.raises(ValueError, match=rf"model.path=hf has {name} weights: .* dequantize"):
            check_engines_load(replace(plain, packing=packing))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"image_token_id": 7}, "its placeholder of images is 7, the policy's"),
        ({"patch_size": 16}, "its patch size is 16, the policy's 14, for which"),
        ({"temporal_patch_size": 1}, "its number of frames in a patch is 1, the policy's 2"),
    ],
    ids=["same", "placeholder", "patch", "frames"],
)
def test_a_critic_reads_the_images_that_are_made_for_the_policy(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    folder = Path("recipes/model/qwen2_5_vl_7b")
    policy = ModelFacts.read(folder)
    other = json.loads((folder / "config.json").read_text())
    other.update({key: value for key, value in changes.items() if key in other})
    other["vision_config"].update({k: v for k, v in changes.items() if k not in other})
    (tmp_path / "config.json").write_text(json.dumps(other))
    if not message:
        check_critic(str(tmp_path), "", policy)
        return
    with pytest.raises(ValueError, match=rf"critic.path=.*: {message}"):
        check_critic(str(tmp_path), "", policy)


def test_a_critic_of_text_needs_the_vocabulary_alone(tmp_path: Path) -> None:
    policy = ModelFacts.read("recipes/model/qwen2_5_vl_7b")
    text = json.loads(Path("recipes/model/qwen3_30b_a3b/config.json").read_text())
    text["vocab_size"] = policy.vocab_size
    (tmp_path / "config.json").write_text(json.dumps(text))
    check_critic(str(tmp_path), "", policy)
