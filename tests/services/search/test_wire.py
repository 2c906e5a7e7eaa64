"""Requests and responses of /retrieve are those of Search-R1's server."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.services.search.client import MOST_HITS, make_response, parse_request, parse_response
from mcore_rl.services.search.layout import Hit

HITS = st.builds(
    Hit,
    st.fixed_dictionaries({"id": st.text(max_size=3), "contents": st.text(max_size=9)}),
    st.floats(allow_nan=False, allow_infinity=False),
)


def test_a_request() -> None:
    asked = parse_request({"queries": ["a", "b"], "topk": 5, "return_scores": True}, 3)
    assert (asked.queries, asked.topk, asked.return_scores) == (("a", "b"), 5, True)
    for body in ({"queries": []}, {"queries": [], "topk": None, "return_scores": None}):
        assert parse_request(body, 3).topk == 3


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ([], "not a JSON object"),
        ({}, "queries is not a list"),
        ({"queries": "a"}, "queries is not a list"),
        ({"queries": [1]}, "queries is not a list"),
        ({"queries": ["a"] * 2000}, "2000 queries"),
        ({"queries": ["a" * 5000]}, "longer than 4096"),
        ({"queries": ["a"], "topk": MOST_HITS + 1}, "topk is 101"),
        ({"queries": ["a"], "topk": 0}, "topk is 0: a whole number from 1 to 100"),
        ({"queries": ["a"], "topk": False}, "topk is False"),
        ({"queries": ["a"], "topk": ""}, "topk is ''"),
        ({"queries": ["a"], "topk": True}, "topk is True"),
        ({"queries": ["a"], "topk": "3"}, "topk is '3'"),
        ({"queries": ["a"], "return_scores": 0}, "return_scores is 0"),
        ({"queries": ["a"], "return_scores": 1}, "return_scores is 1"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(body: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_request(body, 3)


@given(st.lists(st.lists(HITS, max_size=3), max_size=3))
def test_a_response_with_scores_is_read_as_it_was_made(found: list[list[Hit]]) -> None:
    body = json.loads(json.dumps(make_response(found, True)))
    assert parse_response(body, len(found)) == found


def test_a_response_without_scores_has_the_documents_alone() -> None:
    document = {"id": "1", "contents": "a\nb"}
    body = make_response([[Hit(document, 2.0)]], False)
    assert body == {"result": [[document]]}
    assert parse_response(body, 1) == [[Hit(document, 0.0)]]


@pytest.mark.parametrize("body", [{}, {"result": []}, [], {"result": "a"}])
def test_other_responses_are_refused(body: object) -> None:
    with pytest.raises(ValueError, match="no list of 1 results"):
        parse_response(body, 1)
