"""A stand-in engine of fixed latency, in a process of its own.

It speaks SGLang's /generate and, for gateways that pass chats on, vLLM's chat completions with
token ids. Both answers have the same tokens. It prints its port.
"""

import argparse
import asyncio
import sys
import time

import orjson
import uvloop

from agents_http import serve
from agents_lag import Lag, percentiles
from agents_workload import TURN_LEN, answer_text

LOGPROB = -0.693


def generated(tokens: list[int]) -> bytes:
    """Return an answer of SGLang."""
    meta = {
        "output_token_logprobs": [[LOGPROB, token, None] for token in tokens],
        "finish_reason": {"type": "stop"},
        "weight_versions": [{"start": 0, "end": len(tokens), "version": "0"}],
    }
    return orjson.dumps({"text": answer_text(), "output_ids": tokens, "meta_info": meta})


def chat_answer(num_answers: int, tokens: list[int]) -> bytes:
    """Return an answer of vLLM after so many earlier answers."""
    prompt_len = TURN_LEN * (num_answers + 1) + len(tokens) * num_answers
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
    usage = {"prompt_tokens": prompt_len, "completion_tokens": len(tokens)}
    return orjson.dumps(
        {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [choice],
            "prompt_token_ids": list(range(prompt_len)),
            "usage": {**usage, "total_tokens": prompt_len + len(tokens)},
        }
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency-s", type=float, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--answer-ids", type=int, nargs="+", required=True)
    args = parser.parse_args()
    for_engine = generated(args.answer_ids)
    for_chat = [chat_answer(turn, args.answer_ids) for turn in range(args.turns)]
    late_s: list[float] = []

    async def answer(path: bytes, body: bytes) -> bytes:
        if path == b"/health":
            return b"{}"
        began_s = time.perf_counter()
        await asyncio.sleep(args.latency_s)
        late_s.append(time.perf_counter() - began_s - args.latency_s)
        if path == b"/generate":
            return for_engine
        num_answers = body.count(b'"assistant"')
        return for_chat[num_answers]

    _, port = await serve(answer)
    print(port, flush=True)
    lag = Lag()
    began_s = time.process_time()
    await asyncio.to_thread(sys.stdin.read)
    figures = {
        **percentiles(late_s, "engine_late_"),
        **lag.stop("engine"),
        "engine_cpu_s": time.process_time() - began_s,
    }
    print(orjson.dumps(figures).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
