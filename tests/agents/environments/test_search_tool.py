"""A policy searches by calling a tool; its last answer is rewarded."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.agents.environments.adapters import check_options
from mcore_rl.agents.environments.environment import EnvironmentFailedError
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.search_env import TOOL, SearchToolOptions
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from tests.services.search.corpora import record, served

TASK = {"messages": [{"role": "user", "content": "Who taught bova?"}], "ground_truth": ["kilu"]}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory):
    path: Path = tmp_path_factory.mktemp("web") / "web.jsonl"
    with served("--replay", str(record(path, {"teacher of bova": "bova\nIt is kilu."}))) as server:
        yield server.url


def call(**arguments: Any) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps(arguments)}
    calls = [{"id": "call_0", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def play(url: str, *answers: dict[str, Any], **options: Any):
    async def run():
        given = EnvironmentOptions("search_tool", {"url": url, **options}, workers=1)
        async with EnvironmentPool(given) as pool:
            episode = await pool.open(TASK)
            steps = [await episode.step(answer) for answer in answers]
            await episode.close()
            return episode.start, steps

    return asyncio.run(run())


def test_a_call_is_answered_and_the_last_answer_rewarded(url: str) -> None:
    start, (first, last) = play(url, call(query="teacher of bova"), say("Kilu"))
    assert start.tools == [TOOL] and start.messages == TASK["messages"]
    assert first.messages[0]["role"] == "tool" and not first.done
    assert first.messages[0]["content"] == "Doc 1(Title: bova) It is kilu."
    assert last.done and last.reward == 1.0 and last.messages == []
    assert last.metrics["searches"] == 1.0 and last.metrics["right"] == 1.0
    assert last.metrics["tools/search/calls"] == 1.0


def test_an_answer_in_tags_is_taken_out_of_its_sentence(url: str) -> None:
    _, (step,) = play(url, say("It must be <answer> kilu </answer>, I think"))
    assert step.reward == 1.0
    _, (step,) = play(url, say("bova"), format_score=0.1, instructions="Search.")
    assert step.reward == 0.1 and step.metrics["right"] == 0.0


@pytest.mark.parametrize("arguments", [{}, {"query": 3}, {"query": "a", "topk": 5}])
def test_wrong_arguments_are_told(url: str, arguments: dict[str, Any]) -> None:
    _, (step,) = play(url, call(**arguments))
    assert step.messages[0]["content"] == "Error: search takes one text, query"
    assert not step.done and step.metrics["tools/failures"] == 1.0


def test_a_query_that_no_server_takes_is_told(url: str) -> None:
    _, (step,) = play(url, call(query="a" * 4097))
    told = "Error: query has 4097 characters, at most 4096 are allowed"
    assert step.messages[0]["content"] == told
    assert not step.done and step.metrics["tools/failures"] == 1.0


def test_too_many_turns_end_without_reward(url: str) -> None:
    _, (step,) = play(url, call(query="teacher of bova"), max_turns=1)
    assert step.done and step.end_reason == "max_turns" and step.reward == 0.0


def test_a_server_that_stays_away_is_not_the_policys_fault() -> None:
    with pytest.raises(EnvironmentFailedError, match=r"did not answer within 0\.4 s"):
        play("http://127.0.0.1:1/retrieve", call(query="who"), deadline_s=0.4)


def test_a_server_that_refuses_every_search_is_not_the_policys_fault(url: str) -> None:
    with pytest.raises(EnvironmentFailedError, match=r"gives no passages: .* status 404"):
        play(url.replace("/retrieve", "/elsewhere"), call(query="who"))


@pytest.mark.parametrize("options", [{"score": "bleu"}, {"max_turns": -1}, {"functions": []}])
def test_senseless_options_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        check_options("search_tool", {"url": "http://127.0.0.1:1/retrieve", **options})
    assert SearchToolOptions("http://127.0.0.1:1/retrieve").score == "em"
