"""The product's recorder of episodes, which asks the stand-in engine as a collector does."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from mcore_rl.agents.chat.setup import make_format_and_parser
from mcore_rl.agents.messages import EndReason
from mcore_rl.agents.recorder import EpisodeLimits, EpisodeRecorder, TurnRequest
from mcore_rl.config import AgentsConfig, RolloutConfig
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.request import EngineAffinity, Request, Sampling
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.types import Prompt, Sample

LIMITS = EpisodeLimits(max_turns=1000, max_turn_len=512, max_tokens=200_000)
MAX_CONCURRENCY = 100_000
ARCHITECTURE = "Qwen3MoeForCausalLM"


@asynccontextmanager
async def open_recorders(
    model: str, stop_id: int, engine_url: str
) -> AsyncIterator[Callable[[int], EpisodeRecorder]]:
    """Yield a function that makes the recorder of an episode by its number."""
    tokenizer: Any = load_tokenizer(model, "--model")
    stops = (stop_id,)

    async def ask(path: str, body: Any) -> Any:
        raise AssertionError(f"{path}: answers without reasoning and tools need no parser")

    agents = AgentsConfig(reasoning_parser="none")
    chat_format, parser = make_format_and_parser(tokenizer, stops, ARCHITECTURE, agents, ask)
    rollout = RolloutConfig(max_concurrency=MAX_CONCURRENCY, deterministic=True)
    decode = tokenizer.decode
    options = HttpOptions.make(rollout, stops, lambda ids: decode(ids, skip_special_tokens=True))
    client = RolloutClient([EngineAddress(engine_url, "engine.log")], rollout, options.open)
    async with client.open() as session:

        def make(number: int) -> EpisodeRecorder:
            prompt = Prompt(number, (0,), (), "benchmark", None)
            affinity = EngineAffinity(1)
            sampling = Sampling(max_response_len=LIMITS.max_turn_len, seed=0)

            async def sample_turn(turn: TurnRequest) -> Sample:
                context = replace(prompt, token_ids=turn.context_ids)
                asked = Request(context, 0, affinity, turn.turn, turn.stop, turn.experts_start)
                longest = replace(sampling, max_response_len=turn.max_tokens)
                return await session.sample(asked, longest)

            return EpisodeRecorder(chat_format, parser, sample_turn, LIMITS)

        yield make


def check(recorders: list[EpisodeRecorder], num_turns: int) -> None:
    """Raise AssertionError unless each episode is one row with all of its turns."""
    for recorder in recorders:
        episode = recorder.finish(EndReason.DONE)
        assert len(episode.rows) == 1 and len(episode.turns) == num_turns, (
            f"{len(episode.rows)} rows, {len(episode.turns)} turns instead of {num_turns}"
        )
