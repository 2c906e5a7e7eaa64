"""Models and data files by their names on the Hugging Face hub: fetched, cached, or refused."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from huggingface_hub import constants

from mcore_rl.config import Config
from mcore_rl.config.tree import with_settings
from mcore_rl.run.hub import fetch_inputs
from tests.support.fake_hub import COMMITS, fake_hub

MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"weights again",
    "original/model.safetensors": b"weights again",
}
DATA = {"data/train.jsonl": b'{"prompt": []}\n'}
FETCH = """
import json, sys
from mcore_rl.config import Config, EvalSetConfig
from mcore_rl.config.tree import with_settings
from mcore_rl.run.hub import fetch_inputs
for command, settings in json.loads(sys.argv[1]):
    settings["eval.sets"] = [EvalSetConfig(**each) for each in settings.pop("eval.sets", [])]
    try:
        config = fetch_inputs(with_settings(Config(), settings), command)
    except ValueError as error:
        print(json.dumps(str(error)))
        continue
    files = [*config.data.train, *config.eval.files]
    print(json.dumps([config.model.path, config.model.revision, files]))
"""
Fetched = tuple[Path, str | None, list[str]]
"""The model's folder and revision, and the files with data."""


def fetch(
    home: Path, endpoint: str, *asked: tuple[str, Mapping[str, object]]
) -> list[Fetched | str]:
    """Return what each pair of a command and its settings fetches, or the text of its error.

    In a process of its own, because huggingface_hub reads the environment when it is imported.
    """
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint}
    environment.pop("HF_HUB_OFFLINE", None)
    argv = [sys.executable, "-c", FETCH, json.dumps(asked)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = map(json.loads, done.stdout.splitlines())
    return [each if isinstance(each, str) else (Path(each[0]), *each[1:]) for each in answers]


def expect_fetched(answer: Fetched | str) -> Fetched:
    assert not isinstance(answer, str), answer
    return answer


def test_a_hub_gives_what_a_command_reads_and_the_cache_gives_it_again(tmp_path: Path) -> None:
    settings = {
        "model.path": "me/tiny",
        "model.revision": "v2",
        "data.train": ["local.jsonl", "hf://datasets/me/sums@v2/data/train.jsonl"],
        "eval.sets": [{"name": "sums", "path": "hf://datasets/me/sums@v2/data/train.jsonl"}],
    }
    with fake_hub({"me/tiny": MODEL}, {"me/sums": DATA}) as endpoint:
        [plan] = fetch(tmp_path, endpoint, ("plan", {"model.path": "me/tiny"}))
        assert [path.name for path in expect_fetched(plan)[0].iterdir()] == ["config.json"]
        first, other, no_file = fetch(
            tmp_path,
            endpoint,
            ("train", settings),
            ("train", {"model.path": "me/other"}),
            ("train", {"data.train": ["hf://datasets/me/sums/none.jsonl"]}),
        )
    assert re.search(r"model.path=me/other: .* does not give it", str(other))
    assert "the data set me/sums has no such file" in str(no_file)
    path, revision, data = expect_fetched(first)
    names = {file.name for file in path.iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    assert path.name == COMMITS["v2"] and revision is None
    assert data[0] == "local.jsonl"
    assert Path(data[1]).read_bytes() == DATA["data/train.jsonl"]
    assert data[2:] == data[1:2], "a held-out set is fetched, too"
    [again] = fetch(tmp_path, endpoint, ("train", settings))
    assert expect_fetched(again)[0] == path, "no server answers any more"


def test_without_a_network_one_error_says_what_to_do(tmp_path: Path) -> None:
    message = (
        "model.path=me/tiny: it is not here, and the Hugging Face hub cannot be reached .*"
        "run `hf download me/tiny` and copy .* set HF_HOME"
    )
    [answer] = fetch(tmp_path, "http://127.0.0.1:9", ("train", {"model.path": "me/tiny"}))
    assert re.search(message, str(answer))


def test_a_filled_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = COMMITS["main"]
    repo = tmp_path / "models--me--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "snapshots" / commit / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config = with_settings(Config(), {"model.path": "me/tiny"})
    assert fetch_inputs(config, "plan").model.path == str(repo / "snapshots" / commit)
    critic = {"algorithm.advantage": "gae", "critic.path": "me/tiny@main"}
    assert fetch_inputs(with_settings(config, critic), "plan").critic.path.endswith(commit)


def test_a_local_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "me" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    config = with_settings(Config(), {"model.path": "me/tiny", "data.train": ["a/b.jsonl"]})
    assert fetch_inputs(config, "train") == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model.path": "/models/tiny", "model.revision": "v2"},
            "model.revision=v2 with model.path=/models/tiny, which is no id on the Hugging Face"
            " hub",
        ),
        (
            {"model.path": "me/tiny@v1", "model.revision": "v2"},
            "model.revision=v2 with model.path=me/tiny@v1: there are two revisions",
        ),
        (
            {"data.train": ["hf://me/sums/train.jsonl"]},
            "data.train: hf://me/sums/train.jsonl is no file of a data set",
        ),
    ],
)
def test_names_that_mean_nothing_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fetch_inputs(with_settings(Config(), settings), "train")
