"""Serves episodes of the policy to programs that speak OpenAI's or Anthropic's API.

One session is one episode. A program is given a session's key or URL, and speaks to the policy as
to any model; the recorder behind the session keeps the tokens.

The gateway's answers about models and sessions, and rewards that programs report.

Keeps the garbage collector from stopping the event loop while thousands of requests wait.
"""

import asyncio
import gc
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from aiohttp import web

from mcore_rl.agents.gateway.admission import Admission, FreeKv, GatewayOptions
from mcore_rl.agents.gateway.anthropic_messages import AnthropicMessages
from mcore_rl.agents.gateway.api import (
    Api,
    ApiError,
    BadRequestError,
    Body,
    DecodeToken,
    make_anthropic_error,
    make_episode_over,
    make_openai_error,
    read_optional,
)
from mcore_rl.agents.gateway.chat_completions import ChatCompletions
from mcore_rl.agents.gateway.exchange import Exchange, parse_object, read_bytes
from mcore_rl.agents.gateway.models import choose_adapter, make_model_list
from mcore_rl.agents.gateway.responses import Responses
from mcore_rl.agents.gateway.sessions import EpisodeChat, OpenSession, Session, SessionTable
from mcore_rl.agents.messages import ChatRequest, ConversationError, EpisodeEndedError
from mcore_rl.process.network import url_of


def make_session_report(opened: OpenSession) -> dict[str, int]:
    """Return how far an episode is, for the program that runs it."""
    return {
        "turns": opened.num_turns,
        "prompt_tokens": opened.num_prompt_tokens,
        "sampled_tokens": opened.num_sampled_tokens,
    }


def read_reward(body: Body) -> tuple[float, int | None]:
    """Return a reward, and the number of the turn that it is for; None: for the episode."""
    value = body.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequestError("reward", "must be a finite number")
    turn = read_optional(body, "turn", int)
    if turn is not None and turn < 0:
        raise BadRequestError("turn", f"is {turn}; turns are counted from 0")
    return float(value), turn


def add_reward(chat: EpisodeChat, reward: float, turn: int | None) -> None:
    """Give a reward to the recorder; the client is told if it refuses the turn."""
    try:
        chat.add_reward(reward, turn)
    except EpisodeEndedError as ended:
        raise make_episode_over(ended) from ended
    except ValueError as error:
        raise BadRequestError("turn", str(error)) from error


_THRESHOLDS = (2_000, 5, 2_000)
"""Thresholds of CPython's three generations. A collection reads every object that the collected
ones refer to, and thus each token of the contexts of requests that wait. Of 50,000 young objects it
takes up to 200 ms of CPU time, of 2,000 about 1 ms. A full collection, which looks through all that
waits and all episodes, comes once in 20 million objects more than before. Requests leave next to
nothing in cycles."""


@contextmanager
def collect_garbage_rarely() -> Iterator[None]:
    """Have this process look for garbage in short steps; for the process that runs a gateway.

    Everything made so far, such as imported modules, is not looked through at all. Memory that is
    in no cycle is freed at once, as ever.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CountTokens = Callable[[ChatRequest], int]
_BACKLOG = 4096
_SHUTDOWN_S = 1.0
"""Time that `close` gives answers on their way to arrive."""


class Gateway:
    """Lives on the event loop that starts it; `async with` starts and closes it.

    decode_token   gives the text of a token, for clients that ask for log-probs
    count_tokens   gives the length of a request's prompt, for count_tokens of Anthropic's API;
                   without it, that is answered with 404
    run_key        names any session together with X-Session-ID; empty: a random one
    free_kv        says how much room the engines have, for GatewayOptions.admission
    """

    def __init__(
        self,
        decode_token: DecodeToken,
        options: GatewayOptions | None = None,
        count_tokens: CountTokens | None = None,
        run_key: str = "",
        free_kv: FreeKv = lambda: None,
    ) -> None:
        self._options = options or GatewayOptions()
        self._count_tokens = count_tokens
        self.run_key = run_key or f"sk-{secrets.token_urlsafe(32)}"
        self._sessions = SessionTable(self.run_key, self._options.retry_window_s)
        admission = Admission(self._options.admission, free_kv)
        self._exchange = Exchange(self._options, admission)
        self._anthropic = AnthropicMessages()
        self._apis: dict[str, Api] = {
            "/v1/chat/completions": ChatCompletions(decode_token),
            "/v1/responses": Responses(),
            "/v1/messages": self._anthropic,
        }
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> "Gateway":
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen; afterwards `url` is known. OSError if the port is taken."""
        assert self._runner is None, "the gateway was started twice"
        application = web.Application(
            middlewares=[_answer_errors], client_max_size=self._options.max_body_bytes
        )
        self._add_routes(application.router)
        # A client that goes away must not end the generation that its retry will ask for.
        runner = web.AppRunner(
            application,
            access_log=None,
            handler_cancellation=False,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await runner.setup()
        options = self._options
        await web.TCPSite(runner, options.host, options.port, backlog=_BACKLOG).start()
        self._runner = runner
        host = options.public_host or options.host
        self.url = url_of(host, runner.addresses[0][1])

    async def close(self) -> None:
        """Close every session, then the server; all connections end."""
        for opened in self._sessions.list_open():
            await self.close_session(opened.session.key)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open_session(self, chat: EpisodeChat) -> Session:
        """Return how a program reaches this episode."""
        assert self.url, "the gateway was not started"
        return self._sessions.open(chat, self.url)

    async def close_session(self, key: str) -> dict[str, float]:
        """Refuse the key from now on, and cancel what is generated for it; clients that wait are
        told that the episode is over. ValueError: no open session has this key.

        Returns `refused`, the requests that were told to ask again later, and `answer_s`, the
        seconds that answers took, together.
        """
        opened = self._sessions.remove(key)
        if opened is None:
            raise ValueError("close_session: no open session has this key; it is closed only once")
        running = opened.attempts.cancel()
        if running:
            await asyncio.wait(running)
        return opened.metrics()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def _add_routes(self, router: web.UrlDispatcher) -> None:
        for prefix in ("", "/s/{session}"):
            for path, api in self._apis.items():
                router.add_post(prefix + path, self._generate(api))
            router.add_post(f"{prefix}/v1/messages/count_tokens", self._count)
            router.add_get(f"{prefix}/v1/models", self._models)
            router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._models)
        router.add_post("/sessions/{session}/reward", self._reward)
        router.add_get("/sessions/{session}", self._report)

    def _generate(self, api: Api) -> Handler:
        async def generate(request: web.Request) -> web.StreamResponse:
            return await self._exchange.run(request, api, self._find(request))

        return generate

    def _find(self, request: web.Request) -> OpenSession:
        return self._sessions.find(request.headers, request.match_info.get("session"))

    async def _count(self, request: web.Request) -> web.StreamResponse:
        opened = self._find(request)
        if self._count_tokens is None:
            raise ApiError(404, "not_found", "this gateway does not count tokens")
        body = parse_object(await read_bytes(request, self._options.body_s))
        call = self._anthropic.read(body, opened.memory)
        try:
            num_tokens = self._count_tokens(call.request)
        except ConversationError as error:
            raise BadRequestError("messages", str(error), "invalid_messages") from error
        return _json({"input_tokens": num_tokens})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._find(request)
        options = self._options
        wanted = request.match_info.get("model")
        if wanted is None:
            return _json(make_model_list((options.model, *options.adapters)))
        choose_adapter(wanted, options.model, options.adapters)
        return _json(make_model_list((wanted,))["data"][0])

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        opened = self._sessions.find_own(request.headers, request.match_info["session"])
        body = parse_object(await read_bytes(request, self._options.body_s))
        reward, turn = read_reward(body)
        add_reward(opened.chat, reward, turn)
        return _json({"reward": reward, "turn": turn})

    async def _report(self, request: web.Request) -> web.StreamResponse:
        opened = self._sessions.find_own(request.headers, request.match_info["session"])
        return _json(make_session_report(opened))


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in the words of the API that the client speaks."""
    try:
        return await handler(request)
    except ApiError as error:
        found = error
    except BadRequestError as error:
        found = error.error
    except web.HTTPRequestEntityTooLarge:
        found = ApiError(413, "request_too_large", "the request's body is too large")
    except web.HTTPException as error:
        code = "not_found" if error.status == 404 else "bad_request"
        found = ApiError(error.status, code, f"{request.method} is not answered here")
    except Exception as error:  # the boundary to the client, who must get an answer
        _log.exception("the gateway failed at a request")
        found = ApiError(500, "gateway_failed", f"the gateway failed: {type(error).__name__}")
    write = make_anthropic_error if _is_anthropic(request) else make_openai_error
    return _json(write(found), found.status, dict(found.headers))


def _is_anthropic(request: web.Request) -> bool:
    return "/v1/messages" in request.path or "anthropic-version" in request.headers


def _json(
    body: Any, status: int = 200, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )
