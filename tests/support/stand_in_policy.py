"""A stand-in for the engines in tests of episodes: it answers with given texts, as tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from mcore_rl.agents.messages import Answer, Tool
from mcore_rl.agents.recorder import TurnRequest
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion


@dataclass
class StandInPolicy:
    """Says the texts in turn, then the last one for ever; keeps what it was asked.

    stop_id    ends each answer; it is left out of an answer that max_tokens cuts, and of one that
               has a stop text of its request
    """

    texts: Sequence[str]
    encode: object
    stop_id: int
    asked: list[TurnRequest] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)

    async def __call__(self, request: TurnRequest) -> Sample:
        text = self.texts[min(len(self.asked), len(self.texts) - 1)]
        self.asked.append(request)
        ids = tuple(self.encode(text))  # pyright: ignore[reportCallIssue]
        if not any(stop in text for stop in request.stop):
            ids += (self.stop_id,)
        reason = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        self.answers.append(ids)
        generator = random.Random(len(self.asked))
        return Sample(
            prompt=Prompt(0, request.context_ids, (), "unit", None),
            sample_index=0,
            response_ids=ids,
            logprobs=tuple(-generator.random() for _ in ids),
            finish_reason=reason,
            versions=(VersionSpan(0, len(ids), WeightVersion(len(self.asked))),),
            text=text,
            experts_start=request.experts_start,
        )


class PlainParser:
    """Takes an answer as it is: text, no reasoning, no calls."""

    def __init__(self, decode: object) -> None:
        self._decode = decode

    async def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[Tool],
        finish_reason: str,
        taken: Sequence[str] = (),
        stop: Sequence[str] = (),
    ) -> Answer:
        text = self._decode(list(token_ids))  # pyright: ignore[reportCallIssue]
        return Answer({"role": "assistant", "content": text})
