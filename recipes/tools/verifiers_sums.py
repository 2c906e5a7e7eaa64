"""A taskset and a harness of verifiers, as its users write them: sums, with a calculator.

The harness asks the model for a sum, executes its calls of the calculator, and asks again until an
answer has no call. Nothing here knows mcore_rl.
"""

import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import openai  # pyright: ignore[reportMissingImports]
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes a sum.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
MAX_TURNS = 3


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        """1 if the last answer is the number."""
        return float((trace.last_reply or "").split() == [str(self.data.answer)])

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 6256
    seed: int = 1


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        """Yield different sums of three numbers below 100, none of them negative on the way."""
        rng = random.Random(self.config.seed)
        texts = set()
        while len(texts) < self.config.num_tasks:
            a, b, c = (rng.randint(0, 99) for _ in range(3))
            sign, other = rng.choice("+-"), rng.choice("+-")
            text = f"{a} {sign} {b} {other} {c}"
            if text in texts or min(_sum(f"{a} {sign} {b}"), _sum(text)) < 0:
                continue
            texts.add(text)
            yield SumTask(SumData(prompt=f"what is {text} ?", answer=_sum(text)), self.config.task)


class CalculatorHarness(vf.Harness[vf.HarnessConfig]):
    """Asks in this process, through the endpoint that verifiers serves."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: SumData,
        **_: Any,
    ) -> vf.ProgramResult:
        client = get_client().with_options(base_url=endpoint, api_key=secret, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        for _turn in range(MAX_TURNS):
            completion = await client.chat.completions.create(
                model=ctx.model, messages=messages, tools=[CALCULATOR]
            )
            answer = completion.choices[0].message
            if not answer.tool_calls:
                break
            messages.append(answer.model_dump(exclude_none=True))
            messages += [_result(call) for call in answer.tool_calls]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


@cache
def get_client() -> openai.AsyncOpenAI:
    """Return the client of all rollouts: one for each would read all certificates each time."""
    return openai.AsyncOpenAI(api_key="of each rollout")


def _result(call: Any) -> dict[str, str]:
    numbers = re.findall(r"[-+]?\s*\d+", call.function.arguments)
    total = sum(int(re.sub(r"\s", "", number)) for number in numbers)
    return {"role": "tool", "tool_call_id": call.id, "content": str(total)}


def _sum(text: str) -> int:
    return sum(int(number) for number in re.findall(r"[-+]?\d+", text.replace(" ", "")))


__all__ = ["CalculatorHarness", "Sums"]
