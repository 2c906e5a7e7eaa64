"""Requests and responses of POST /retrieve, in the format of Search-R1's retrieval server.

request    {"queries": ["..."], "topk": 3, "return_scores": true}
response   {"result": [[{"document": {"id", "contents"}, "score": 1.5}, ...], ...]}; without scores
           each entry is the document itself
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.services.search.passages import Hit

MOST_QUERIES = 1024
MOST_HITS = 100
MOST_QUERY_LEN = 4096
"""Characters."""


@dataclass(frozen=True)
class RetrieveRequest:
    """Asks for the `topk` best passages of each query."""

    queries: tuple[str, ...]
    topk: int
    return_scores: bool


def parse_request(body: Any, default_topk: int) -> RetrieveRequest:
    """Return a request. Raises ValueError with what is wrong with it; topk null: default."""
    if not isinstance(body, dict):
        raise ValueError('the body is not a JSON object: send {"queries": ["..."], "topk": 3}')
    queries = body.get("queries")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError("queries is not a list of texts")
    if len(queries) > MOST_QUERIES:
        raise ValueError(f"{len(queries)} queries: at most {MOST_QUERIES} in one request")
    if any(len(query) > MOST_QUERY_LEN for query in queries):
        raise ValueError(f"a query is longer than {MOST_QUERY_LEN} characters: shorten it")
    topk = body.get("topk")
    topk = default_topk if topk is None else topk
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= MOST_HITS:
        raise ValueError(f"topk is {topk!r}: a whole number from 1 to {MOST_HITS}")
    return_scores = body.get("return_scores")
    return_scores = False if return_scores is None else return_scores
    if not isinstance(return_scores, bool):
        raise ValueError(f"return_scores is {return_scores!r}: true or false")
    return RetrieveRequest(tuple(queries), topk, return_scores)


def make_response(found: Sequence[Sequence[Hit]], return_scores: bool) -> dict[str, Any]:
    """Return the body of a response: for each query its documents, the best first."""
    if not return_scores:
        return {"result": [[hit.document for hit in hits] for hits in found]}
    return {
        "result": [
            [{"document": hit.document, "score": hit.score} for hit in hits] for hits in found
        ]
    }


def parse_response(body: Any, num_queries: int) -> list[list[Hit]]:
    """Return the hits of a response, with or without scores; without, they are 0.

    Raises ValueError if it is no response to so many queries.
    """
    result = body.get("result") if isinstance(body, dict) else None
    if not isinstance(result, list) or len(result) != num_queries:
        raise ValueError(f"no list of {num_queries} results, but {str(body)[:200]!r}")
    return [[_hit(entry) for entry in entries] for entries in result]


def _hit(entry: Mapping[str, Any]) -> Hit:
    document = entry.get("document", entry)
    return Hit(document, float(entry.get("score") or 0.0) if "document" in entry else 0.0)
