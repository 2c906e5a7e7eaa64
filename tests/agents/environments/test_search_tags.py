"""A policy searches by tags, is told what was found, and is rewarded for its answer."""

import asyncio
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.agents.chat.chat_format import ChatFormat
from mcore_rl.agents.environments.adapters import check_options
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.search_env import (
    INSTRUCTIONS,
    Action,
    SearchTagsEnvironment,
    SearchTagsOptions,
    find_action,
)
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from mcore_rl.agents.recorder import EpisodeLimits
from mcore_rl.agents.runner import EpisodeRunner, RunnerOptions
from mcore_rl.types import Prompt, Sample
from tests.services.search.corpora import Served, record, served
from tests.support.chat_templates import make_tokenizer, stop_ids
from tests.support.stand_in_policy import PlainParser, StandInPolicy

TASK = {
    "messages": [{"role": "user", "content": "Who taught bova?"}],
    "ground_truth": {"target": ["kilu", "the Kilu"]},
}
FOUND = "bova\nThe teacher of bova is kilu."


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("web") / "web.jsonl", {"teacher of bova": FOUND})


@pytest.fixture(scope="module")
def url(recording: Path):
    with served("--replay", str(recording)) as server:
        yield server.url


def play(url: str, *texts: str, **options: Any) -> list[Any]:
    environment = SearchTagsEnvironment(SearchTagsOptions(url, **options))
    environment.reset(TASK)
    steps = [environment.step({"role": "assistant", "content": text}) for text in texts]
    environment.close()
    return steps


def test_a_search_and_an_answer(url: str) -> None:
    start = SearchTagsEnvironment(SearchTagsOptions(url)).reset(TASK)
    assert start.messages[0]["content"] == f"Who taught bova?\n\n{INSTRUCTIONS}"
    first, last = play(
        url, "I look. <search> teacher of bova </search>", "So: <answer> The kilu. </answer>"
    )
    told = "\n\n<information>Doc 1(Title: bova) The teacher of bova is kilu.</information>\n\n"
    assert first.messages == [{"role": "user", "content": told}]
    assert not first.done and first.reward == 0.0
    assert last.done and last.reward == 1.0 and last.messages == [] and last.end_reason == ""
    assert last.metrics == {
        "searches": 1.0, "searches_empty": 0.0, "invalid": 0.0, "rests": 0.0, "right": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "options", "rewards", "end"),
    [
        (["<answer>bova</answer>"], {}, [0.0], ""),
        (["<answer>bova</answer>"], {"format_score": 0.1}, [0.1], ""),
        (["<answer>kilu or bova</answer>"], {"score": "f1"}, [0.5], ""),
        (["<answer>kilu or bova</answer>"], {"score": "contains"}, [1.0], ""),
        (["kilu", "<answer>kilu</answer>"], {"invalid_penalty": 0.2}, [-0.2, 1.0], ""),
        (
            [f"<search>{'a' * 4097}</search>", "<answer>kilu</answer>"],
            {"invalid_penalty": 0.2},
            [-0.2, 1.0],
            "",
        ),
        (["<answer>kilu</answer> sure"], {"rest_penalty": 0.1}, [0.9], ""),
        (["kilu", "kilu"], {"max_invalid": 1, "invalid_penalty": 0.1}, [-0.1, -0.1], "parse_error"),
        (["<search>teacher of bova</search>"] * 2, {"max_searches": 1}, [0.0, 0.0], "max_turns"),
    ],
)
def test_what_an_episode_is_worth(url: str, texts, options, rewards, end: str) -> None:
    steps = play(url, *texts, **options)
    assert [step.reward for step in steps] == pytest.approx(rewards)
    assert steps[-1].done and steps[-1].end_reason == end
    assert not any(step.done for step in steps[:-1])


def test_results_can_be_withheld_and_said_otherwise(url: str) -> None:
    search = "<search>teacher of bova</search>"
    (step,) = play(url, search, shows_passages=False, information="<i>{passages}</i>", role="tool")
    assert step.messages == [{"role": "tool", "content": "<i></i>"}]
    assert play(url, "what?", told_invalid="?")[0].messages[0]["content"] == "?"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<search> a </search>", Action("search", "a")),
        ("x <answer>\nb\n</answer> \n", Action("answer", "b")),
        ("<search>a</search><answer>b</answer>", Action("search", "a", True)),
        ("<search>a</answer> <answer>b</answer>", Action("answer", "b")),
        ("<search>a", Action("")),
        ("", Action("")),
        (f"<search> {'a' * 4096} </search>", Action("search", "a" * 4096)),
        (f"<search>{'a' * 4097}</search> b", Action("")),
        (f"<answer>{'a' * 4097}</answer>", Action("answer", "a" * 4097)),
    ],
)
def test_the_first_pair_of_tags_is_the_action(text: str, action: Action) -> None:
    assert find_action(text) == action


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"score": "bleu"}, "score is 'bleu'"),
        ({"information": "none"}, "where the results go"),
        ({"role": "system"}, "role is 'system'"),
        ({"max_searches": -1}, "max_searches is -1"),
        ({"invalid_penalty": -1}, "invalid_penalty is -1"),
        ({"nonsense": 1}, "does not read the options nonsense"),
        ({"url": "nowhere"}, "for example http"),
    ],
)
def test_senseless_options_are_refused(options: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_options("search_tags", {"url": "http://127.0.0.1:1/retrieve", **options})


TOKENIZER: Any = make_tokenizer("qwen3")
TALK = ("<search>teacher of bova</search>", "<answer>kilu</answer>")


def play_episode(url: str, texts=TALK, **options: Any) -> tuple[Sample, StandInPolicy]:
    """Play in a real worker, by real chat template and recorder."""

    def decode(ids) -> str:
        return TOKENIZER.decode(list(ids), skip_special_tokens=True)

    encode = partial(TOKENIZER.encode, add_special_tokens=False)
    policy = StandInPolicy(texts, encode, stop_ids("qwen3")[0])
    chat = ChatFormat(TOKENIZER, stop_ids("qwen3"), reasoning="template", template_options={})
    limits = RunnerOptions(EpisodeLimits(50, 50, 10_000), 120.0, 2)
    prompt = Prompt(7, (1, 2), tuple(TASK["messages"]), "unit", TASK["ground_truth"])

    async def run() -> Sample:
        kind = EnvironmentOptions("search_tags", {"url": url, **options}, workers=1)
        async with EnvironmentPool(kind) as pool:
            runner = EpisodeRunner("search_tags", pool, chat, PlainParser(decode), decode, limits)
            return await runner.run(prompt, 0, 11, policy)

    return asyncio.run(run()), policy


def test_what_was_found_is_context_and_what_was_said_is_trained(url: str) -> None:
    sample, policy = play_episode(url)
    assert sample.finish_reason == "done"
    episode = sample.episode
    assert episode is not None and episode.reward == 1.0 and len(episode.rows) == 1
    row = episode.rows[0]
    said = [token for answer in policy.answers for token in answer]
    assert row.token_ids[row.is_trained].tolist() == said == list(sample.response_ids)
    found = TOKENIZER.encode("The teacher of bova is kilu", add_special_tokens=False)
    start = place_of(found, row.token_ids.tolist())
    assert not row.is_trained[start : start + len(found)].any()
    assert not row.logprobs[start : start + len(found)].any()
    assert place_of(found, list(policy.asked[1].context_ids)) == start


def place_of(part: list[int], ids: list[int]) -> int:
    places = [i for i in range(len(ids)) if ids[i : i + len(part)] == part]
    assert len(places) == 1
    return places[0]


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again_costs_no_episode(recording: Path) -> None:
    """Kill -9 while nobody looks: the search waits, with back-off, until the server is back."""
    server = Served("--replay", str(recording))
    server.start()
    server.wait()
    server.kill()
    again = threading.Timer(3.0, server.start)
    again.start()
    began_s = time.monotonic()
    try:
        sample, _ = play_episode(server.url, deadline_s=100)
    finally:
        again.join()
        server.kill()
    assert time.monotonic() - began_s > 3
    assert sample.finish_reason == "done"
    assert sample.episode is not None and sample.episode.reward == 1.0
    assert sample.episode.metrics["searches"] == 1.0


def test_a_server_that_stays_away_ends_its_episode_only(recording: Path) -> None:
    server = Served("--replay", str(recording))
    sample, _ = play_episode(server.url, deadline_s=0.5)
    assert sample.finish_reason == "env_error"
    assert sample.episode is not None and "did not answer within 0.5 s" in sample.episode.detail
