"""Options of a search, and how its results are shown."""

import os
from pathlib import Path

import pytest

from mcore_rl.agents.environments.search_env import (
    PASSAGE,
    Searcher,
    SearchOptions,
    check_information,
    check_score,
    read_key,
    show_passages,
)
from mcore_rl.process.server_keys import SEARCH_URL
from mcore_rl.services.search.client import SearchUnavailableError
from mcore_rl.services.search.layout import Hit
from tests.services.search.test_client import ANSWER, answering

URL = "http://127.0.0.1:1/retrieve"


def test_passages_are_shown_as_search_r1_does() -> None:
    hits = [Hit({"contents": '"Paris"\nA town.\nBig.'}, 2.0), Hit({"contents": "b"}, 1.0)]
    assert show_passages(hits, PASSAGE) == "Doc 1(Title: Paris) A town.\nBig.\nDoc 2(Title: b)"
    assert show_passages(hits, "{contents}|", 3) == '"Pa|b|'
    assert show_passages([], PASSAGE) == ""


def test_a_search_is_counted(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    key.chmod(0o600)
    with answering((200, ANSWER), (200, {"result": [[]]})) as (url, asked):
        searcher = Searcher(SearchOptions(url, key_file=str(key), topk=2))
        assert searcher.show("who") == "Doc 1(Title: a) b"
        assert searcher.show("what") == ""
    assert searcher.metrics == {"searches": 2.0, "searches_empty": 1.0}
    assert asked[0]["body"]["topk"] == 2 and asked[0]["Authorization"] == "Bearer secret"


def test_a_search_that_fails_is_not_counted() -> None:
    searcher = Searcher(SearchOptions(URL, deadline_s=0.3))
    with pytest.raises(SearchUnavailableError):
        searcher.show("who")
    assert searcher.num_searches == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": "localhost"}, "for example http"),
        ({"topk": 0}, "topk is 0"),
        ({"passage_len": -1}, "passage_len -1"),
        ({"deadline_s": 0}, "deadline_s is 0"),
        ({"passage": "{nonsense}"}, "passage is '{nonsense}'.*it may have {rank}"),
        ({"passage": "{rank"}, "which cannot be filled"),
        ({"key_file": "/nonexistent/key"}, "key_file is '/nonexistent/key'"),
    ],
)
def test_senseless_options_are_refused(options: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SearchOptions(**{"url": URL, **options})


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("secret\n")
    os.chmod(path, 0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_key(str(path))


def test_texts_and_scores_are_checked() -> None:
    check_score("f1")
    check_information("<{passages}>")
    with pytest.raises(ValueError, match="one of em, f1, contains"):
        check_score("bleu")
    with pytest.raises(ValueError, match="where the results go"):
        check_information("<information>")
    with pytest.raises(ValueError, match="cannot be filled"):
        check_information("{passages} {x}")


def test_without_a_url_the_search_server_of_the_run_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SEARCH_URL, raising=False)
    with pytest.raises(ValueError, match=r"url is empty.*search.index=<folder>"):
        SearchOptions()
    with answering((200, ANSWER)) as (url, asked):
        monkeypatch.setenv(SEARCH_URL, url.replace("http://", "http://run:its_key@"))
        assert Searcher(SearchOptions(topk=2)).show("who") == "Doc 1(Title: a) b"
    assert asked[0]["Authorization"] == "Bearer its_key"
