"""Asks a search server, and asks again while the server is away or busy, until a deadline.

Requests and responses of POST /retrieve have the format of Search-R1's retrieval server:

request    {"queries": ["..."], "topk": 3, "return_scores": true}
response   {"result": [[{"document": {"id", "contents"}, "score": 1.5}, ...], ...]}; without scores
           each entry is the document itself

Needs the standard library only, as it runs in the workers of environments.
"""

import http.client
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mcore_rl.process.errors import describe_error
from mcore_rl.process.server_keys import bearer
from mcore_rl.services.search.layout import Hit

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


_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 3.0
_MOST_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 16
_BUSY = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses after which the same request may be answered."""


class SearchUnavailableError(RuntimeError):
    """A server did not answer within the deadline; the message says which, and how often."""


@dataclass(frozen=True)
class Ask:
    """A request for JSON.

    body        sent as JSON; None: the request is a GET
    deadline_s  for all attempts together
    """

    url: str
    body: Any
    headers: Mapping[str, str]
    deadline_s: float


def ask_json(ask: Ask) -> Any:
    """Return the JSON that a server answers.

    Connections that fail, and answers that say "later", are tried again with growing pauses.
    Raises SearchUnavailableError after the deadline, ValueError if the server refuses the request.
    """
    until_s = time.monotonic() + ask.deadline_s
    pause_s = _FIRST_PAUSE_S
    attempts = 0
    problem = "it was not asked"
    while (left_s := until_s - time.monotonic()) > 0:
        attempts += 1
        try:
            status, data = _exchange(ask, left_s)
        except (OSError, http.client.HTTPException) as error:
            problem = describe_error(error)
        else:
            if status == 200:
                return _parse(data, ask.url)
            problem = f"status {status}: {data[:300].decode(errors='replace')}"
            if status not in _BUSY:
                raise ValueError(f"{ask.url} refuses a request with {problem}")
        # Some chance, so that episodes that lost a server together do not come back together.
        time.sleep(max(0.0, min(pause_s * random.uniform(0.5, 1), until_s - time.monotonic())))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise SearchUnavailableError(
        f"{ask.url} did not answer within {ask.deadline_s:g} s, in {attempts} attempts; the last:"
        f" {problem}. Start the server again, or give it more time"
    )


def _exchange(ask: Ask, timeout_s: float) -> tuple[int, bytes]:
    parts = urlsplit(ask.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    until_s = time.monotonic() + timeout_s
    try:
        if ask.body is None:
            connection.request("GET", target, headers=dict(ask.headers))
        else:
            headers = {"Content-Type": "application/json", **ask.headers}
            connection.request("POST", target, json.dumps(ask.body).encode(), headers)
        response = connection.getresponse()
        data = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):  # read() would wait for all of them
            data += chunk
            if len(data) > _MOST_BYTES:
                raise ValueError(f"{ask.url} answers with more than {_MOST_BYTES} bytes")
            if time.monotonic() > until_s:
                raise TimeoutError("the answer did not end in time")
        if response.length:
            raise http.client.IncompleteRead(bytes(data[:100]), response.length)
        return response.status, bytes(data)
    finally:
        connection.close()


def _parse(data: bytes, url: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{url} answers with what is not JSON: {data[:200]!r}") from error


@dataclass(frozen=True)
class SearchClient:
    """A search server. Threads may share it.

    url         of its /retrieve
    key         sent as a bearer token; empty: none
    deadline_s  for one call, with all its attempts
    """

    url: str
    key: str = ""
    deadline_s: float = 30.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is {self.url!r}: for example http://127.0.0.1:8000/retrieve")
        if not self.deadline_s > 0:
            raise ValueError(f"deadline_s is {self.deadline_s}: more than 0 seconds")

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return for each query its hits, the best first.

        Raises SearchUnavailableError after the deadline, ValueError if the server refuses.
        """
        body = {"queries": list(queries), "topk": topk, "return_scores": True}
        answer = ask_json(Ask(self.url, body, bearer(self.key), self.deadline_s))
        try:
            return parse_response(answer, len(queries))
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{self.url} answers otherwise than /retrieve does: {error}") from None
