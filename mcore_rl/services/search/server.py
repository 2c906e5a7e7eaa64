"""Serves a retriever over HTTP: POST /retrieve as Search-R1 has it, and GET /healthz.

request --> admitted, or 429 --> thread --> response, or 504 after the deadline

Memory is bounded: requests have a largest size, and beyond `queue_len` of them that wait or are
worked on, further ones are refused at once.
"""

import asyncio
import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from aiohttp import web

from mcore_rl.process.errors import describe_error
from mcore_rl.process.network import refuse_open_door, url_of
from mcore_rl.process.server_keys import is_bearer, parse_json
from mcore_rl.services.search.client import (
    MOST_HITS,
    RetrieveRequest,
    SearchUnavailableError,
    make_response,
    parse_request,
)
from mcore_rl.services.search.index import Retriever
from mcore_rl.services.search.layout import Hit
from mcore_rl.services.search.replay import MissingRecordingError

_MOST_BODY_BYTES = 4 << 20
_STOP_S = 3.0


@dataclass(frozen=True)
class ServerOptions:
    """How a retriever is served.

    port        0: any free one
    key         what requests bring as a bearer token; empty: they need none
    threads     requests that are worked on at a time
    queue_len   requests at most that wait or are worked on
    deadline_s  for one request, its wait included
    topk        hits of a query whose request does not say how many
    """

    host: str = "127.0.0.1"
    port: int = 8000
    key: str = field(default="", repr=False)
    threads: int = 4
    queue_len: int = 256
    deadline_s: float = 60.0
    topk: int = 3

    def __post_init__(self) -> None:
        if not self.key:
            refuse_open_door(self.host, "search")
        if self.threads < 1 or self.queue_len < self.threads:
            raise ValueError(
                f"--threads={self.threads} --queue-len={self.queue_len}: at least 1 thread, and a"
                " queue at least as long"
            )
        if not 1 <= self.topk <= MOST_HITS:
            raise ValueError(f"--topk={self.topk}: from 1 to {MOST_HITS}")
        if not self.deadline_s > 0:
            raise ValueError(f"--deadline-s={self.deadline_s}: more than 0 seconds")


class SearchServer:
    """A retriever behind HTTP, on the event loop that calls `start`."""

    def __init__(self, retriever: Retriever, options: ServerOptions) -> None:
        self._retriever = retriever
        self._options = options
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix="search")
        self._num_open = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Begin to serve; return the URL of /retrieve. Raises ValueError if it cannot listen."""
        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.router.add_post("/retrieve", self._retrieve)
        app.router.add_get("/healthz", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S)
        await self._runner.setup()
        options = self._options
        try:
            await web.TCPSite(self._runner, options.host, options.port).start()
        except OSError as error:
            raise ValueError(
                f"--host={options.host} --port={options.port}: cannot listen there ({error}); give"
                " another port, or 0 for any"
            ) from error
        return f"{url_of(options.host, self._runner.addresses[0][1])}/retrieve"

    async def stop(self) -> None:
        """Stop serving, and drop requests that wait for a thread."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _health(self, request: web.Request) -> web.Response:
        facts = {
            "status": "ok",
            "retriever": self._retriever.name,
            "passages": self._retriever.num_passages,
            "requests": self._num_open,
            "most_requests": self._options.queue_len,
        }
        return web.json_response(facts)

    async def _retrieve(self, request: web.Request) -> web.Response:
        if not self._admits(request):
            return _refusal(401, "the server needs its key: Authorization: Bearer <key>")
        if self._num_open >= self._options.queue_len:
            busy = f"{self._num_open} requests wait: at most {self._options.queue_len}"
            return _refusal(429, busy, {"Retry-After": "1"})
        self._num_open += 1
        is_handed_on = False
        try:
            async with asyncio.timeout(self._options.deadline_s):
                try:
                    parsed = parse_request(parse_json(await request.read()), self._options.topk)
                except ValueError as error:
                    return _refusal(400, str(error))
                work = asyncio.get_running_loop().run_in_executor(
                    self._threads, self._retriever.retrieve, parsed.queries, parsed.topk
                )
                is_handed_on = True
                # A thread goes on when nobody waits any more, so its place is taken until it ends.
                work.add_done_callback(self._leave)
                return await self._answer(asyncio.shield(work), parsed)
        except TimeoutError:
            late = f"not answered within {self._options.deadline_s:g} s (--deadline-s)"
            return _refusal(504, late)
        finally:
            if not is_handed_on:
                self._num_open -= 1

    async def _answer(
        self, work: "asyncio.Future[list[list[Hit]]]", request: RetrieveRequest
    ) -> web.Response:
        try:
            found = await work
        except MissingRecordingError as error:
            return _refusal(404, str(error))
        except SearchUnavailableError as error:
            return _refusal(502, str(error))
        except (ValueError, RuntimeError, OSError) as error:
            return _refusal(500, describe_error(error))
        return web.json_response(make_response(found, request.return_scores))

    def _leave(self, work: "asyncio.Future[list[list[Hit]]]") -> None:
        self._num_open -= 1
        if not work.cancelled():
            work.exception()  # whoever waited was told; nobody else is left to ask

    def _admits(self, request: web.Request) -> bool:
        key = self._options.key
        return not key or is_bearer(request.headers.get("Authorization", ""), key)


def _refusal(status: int, reason: str, headers: dict[str, str] | None = None) -> web.Response:
    body = json.dumps({"error": reason})
    return web.Response(status=status, text=body, content_type="application/json", headers=headers)


async def serve(
    retriever: Retriever, options: ServerOptions, on_ready: Callable[[str], bool]
) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` gets the URL, and returns whether to go on.

    It is called in a thread, so that it may ask the server.
    """
    server = SearchServer(retriever, options)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    try:
        url = await server.start()
        if await asyncio.to_thread(on_ready, url):
            await stopping.wait()
    finally:
        await server.stop()
