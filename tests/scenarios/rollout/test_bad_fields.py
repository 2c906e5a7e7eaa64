"""Requests that SGLang's scheduler ends at or answers with nonsense: a real engine refuses each,
and lives on.
"""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from tests.support.chat_templates import make_tokenizer
from tests.support.engines import save_tiny_moe

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("fields")
    save_tiny_moe(folder / "model")
    tokenizer = make_tokenizer("qwen3")
    config = Qwen3MoeConfig.from_pretrained(folder / "model")
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM._from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    spec = EngineSpec(
        str(folder / "model"),
        str(folder / "engine.log"),
        tokenizer=True,
        extra_args=("--grammar-backend", "xgrammar"),
    )
    with EngineProcess(spec) as engine:
        yield engine


def ask(engine: EngineProcess, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Return HTTP status and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", int(engine.url.rsplit(":", 1)[1]), 60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 1000}, "top_logprobs=1000: 0 to 128"),
        (CHAT, {"top_k": 1 << 40}, "top_k=1099511627776: -1 or 1 to 1073741824"),
        (CHAT, {"stop_token_ids": [1 << 40]}, "stop_token_ids=1099511627776: token ids are 0 to"),
        (CHAT, {"max_tokens": 1025}, "max_tokens=1025: 0 to 1024"),
        ("/v1/completions", {"prompt": [-1]}, "prompt=-1: token ids are 0 to"),
        ("/generate", {"input_ids": [-1, 3]}, "input_ids=-1: token ids are 0 to"),
        ("/generate", {"input_ids": [1], "top_logprobs_num": -5}, "top_logprobs_num=-5: 0 to 128"),
    ],
)
def test_a_field_out_of_bounds_is_refused_and_the_engine_answers_on(
    engine: EngineProcess, path: str, fields: dict[str, Any], message: str
) -> None:
    status, body = ask(engine, path, {"model": "m", "messages": MESSAGES, **fields})
    assert status == 400 and body["error"]["message"].startswith(message)
    status, body = ask(engine, CHAT, {"messages": MESSAGES, "max_tokens": 2, "top_logprobs": 3})
    assert status == 200 and body["usage"]["completion_tokens"] >= 1
    assert engine.is_alive()


def history(*arguments: Any) -> dict[str, Any]:
    """Return a request whose call has these arguments, or none at all."""
    function = {"name": "look", **({"arguments": arguments[0]} if arguments else {})}
    call = {"id": "c", "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    tool = {"role": "tool", "tool_call_id": "c", "content": "seen"}
    return {"messages": [*MESSAGES, answer, tool], "max_tokens": 1}


def test_histories_are_read_as_in_the_gateway(engine: EngineProcess) -> None:
    answers = [ask(engine, CHAT, history(*given)) for given in (["{}"], [""], [None], [])]
    lens = [body["usage"]["prompt_tokens"] for status, body in answers if status == 200]
    assert len(lens) == 4 and len(set(lens)) == 1, answers
    done = [*MESSAGES, {"role": "assistant", "content": "done"}]
    for body, message in (
        (history("[1]"), "messages[1].tool_calls[0].function.arguments: must be an object of JSON"),
        ({"messages": done}, "messages: the last message must not be the assistant's"),
    ):
        status, answer = ask(engine, CHAT, body)
        assert status == 400 and answer["error"]["message"].startswith(message)
    going_on = {"messages": done, "continue_final_message": True, "max_tokens": 1}
    assert ask(engine, CHAT, going_on)[0] == 200


def test_a_grammar_holds_where_the_server_was_started_with_one(engine: EngineProcess) -> None:
    body = {"messages": MESSAGES, "max_tokens": 64, "temperature": 0, "response_format": FORMAT}
    status, answer = ask(engine, CHAT, body)
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"a"}
