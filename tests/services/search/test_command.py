"""`mcore-rl search` builds, serves and asks; wrong arguments are refused with a remedy."""

import importlib.util
import json
import signal
import subprocess
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.services.search.client import SearchClient
from mcore_rl.services.search.command import METHODS
from tests.services.search.corpora import (
    command,
    environment,
    random_texts,
    record,
    served,
    write_corpus,
)


def test_build_and_query(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", random_texts(9))
    index = str(tmp_path / "index")
    assert main(["search", "build", "--corpus", str(corpus), "--out", index]) == 0
    assert "9 passages" in capsys.readouterr().out
    assert main(["search", "query", "--index", index, "title3", "--verify"]) == 0
    assert capsys.readouterr().out.startswith("1. title3 (id 3, score ")
    assert main(["search", "query", "--index", index, "title3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["document"]["id"] == "3"


def test_a_server_answers_until_it_is_told_to_stop(tmp_path: Path) -> None:
    recording = record(tmp_path / "web.jsonl", {"who": "A\nb"})
    with served("--replay", str(recording)) as server:
        hits = SearchClient(server.url).retrieve(["who"], 3)[0]
        assert hits[0].document["contents"] == "A\nb"
        done = subprocess.run(
            command("query", "--url", server.url, "who"),
            env=environment(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.stdout.startswith("1. A (id who"), done.stderr
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_ask_and_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = record(tmp_path / "web.jsonl", {"who": "A\nb"})
    words = ["search", "serve", "--replay", str(recording), "--port", "0", "--ask", "who"]
    assert main([*words, "--once"]) == 0
    out = capsys.readouterr().out
    assert "serving web at http://127.0.0.1:" in out and "1. A (id who" in out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["serve"], "give --index, or --web or --replay"),
        (["serve", "--index", "x", "--web", "serper"], "one of them"),
        (["serve", "--index", "x"], "no finished index"),
        (["serve", "--index", "x", "--once"], "--once ends after"),
        (["serve", "--index", "x", "--host", "0.0.0.0"], "give --key-file"),
        (["serve", "--web", "serper", "--record", "a", "--replay", "b"], "one of them"),
        (["serve", "--replay", "nothing.jsonl"], "there is no such file"),
        (["query", "--url", "nowhere", "who"], "for example http://"),
        (["build", "--corpus", "nothing.jsonl", "--out", "x"], "there is no such file"),
    ],
)
def test_wrong_arguments_are_refused(
    words: list[str], problem: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["search", *words]) == 2
    assert problem in capsys.readouterr().err


def test_vectors_need_an_encoder_and_faiss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", random_texts(9))
    index = str(tmp_path / "index")
    assert main(["search", "build", "--corpus", str(corpus), "--out", index]) == 0
    for method in METHODS[1:]:
        assert main(["search", "query", "--index", index, "--method", method, "who"]) == 2
        assert "was built without --encoder" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = ["search", "build", "--corpus", str(corpus), "--out", f"{index}2", "--encoder", "m"]
    assert main(words) == 2
    assert "pip install faiss-cpu" in capsys.readouterr().err
