"""Lets a policy call the tools of MCP servers, over stdio or HTTP, by the package `mcp`."""

import asyncio
import contextlib
import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.agents.environments.adapters import load_named
from mcore_rl.agents.environments.environment import (
    Message,
    Start,
    Step,
    Tool,
    ToolUnavailableError,
)
from mcore_rl.agents.environments.tools_env import ToolCalls, ToolEpisode, ToolOutcome, check_bounds

_INVALID_PARAMS = -32602
"""Code of JSON-RPC for arguments that a server refuses. Failures of a tool itself are results."""


@dataclass(frozen=True)
class McpOptions:
    """Which servers, and which of their tools.

    servers         name -> {command, args, env} of a program that speaks over stdio, or
                    {url, headers} of one that speaks streamable HTTP; as in mcpServers elsewhere
    tools           names of those that the policy may call; empty: all
    connect_timeout_s
                    for a server to start and list its tools
    reward, instructions, tool_timeout_s, result_len, max_turns
                    as in ToolsOptions

    Each episode has connections and stdio servers of its own. A tool is called by its name, or by
    server__name where two servers share a name.
    """

    servers: Mapping[str, Mapping[str, Any]]
    tools: Sequence[str] = ()
    connect_timeout_s: float = 30.0
    reward: str = ""
    instructions: str = ""
    tool_timeout_s: float = 30.0
    result_len: int = 8000
    max_turns: int = 0

    def __post_init__(self) -> None:
        check_bounds(self.tool_timeout_s, self.result_len, self.max_turns)
        if not self.servers:
            raise ValueError("servers is empty: name -> {command, args} or {url}")
        for name, server in self.servers.items():
            if ("command" in server) == ("url" in server):
                raise ValueError(f"server {name!r} is {dict(server)}: it needs a command or a url")
            known = {"command", "args", "env"} if "command" in server else {"url", "headers"}
            if unread := sorted(set(server) - known):
                raise ValueError(f"server {name!r}: {', '.join(unread)} is not read")
        if self.reward:
            load_named(self.reward)


class McpEnvironment:
    """One episode with the tools of its servers."""

    def __init__(self, options: McpOptions) -> None:
        self._options = options
        self._tools: list[Tool] = []
        self._targets: dict[str, tuple[str, Any, str]] = {}
        self._is_over = asyncio.Event()
        self._connection: asyncio.Task[None] | None = None
        self._episode: ToolEpisode | None = None

    async def reset(self, task: Mapping[str, Any]) -> Start:
        """Connect; TimeoutError or RuntimeError names the server that cannot be reached."""
        ready = asyncio.get_running_loop().create_future()
        self._connection = asyncio.ensure_future(self._hold(ready))
        await asyncio.wait([ready, self._connection], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await self._connection  # raises what went wrong
        options = self._options
        calls = ToolCalls(
            self._call, list(self._targets), options.tool_timeout_s, options.result_len
        )
        self._episode = ToolEpisode(calls, self._tools, options.max_turns, options.reward)
        return self._episode.start(task, options.instructions)

    async def step(self, message: Message) -> Step:
        """Call tools, or end the episode. Raises ToolUnavailableError if a server is away."""
        assert self._episode is not None, "step before reset"
        return await self._episode.step(message)

    async def close(self) -> None:
        self._is_over.set()
        if self._connection is not None:
            await asyncio.wait([self._connection])

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        """Hold the connections in one task: they must be closed by the task that opened them."""
        async with contextlib.AsyncExitStack() as stack:
            found: list[tuple[str, Any, Any]] = []
            for name in self._options.servers:
                session, tools = await self._connect(name, stack)
                found.extend((name, session, tool) for tool in tools)
            self._collect(found)
            ready.set_result(None)
            await self._is_over.wait()

    async def _connect(self, name: str, stack: contextlib.AsyncExitStack) -> tuple[Any, list[Any]]:
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                streams = await stack.enter_async_context(_transport(self._options.servers[name]))
                session = await stack.enter_async_context(
                    importlib.import_module("mcp").ClientSession(streams[0], streams[1])
                )
                await session.initialize()
                return session, (await session.list_tools()).tools
        except TimeoutError as error:
            raise TimeoutError(
                f"MCP server {name!r} did not list its tools within "
                f"{self._options.connect_timeout_s:g} s (connect_timeout_s)"
            ) from error
        except OSError as error:
            raise RuntimeError(f"MCP server {name!r} cannot be reached: {error}") from error

    def _collect(self, found: list[tuple[str, Any, Any]]) -> None:
        names = [tool.name for _, _, tool in found]
        for server, session, tool in found:
            shown = tool.name if names.count(tool.name) == 1 else f"{server}__{tool.name}"
            if self._options.tools and shown not in self._options.tools:
                continue
            # mcp 2 calls it input_schema, mcp 1 inputSchema
            schema = getattr(tool, "input_schema", None) or tool.inputSchema
            function = {"name": shown, "description": tool.description or "", "parameters": schema}
            self._tools.append({"type": "function", "function": function})
            self._targets[shown] = (server, session, tool.name)
        if missing := sorted(set(self._options.tools) - set(self._targets)):
            raise ValueError(f"tools: no server has {', '.join(missing)}; they have {names}")

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        server, session, inner_name = self._targets[name]
        try:
            result = await session.call_tool(inner_name, arguments)
        except Exception as error:
            if getattr(getattr(error, "error", None), "code", None) == _INVALID_PARAMS:
                raise  # told to the policy, which may try again
            raise ToolUnavailableError(
                f"MCP server {server!r} gives no answer to {inner_name}: {error!r}"
            ) from error
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        failed = getattr(result, "is_error", None) or getattr(result, "isError", False)
        text = "\n".join(parts)
        return ToolOutcome(f"Error: {text}" if failed else text, failed=bool(failed))


def _transport(server: Mapping[str, Any]) -> Any:
    if "command" in server:
        stdio = importlib.import_module("mcp.client.stdio")
        parameters = stdio.StdioServerParameters(
            command=server["command"],
            args=list(server.get("args", ())),
            env=dict(server["env"]) if server.get("env") else None,
        )
        return stdio.stdio_client(parameters)
    http = importlib.import_module("mcp.client.streamable_http")
    headers = dict(server.get("headers") or {})
    client = getattr(http, "streamable_http_client", None) or http.streamablehttp_client
    if "headers" in inspect.signature(client).parameters:
        return client(server["url"], headers=headers)
    if not headers:
        return client(server["url"])
    make_client = importlib.import_module("mcp.shared._httpx_utils").create_mcp_http_client
    return client(server["url"], http_client=make_client(headers=headers))
