"""A web search asks a service as it wants to be asked, or a recording."""

from contextlib import closing
from pathlib import Path

import pytest

from mcore_rl.services.search.client import SearchUnavailableError
from mcore_rl.services.search.replay import MissingRecordingError, Recording, WebOptions, WebSearch
from tests.services.search.test_client import answering

SERPER = {
    "organic": [
        {"title": "A", "snippet": "about a", "link": "http://a"},
        {"title": "B", "link": "http://b"},
        {"title": "C", "snippet": "about c"},
    ]
}


def test_a_query_is_posted_with_the_key() -> None:
    with answering((200, SERPER)) as (url, asked):
        web = WebSearch(WebOptions(url=url, key="k", fields={"gl": "us"}), None)
        hits = web.retrieve(["who"], 2)[0]
    assert [hit.document for hit in hits] == [
        {"id": "http://a", "contents": '"A"\nabout a'},
        {"id": "http://b", "contents": '"B"\n'},
    ]
    assert [hit.score for hit in hits] == [1.0, 0.5]
    assert asked[0]["body"] == {"q": "who", "gl": "us", "num": 2} and asked[0]["X-API-KEY"] == "k"


def test_another_service_is_asked_by_get_and_read_where_its_results_lie() -> None:
    answer = {"data": {"items": [{"name": "A", "body": "b", "url": "u"}]}}
    with answering((200, answer)) as (url, asked):
        options = WebOptions(
            f"{url}?engine=x", "", method="GET", query_field="query", num_field="",
            results="data.items", title="name", text="body", link="url",
        )  # fmt: skip
        hits = WebSearch(options, None).retrieve(["who is"], 3)[0]
    assert hits[0].document == {"id": "u", "contents": '"A"\nb'}
    assert asked[0]["path"] == "/retrieve?engine=x&query=who+is"


def test_a_recorded_run_is_repeated_without_the_service(tmp_path: Path) -> None:
    path = tmp_path / "web.jsonl"
    with answering((200, SERPER)) as (url, asked), closing(Recording(path, "record")) as recording:
        web = WebSearch(WebOptions(url=url), recording)
        first = web.retrieve(["who", "what", "who"], 3)
    assert len(asked) == 2
    with closing(Recording(path, "replay")) as replay:
        web = WebSearch(WebOptions(url=url, deadline_s=1), replay)
        assert web.retrieve(["who", "what", "who"], 3) == first
        with pytest.raises(MissingRecordingError, match="query 'else'"):
            web.retrieve(["else"], 3)


def test_no_results_are_none_and_another_form_is_refused() -> None:
    with answering((200, {"credits": 1})) as (url, _):
        assert WebSearch(WebOptions(url=url), None).retrieve(["who"], 3) == [[]]
        with pytest.raises(ValueError, match=r"without a list at 'data\.items'"):
            WebSearch(WebOptions(url=url, results="data.items"), None).retrieve(["who"], 3)


def test_a_service_that_stays_busy_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked at once and after 0.1, 0.3 and 0.7 s, with time to answer each time."""
    monkeypatch.setattr("mcore_rl.services.search.client.random.uniform", lambda low, high: high)
    with (
        answering((429, {})) as (url, asked),
        closing(Recording(tmp_path / "r", "record")) as recording,
    ):
        with pytest.raises(SearchUnavailableError, match="status 429"):
            WebSearch(WebOptions(url=url, deadline_s=1.5), recording).retrieve(["who"], 3)
        assert len(asked) > 1 and len(recording) == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"method": "PUT"}, "PUT"), ({"url": "serper"}, "serper"), ({"deadline_s": 0}, "more than 0")],
)
def test_senseless_options_are_refused(options: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        WebOptions(**options)
