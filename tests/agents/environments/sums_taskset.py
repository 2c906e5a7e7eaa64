"""A taskset of verifiers as its users write one, with a harness that asks the model twice."""

import sys

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

PROGRAM = """
import sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
messages = [{"role": "user", "content": sys.argv[3]}]
for _ in range(2):
    answer = client.chat.completions.create(model=sys.argv[4], messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    messages.append({"role": "user", "content": "Sure?"})
"""


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def is_right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for first in range(3):
            yield SumTask(SumData(prompt=f"{first} + 1?", answer=str(first + 1)), self.config.task)


class TwiceHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        argv = [sys.executable, "-c", PROGRAM, endpoint, secret, data.prompt, ctx.model]
        return await runtime.run(argv, {})


__all__ = ["Sums", "TwiceHarness"]
