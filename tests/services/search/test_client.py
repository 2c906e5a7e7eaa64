"""A client asks again while a server is away or busy, until its deadline; refusals end at once."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mcore_rl.process.network import find_free_port
from mcore_rl.services.search.client import Ask, SearchClient, SearchUnavailableError, ask_json
from mcore_rl.services.search.layout import Hit

ANSWER = {"result": [[{"document": {"id": 1, "contents": "a\nb"}, "score": 2.0}]]}


@contextmanager
def answering(*answers: tuple[int, object], port: int = 0) -> Iterator[tuple[str, list[dict]]]:
    """Yield (URL, requests so far) of a server that gives these (status, body), the last forever.

    A status of 0 closes the connection without an answer; bytes are sent as they are.
    """
    asked: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.give({"body": json.loads(body), **self.headers})

        def do_GET(self) -> None:
            self.give({"path": self.path, **self.headers})

        def give(self, request: dict) -> None:
            status, body = answers[min(len(asked), len(answers) - 1)]
            asked.append(request)
            if not status:
                self.close_connection = True
                return
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/retrieve", asked
    finally:
        server.shutdown()
        server.server_close()


def test_hits_come_with_scores_and_the_key_is_sent() -> None:
    with answering((200, ANSWER)) as (url, asked):
        hits = SearchClient(url, "secret").retrieve(["who"], 3)
    assert hits == [[Hit({"id": 1, "contents": "a\nb"}, 2.0)]]
    assert asked[0]["body"] == {"queries": ["who"], "topk": 3, "return_scores": True}
    assert asked[0]["Authorization"] == "Bearer secret"


def test_a_busy_or_broken_server_is_asked_again() -> None:
    troubles = ((429, {}), (503, {}), (0, {}), (500, {}), (200, ANSWER))
    with answering(*troubles) as (url, asked):
        assert SearchClient(url).retrieve(["who"], 1)[0][0].score == 2.0
    assert len(asked) == 5


def test_a_server_that_comes_back_is_found() -> None:
    port = find_free_port("127.0.0.1")
    found: list[object] = []
    client = SearchClient(f"http://127.0.0.1:{port}/retrieve", deadline_s=60)
    thread = threading.Thread(target=lambda: found.append(client.retrieve(["who"], 1)))
    thread.start()
    time.sleep(0.5)
    assert not found
    with answering((200, ANSWER), port=port):
        thread.join(60)
    assert found


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_is_not_tried_again(status: int) -> None:
    problem = f"refuses a request with status {status}: .*no"
    with answering((status, {"error": "no"})) as (url, asked):
        client = SearchClient(url)
        with pytest.raises(ValueError, match=problem):
            client.retrieve(["who"], 1)
    assert len(asked) == 1


def test_a_deadline_names_server_attempts_and_reason() -> None:
    port = find_free_port("127.0.0.1")
    client = SearchClient(f"http://127.0.0.1:{port}/retrieve", deadline_s=0.6)
    began_s = time.monotonic()
    with pytest.raises(
        SearchUnavailableError, match=rf":{port}/retrieve did not answer within 0.6"
    ):
        client.retrieve(["who"], 1)
    assert time.monotonic() - began_s < 30


def test_an_answer_that_trickles_is_given_up() -> None:
    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b" ")
                time.sleep(0.1)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        began_s = time.monotonic()
        with pytest.raises(SearchUnavailableError, match=r"within 0\.5 s"):
            ask_json(Ask(url, None, {}, 0.5))
        assert time.monotonic() - began_s < 8
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("body", [b"<html>", {"result": []}, {"result": [[3]]}])
def test_an_answer_of_something_else_is_refused(body: object) -> None:
    with answering((200, body)) as (url, _), pytest.raises(ValueError, match="answers "):
        SearchClient(url, deadline_s=10).retrieve(["who"], 1)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a/b", "http:///retrieve"])
def test_an_url_without_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="for example http://127"):
        SearchClient(url)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        SearchClient("http://a/retrieve", deadline_s=0)
