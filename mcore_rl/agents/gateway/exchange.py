"""Takes a client's request to the policy and its answer back; survives clients that go away."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

import orjson
from aiohttp import web

from mcore_rl.agents.gateway.admission import Admission, GatewayOptions
from mcore_rl.agents.gateway.api import (
    Answered,
    Api,
    ApiError,
    BadRequestError,
    Body,
    Call,
    make_episode_over,
    make_overloaded,
)
from mcore_rl.agents.gateway.models import choose_adapter
from mcore_rl.agents.gateway.sessions import (
    Attempt,
    Mark,
    OpenSession,
    OverloadedError,
    Rendered,
    read_mark,
)
from mcore_rl.agents.messages import Completion, ConversationError, EndReason, EpisodeEndedError
from mcore_rl.process.clock import now_s

_log = logging.getLogger(__name__)

IGNORED_HEADER = "X-Ignored-Parameters"
TURN_HEADER = "X-Episode-Turn"
"""Number of the answer's turn, for a reward of that turn; a stream's headers come too early."""


class Exchange:
    """Answers requests for a message of the policy, by any of the APIs."""

    def __init__(self, options: GatewayOptions, admission: Admission) -> None:
        self._options = options
        self._admission = admission

    async def run(self, request: web.Request, api: Api, opened: OpenSession) -> web.StreamResponse:
        """Answer a request; ApiError and BadRequestError say why there is no answer."""
        data = await read_bytes(request, self._options.body_s)
        call = self._choose_adapter(api.read(parse_object(data), opened.memory))
        _log_ignored(opened, call)
        kind = request.path.rpartition("/v1/")[2].encode()
        mark = read_mark(request.headers, hashlib.sha256(kind + b"\n" + data).digest())
        is_connected = _find_connection(request)
        attempt = opened.attempts.claim(mark, is_connected)
        if attempt is None:
            with opened.attempts.keep_arrival(mark, is_connected):
                await self._admit(opened, is_connected)
            attempt = self._begin(mark, opened, api, call, is_connected)
        answer = self._stream if call.is_streamed else self._answer
        return await answer(request, api, call, attempt)

    def _choose_adapter(self, call: Call) -> Call:
        """Return the call with the adapter that it names; ApiError: there is none of this name."""
        adapter = choose_adapter(call.model, self._options.model, self._options.adapters)
        return replace(call, request=replace(call.request, adapter=adapter))

    async def _admit(self, opened: OpenSession, is_connected: Callable[[], bool]) -> None:
        """Return once a generation may begin, for a client that is still there."""
        try:
            await self._admission.enter()
        except OverloadedError as busy:
            opened.num_refused += 1
            raise make_overloaded(busy.retry_after_s) from busy
        if opened.is_closed:
            raise make_episode_over(EpisodeEndedError(EndReason.ABORTED, "the session was closed"))
        if not is_connected():
            # Its retry, which may be here already, begins a generation of its own.
            raise ApiError(408, "client_gone", "the client left before its turn came")

    def _begin(
        self,
        mark: Mark,
        opened: OpenSession,
        api: Api,
        call: Call,
        is_connected: Callable[[], bool],
    ) -> Attempt:
        identity = secrets.token_hex(12)
        created_s = int(time.time())

        async def generate() -> Rendered:
            began_s = now_s()
            completion = await _complete(opened, call)
            opened.note(completion, now_s() - began_s)
            answered = Answered(identity, created_s, completion)
            api.remember(call, answered, opened.memory)
            if call.is_streamed:
                return Rendered(completion.turn, b"".join(api.events(call, answered)))
            return Rendered(completion.turn, orjson.dumps(api.answer(call, answered)))

        task = asyncio.get_running_loop().create_task(generate())
        self._admission.begin(task)
        attempt = Attempt(mark, task, is_connected)
        opened.attempts.add(attempt)
        return attempt

    async def _answer(
        self, request: web.Request, api: Api, call: Call, attempt: Attempt
    ) -> web.StreamResponse:
        await self._wait(attempt, self._options.answer_s)
        rendered = _render(attempt)
        headers = {**_headers(call), TURN_HEADER: str(rendered.turn)}
        response = web.Response(
            body=rendered.data, content_type="application/json", headers=headers
        )
        await _deliver(request, response, (), attempt)
        return response

    async def _stream(
        self, request: web.Request, api: Api, call: Call, attempt: Attempt
    ) -> web.StreamResponse:
        """Send events. The status is sent with the first sign of life, so that an error which
        comes before it has a status of its own.
        """
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**headers, **_headers(call)})
        deadline_s = asyncio.get_running_loop().time() + self._options.answer_s
        try:
            while not await self._wait_until(attempt, deadline_s):
                try:
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(api.keep_alive)
                except ConnectionError:
                    return response
            events = [_render(attempt).data]
        except ApiError as error:
            if not response.prepared:
                raise
            await _deliver(request, response, [api.error_event(error)], None)
            return response
        await _deliver(request, response, events, attempt)
        return response

    async def _wait_until(self, attempt: Attempt, deadline_s: float) -> bool:
        """Return whether the answer is there; if not, it is time for a sign of life."""
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= self._options.keep_alive_s:
            await self._wait(attempt, max(left_s, 0.0))
            return True
        done, _ = await asyncio.wait({attempt.task}, timeout=self._options.keep_alive_s)
        return bool(done)

    async def _wait(self, attempt: Attempt, timeout_s: float) -> None:
        done, _ = await asyncio.wait({attempt.task}, timeout=timeout_s)
        if not done:
            message = f"a client waited {self._options.answer_s:g} s for an answer of the policy"
            raise ApiError(504, "timeout", message)


async def _complete(opened: OpenSession, call: Call) -> Completion:
    try:
        return await opened.chat.complete(call.request)
    except EpisodeEndedError as ended:
        raise make_episode_over(ended) from ended
    except OverloadedError as busy:
        opened.num_refused += 1
        raise make_overloaded(busy.retry_after_s) from busy
    except ConversationError as error:
        raise BadRequestError("messages", str(error), "invalid_messages").error from error
    except Exception as error:  # the boundary to the policy: the client is told, the log has it all
        _log.exception("session %d: the policy gave no answer", opened.number)
        message = f"the policy gave no answer: {type(error).__name__}; the log says more"
        raise ApiError(500, "policy_failed", message) from error


def _render(attempt: Attempt) -> Rendered:
    """Return the answer of an attempt that is done, or raise its error."""
    if attempt.task.cancelled():
        raise make_episode_over(EpisodeEndedError(EndReason.ABORTED, "the session was closed"))
    return attempt.task.result()


async def _deliver(
    request: web.Request,
    response: web.StreamResponse,
    chunks: "list[bytes] | tuple[()]",
    attempt: Attempt | None,
) -> None:
    """Send a response to its end, and note that its client has it, unless the client is gone."""
    try:
        if not response.prepared:
            await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
    except ConnectionError:
        return
    # A retry may have taken the attempt over, whose connection then says nothing of this client.
    if attempt is not None and _find_connection(request)():
        attempt.is_delivered = True


def _find_connection(request: web.Request) -> Callable[[], bool]:
    """Return a function that tells whether the client of a request is still connected.

    An attempt keeps it for long, so it must not hold the request, which holds its body.
    """
    transport = request.transport
    return lambda: transport is not None and not transport.is_closing()


def _headers(call: Call) -> dict[str, str]:
    return {IGNORED_HEADER: ", ".join(call.ignored)} if call.ignored else {}


def _log_ignored(opened: OpenSession, call: Call) -> None:
    if call.ignored and not opened.has_logged_ignored:
        opened.has_logged_ignored = True
        _log.warning(
            "session %d: the client's %s have no effect: the policy samples as it trains",
            opened.number,
            ", ".join(call.ignored),
        )


async def read_bytes(request: web.Request, timeout_s: float) -> bytes:
    """Return a request's body; ApiError if it does not arrive in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        message = f"the gateway waited {timeout_s:g} s for the body of the client's request"
        raise ApiError(408, "timeout", message) from None
    except web.RequestPayloadError as error:
        raise BadRequestError("body", f"cannot be read: {error}") from error


def parse_object(data: bytes) -> Body:
    """Return a body of JSON, which must be an object; raises BadRequestError."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequestError("body", f"is no JSON: {error}", "invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequestError("body", f"must be an object of JSON, not {type(body).__name__}")
    return body
