"""Model directories and run folders are checked before a process is started."""

import logging
import os
import shutil
from pathlib import Path

import pytest

from mcore_rl.config import Config, DataConfig, ModelConfig, RolloutConfig, RunConfig
from mcore_rl.run.inputs import (
    check_no_trainer,
    check_run_dir,
    open_policy,
    warn_of_cut_distribution,
)
from tests.data.test_tokenizer import write_tokenizer_that_is_code


def config_of(model: ModelConfig, run_dir: Path) -> Config:
    run = RunConfig(dir=str(run_dir))
    return Config(model=model, run=run, data=DataConfig(train=["x.jsonl"]))


def test_a_tokenizer_that_is_code_beside_the_model_is_run_if_trusted(tmp_path: Path) -> None:
    shutil.copy("recipes/model/kimi_k2/config.json", tmp_path)
    with pytest.raises(ValueError, match=r"model.path=.*no tokenizer there"):
        open_policy(config_of(ModelConfig(str(tmp_path), init="random"), tmp_path / "run"))
    write_tokenizer_that_is_code(tmp_path)
    distrusted = ModelConfig(str(tmp_path), init="random")
    with pytest.raises(ValueError, match=r"auto_map.*set model.trust_remote_code=true"):
        open_policy(config_of(distrusted, tmp_path / "run"), "data.train")
    trusted = ModelConfig(str(tmp_path), init="random", trust_remote_code=True)
    assert open_policy(config_of(trusted, tmp_path / "run"), "data.train")[1].was_run


def test_a_run_folder_must_be_one_that_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_run_dir(str(tmp_path / "new" / "run"))
    monkeypatch.chdir(tmp_path)
    check_run_dir("relative/run")
    (tmp_path / "file").write_text("")
    for run_dir in ("file", "file/run"):
        with pytest.raises(ValueError, match=rf"run.dir={run_dir}: .*/file is not a folder"):
            check_run_dir(run_dir)
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_folder_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ValueError, match=r"run.dir=.*: no permission to write to .*/closed"):
        check_run_dir(str(tmp_path / "closed" / "run"))


def test_a_cut_distribution_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_cut_distribution(RolloutConfig())
        assert not caplog.records
        warn_of_cut_distribution(RolloutConfig(top_p=0.9))
        warn_of_cut_distribution(RolloutConfig(top_k=20))
    first, second = caplog.messages
    assert first.startswith("rollout.top_p=0.9 and rollout.top_k=-1 cut the distribution")
    assert second.startswith("rollout.top_p=1 and rollout.top_k=20 cut")


def test_an_evaluation_has_no_ranks_that_quantize() -> None:
    rollout = RolloutConfig(quantization="fp8")
    with pytest.raises(ValueError, match=r"rollout.quantization=fp8: trainer ranks quantize"):
        check_no_trainer(Config(model=ModelConfig(dtype="bfloat16"), rollout=rollout))
