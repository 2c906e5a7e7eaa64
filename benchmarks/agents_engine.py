"""A stand-in engine of fixed latency, in a process of its own.

It speaks SGLang's /generate and, for gateways that pass chats on, vLLM's chat completions with
token ids. Both answers have the same tokens. It prints its port.
"""

import argparse
import asyncio

import orjson
import uvloop

from agents_http import serve
from agents_workload import RESPONSE_LEN, TURN_LEN, answer_text, response_ids

LOGPROB = -0.693


def generated() -> bytes:
    """Return an answer of SGLang."""
    logprobs = [[LOGPROB, token, None] for token in response_ids()]
    meta = {"output_token_logprobs": logprobs, "finish_reason": {"type": "stop"}}
    return orjson.dumps(
        {"text": answer_text(), "output_ids": list(response_ids()), "meta_info": meta}
    )


def chat_answer(num_answers: int) -> bytes:
    """Return an answer of vLLM after so many earlier answers."""
    prompt_len = TURN_LEN * (num_answers + 1) + RESPONSE_LEN * num_answers
    tokens = response_ids()
    content = [
        {"token": f"token_id:{token}", "logprob": LOGPROB, "bytes": None, "top_logprobs": []}
        for token in tokens
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer_text()},
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "token_ids": tokens,
    }
    usage = {"prompt_tokens": prompt_len, "completion_tokens": RESPONSE_LEN}
    return orjson.dumps(
        {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [choice],
            "prompt_token_ids": list(range(prompt_len)),
            "usage": {**usage, "total_tokens": prompt_len + RESPONSE_LEN},
        }
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency-s", type=float, required=True)
    parser.add_argument("--turns", type=int, required=True)
    args = parser.parse_args()
    for_engine = generated()
    for_chat = [chat_answer(turn) for turn in range(args.turns)]

    async def answer(path: bytes, body: bytes) -> bytes:
        if path == b"/health":
            return b"{}"
        await asyncio.sleep(args.latency_s)
        if path == b"/generate":
            return for_engine
        num_answers = body.count(b'"assistant"')
        return for_chat[num_answers]

    server, port = await serve(answer)
    print(port, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
