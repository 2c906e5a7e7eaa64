"""Ten secrets in a recipe, and what a run writes of it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from mcore_rl.config import Config, LogConfig
from mcore_rl.config.recipe import load_recipe
from mcore_rl.config.secrets import dump_config, remember_secrets
from mcore_rl.config.tree import flatten
from mcore_rl.logs.logger import MetricsLogger
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.logs.trackers.open import open_trackers
from mcore_rl.logs.trackers.tracker import TrackedRun
from mcore_rl.process import redaction

PLANTED = [f"planted-{i}-secret" for i in range(10)]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", set())


MLFLOW = "https://me:${oc.env:TRACKER_PASSWORD}@mlflow.example/"
RECIPE = f"""
defaults: [tiny_moe_grpo, _self_]
log: {{wandb_project: "${{oc.env:PLAIN}}"}}
judge: {{url: "${{oc.env:JUDGE_ADDRESS}}"}}
reward_model: {{url: "http://rm:{PLANTED[4]}@10.0.0.2/v1"}}
teacher: {{url: "http://10.0.0.3/v1?access_token={PLANTED[5]}&a=1"}}
data:
  train: ["https://h/train.parquet?sig={PLANTED[9]}"]
  cache_dir: "s3://me:{PLANTED[8]}@bucket/cache"
reward:
  judge:
    request:
      metadata: {{note: "${{oc.env:NESTED}}"}}
      api_key: {PLANTED[6]}
      headers: {{authToken: {PLANTED[7]}}}
      max_tokens: 7
      tokenizer: plain
"""


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    """A recipe with a secret in ten places."""
    monkeypatch.setenv("TRACKER_PASSWORD", PLANTED[0])
    monkeypatch.setenv("JUDGE_ADDRESS", f"http://judge:{PLANTED[1]}@10.0.0.1:80/v1")
    monkeypatch.setenv("PLAIN", PLANTED[2])
    monkeypatch.setenv("NESTED", PLANTED[3])
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE)
    return load_recipe(str(recipe), [f"log.mlflow_uri={MLFLOW}"])


def refuse_planted(text: str) -> None:
    assert [secret for secret in PLANTED if secret in text] == []


def test_the_run_itself_has_the_values(config: Config) -> None:
    text = str(config)
    assert [secret for secret in PLANTED if secret not in text] == []


def test_the_dump_configuration_has_none_of_them_and_all_else(config: Config) -> None:
    written = dump_config(config)
    refuse_planted(json.dumps(written))
    assert written["judge"]["url"] == "${oc.env:JUDGE_ADDRESS}"
    assert written["log"]["mlflow_uri"].startswith("https://me:${oc.env:TRACKER_PASSWORD}@")
    assert written["reward_model"]["url"] == "http://***@10.0.0.2/v1"
    assert written["teacher"]["url"] == "http://10.0.0.3/v1?access_token=***&a=1"
    request = written["reward"]["judge"]["request"]
    assert (request["api_key"], request["headers"]) == ("***", {"authToken": "***"})
    assert (request["max_tokens"], request["tokenizer"]) == (7, "plain")
    plain = OmegaConf.to_container(OmegaConf.structured(Config()))
    assert dump_config(Config()) == plain


def test_folder_trackers_and_logs_have_none_of_them(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    class Listener:
        def __init__(self, run: TrackedRun, target: str) -> None:
            told.append(flatten(run.config))

        def close(self, failed: bool) -> None: ...

    monkeypatch.setattr("mcore_rl.logs.trackers.open.MLflow", Listener)
    monkeypatch.setattr("mcore_rl.logs.trackers.open.WandB", Listener)
    folder = RunFolder(tmp_path / "run")
    package = logging.getLogger("mcore_rl")
    before = list(package.handlers)
    try:
        folder.prepare(dump_config(config), resume=True)
        log = logging.getLogger("mcore_rl.tests")
        log.warning("judge at %s does not answer", config.judge.url)
        log.warning("%s", config)
        try:
            raise ValueError(f"{config.teacher.url}: no answer; {config.reward.judge.request}")
        except ValueError:
            log.exception("a request failed")
        options = LogConfig(tensorboard=False, wandb_project="p", mlflow_uri="u")
        run = TrackedRun(folder.path, None, options.tracking, dump_config(config))
        with MetricsLogger(folder.path, console=False, trackers=open_trackers(options, run)):
            pass
    finally:
        for handler in package.handlers[:]:
            if handler not in before:
                package.removeHandler(handler)
                handler.close()
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert {"config.yaml", "controller.log"} <= {path.name for path in files}
    for path in files:
        refuse_planted(path.read_text())
    assert len(told) == 2
    refuse_planted(str(told))


def test_the_written_file_can_be_run_again(config: Config, tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").prepare(dump_config(config), resume=True)
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert yaml.safe_load(text)["run"]["steps"] == config.run.steps
    again = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert OmegaConf.to_container(again, resolve=True)["judge"]["url"] == config.judge.url  # type: ignore[index,call-overload]


def test_a_group_taken_from_elsewhere_is_hidden_where_it_has_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_TOKEN", PLANTED[0])
    tree = OmegaConf.create(
        {"judge": {"request": "${reward}"}, "reward": {"a": "x ${oc.env:SOME_TOKEN}", "b": 1}}
    )
    remember_secrets(tree)
    assert redaction.redact(f"is {PLANTED[0]}") == "is ***"
