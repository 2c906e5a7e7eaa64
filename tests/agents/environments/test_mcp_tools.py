"""Tools of real MCP servers, over stdio and HTTP, by the unchanged package mcp."""

import json
import socket
import subprocess
import time
from pathlib import Path

import pytest

from mcore_rl.agents.environments.environment import EnvironmentFailedError
from mcore_rl.agents.environments.mcp_tools import McpOptions
from mcore_rl.process.network import find_free_port
from tests.agents.environments.foreign import PYTHON, needs_agents_venv, play

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = {"command": PYTHON, "args": [SERVER], "env": {"OWNER": "me"}}
TASK = {"messages": [{"role": "user", "content": "6 * 7?"}], "index": 0}


def calls(*pairs):
    functions = [{"name": name, "arguments": json.dumps(given)} for name, given in pairs]
    return {
        "role": "assistant",
        "tool_calls": [{"id": str(n), "function": each} for n, each in enumerate(functions)],
    }


@pytest.fixture
def url():
    port = find_free_port("127.0.0.1")
    process = subprocess.Popen([PYTHON, SERVER, str(port)])
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.terminate()
    process.wait(timeout=30)


@needs_agents_venv()
def test_a_server_over_stdio_answers_and_keeps_its_state_for_the_episode():
    start, (first, second, last) = play(
        "mcp",
        {"servers": {"calculator": STDIO}},
        TASK,
        [
            calls(("multiply", {"first": 6, "second": 7}), ("divide", {"first": 1, "second": 0})),
            calls(("multiply", {"first": 1, "second": 1})),
            "42",
        ],
    )
    functions = [tool["function"] for tool in start.tools]
    assert [function["name"] for function in functions] == ["multiply", "divide", "leave"]
    assert functions[0]["description"] == "Multiply two numbers."
    assert functions[0]["parameters"]["required"] == ["first", "second"]
    assert first.messages[0]["content"] == "42 after 1 calls of me"
    assert first.messages[1]["content"].startswith("Error: ")
    assert second.messages[0]["content"] == "1 after 2 calls of me"
    assert last.done and last.metrics["tools/divide/failures"] == 1


@pytest.mark.slow
@needs_agents_venv()
def test_a_server_over_http_and_one_over_stdio_share_names_and_some_tools_are_chosen(url):
    start, (step,) = play(
        "mcp",
        {
            "servers": {"near": STDIO, "far": {"url": url, "headers": {"x-team": "a"}}},
            "tools": ["far__multiply", "near__multiply"],
        },
        TASK,
        [calls(("far__multiply", {"first": 2, "second": 3}), ("near__divide", {}))],
    )
    names = [tool["function"]["name"] for tool in start.tools]
    assert names == ["near__multiply", "far__multiply"]
    assert step.messages[0]["content"] == "6 after 1 calls of nobody"
    assert "there is no tool near__divide" in step.messages[1]["content"]


@needs_agents_venv()
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"servers": {"none": {"command": "/no/server"}}}, "MCP server 'none' cannot be reached"),
        (
            {"servers": {"dumb": {"command": "sleep", "args": ["60"]}}, "connect_timeout_s": 1},
            "MCP server 'dumb' did not list its tools within 1 s",
        ),
        pytest.param(
            *({"servers": {"a": STDIO}, "tools": ["root"]}, "no server has root; they have"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_named(options, text):
    with pytest.raises(EnvironmentFailedError, match=text):
        play("mcp", options, TASK, [])


@needs_agents_venv()
@pytest.mark.parametrize("is_far", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_server_that_ends_within_a_call_is_not_the_policys_fault(is_far, url):
    options = {"servers": {"gone": {"url": url} if is_far else STDIO}, "tool_timeout_s": 20}
    with pytest.raises(EnvironmentFailedError, match="MCP server 'gone' gives no answer to leave"):
        play("mcp", options, TASK, [calls(("leave", {})), "42"])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"servers": {}}, "servers is empty"),
        ({"servers": {"a": {}}}, "server 'a' is {}: it needs a command or a url"),
        ({"servers": {"a": {"command": "x", "url": "y"}}}, "it needs a command or a url"),
        ({"servers": {"a": {"url": "y", "env": {}}}}, "server 'a': env is not read"),
        ({"servers": {"a": STDIO}, "max_turns": -1}, "max_turns -1"),
    ],
)
def test_senseless_options_are_named(given, text):
    with pytest.raises(ValueError, match=text):
        McpOptions(**given)
