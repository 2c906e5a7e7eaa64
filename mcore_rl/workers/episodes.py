"""Samples the episodes of one collector, with the recipe's options for episodes."""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_rl.agents.chat.answer_parser import Ask
from mcore_rl.agents.chat.setup import make_format_and_parser
from mcore_rl.agents.environments.adapters import is_program
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from mcore_rl.agents.gateway.admission import AdmissionOptions, FreeKv, GatewayOptions
from mcore_rl.agents.gateway.gateway import Gateway, collect_garbage_rarely
from mcore_rl.agents.images import ImageLimits, Sight
from mcore_rl.agents.messages import keep_last_answers
from mcore_rl.agents.recorder import EpisodeLimits, SampleTurn, TurnRequest
from mcore_rl.agents.runner import EpisodeRunner, RunnerOptions
from mcore_rl.config import AgentsConfig
from mcore_rl.config.shipped import resolve_shipped
from mcore_rl.data.decoding import Decode
from mcore_rl.data.images.processor import ImageProcessor
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.rollout.client import RolloutSession
from mcore_rl.rollout.collector import GroupRequest
from mcore_rl.rollout.request import EngineAffinity, Request, sample_seed
from mcore_rl.types import Sample


@dataclass(frozen=True)
class EpisodeSpec:
    """A recipe's options for episodes.

    model_path      directory with tokenizer and chat template
    max_tokens      tokens of a row, the first context included
    max_turn_len    tokens of an answer
    log_dir         where the output of the environments' workers goes
    images          bounds of the images that environments give; None: the model sees text alone
    placeholder_id  the token that stands for a piece of an image
    image_marks     tokens by which engines find images in ids, the placeholder among them
    adapters        names of the policy and of what engines serve beside it; empty: nothing
    """

    agents: AgentsConfig
    model_path: str
    trust_remote_code: bool
    architecture: str
    stop_token_ids: tuple[int, ...]
    max_tokens: int
    max_turn_len: int
    log_dir: Path
    images: ImageLimits | None = None
    placeholder_id: int = -1
    image_marks: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()


def make_environment_options(spec: EpisodeSpec, name: str) -> EnvironmentOptions:
    """Return the options of the workers of the collector `name`."""
    agents = spec.agents
    return EnvironmentOptions(
        kind=make_absolute(agents.environment),
        options=make_absolute(agents.options),
        python=agents.python,
        workers=agents.workers,
        episodes_per_worker=agents.episodes_per_worker,
        memory_gib=agents.memory_gib,
        start_timeout_s=agents.start_timeout_s,
        reset_timeout_s=agents.reset_timeout_s,
        step_timeout_s=agents.step_timeout_s,
        run_timeout_s=agents.deadline_s,
        variables={name: str(value) for name, value in agents.variables.items()},
        log_folder=str(spec.log_dir / name),
    )


def make_sight(spec: EpisodeSpec) -> Sight | None:
    """Return how the model sees images; None if it sees text alone.

    Raises ValueError if the model directory has no image processor that can be opened.
    """
    if spec.images is None:
        return None
    processor = ImageProcessor(spec.model_path, cache_bytes=0)
    return Sight(processor, spec.placeholder_id, spec.images, frozenset(spec.image_marks))


def make_absolute(value: Any) -> Any:
    """Return options with absolute paths of the files named as folder/file.py:name.

    Files are looked for from the working directory, then beside the shipped recipes.
    """
    if isinstance(value, Mapping):
        return {key: make_absolute(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [make_absolute(item) for item in value]
    if not isinstance(value, str) or not re.fullmatch(r"[^:\s]+\.py:\w+", value):
        return value
    path, _, name = value.rpartition(":")
    return f"{Path(resolve_shipped(path)).absolute()}:{name}"


class EpisodeSampler:
    """Runs the episodes of one collector, on the collector's event loop."""

    def __init__(
        self,
        spec: EpisodeSpec,
        name: str,
        decode: Decode,
        ask: Ask,
        free_kv: FreeKv = lambda: None,
    ) -> None:
        """Start nothing yet.

        ask       posts to the parsers of an engine
        free_kv   returns the free share of the engines' KV cache
        """
        tokenizer = load_tokenizer(spec.model_path, "model.path", spec.trust_remote_code)
        self._chat_format, self._parser = make_format_and_parser(
            tokenizer,
            spec.stop_token_ids,
            spec.architecture,
            spec.agents,
            ask,
            excerpts=spec.images is None,
        )
        self._pool = EnvironmentPool(make_environment_options(spec, name))
        self._gateway = None
        self._until_close = ExitStack()
        if is_program(spec.agents.environment):
            options = make_gateway_options(spec.agents, spec.adapters)
            self._gateway = Gateway(lambda token: decode([token]), options, free_kv=free_kv)
        limits = EpisodeLimits(spec.agents.max_turns, spec.max_turn_len, spec.max_tokens)
        history = spec.agents.history
        options = RunnerOptions(
            limits,
            spec.agents.deadline_s,
            spec.agents.max_bad_calls,
            None if history < 0 else partial(keep_last_answers, number=history),
        )
        self._runner = EpisodeRunner(
            spec.agents.environment,
            self._pool,
            self._chat_format,
            self._parser,
            decode,
            options,
            self._gateway,
            make_sight(spec),
        )

    @property
    def hidden_tools(self) -> list[str]:
        """Names of tools that episodes had and the chat template did not show."""
        return sorted(self._chat_format.hidden_tools)

    async def start(self) -> None:
        """Start what episodes need. Raises ValueError if the engines lack a parser."""
        await self._parser.check()
        if self._gateway is not None:
            await self._gateway.start()
            self._until_close.enter_context(collect_garbage_rarely())

    async def close(self) -> None:
        """End the workers and all processes that they started."""
        self._until_close.close()
        if self._gateway is not None:
            await self._gateway.close()
        await self._pool.close()

    async def sample_group(self, session: RolloutSession, request: GroupRequest) -> list[Sample]:
        """Run the episodes of a prompt; implements rollout.collector.SampleGroup."""
        works = (self._run(session, request, index) for index in range(request.num_samples))
        return await session.gather(list(works))

    async def _run(self, session: RolloutSession, request: GroupRequest, index: int) -> Sample:
        seed = sample_seed(request.sampling.seed or 0, request.prompt.index, index)
        answer = make_turn_sampler(session, request, index)
        return await self._runner.run(request.prompt, index, seed, answer)


def make_turn_sampler(session: RolloutSession, request: GroupRequest, index: int) -> SampleTurn:
    """Return how the turns of episode number `index` of a prompt are sampled.

    The first answer goes to any engine, later ones to the engine that has the prefix.
    """
    affinity = EngineAffinity(request.num_samples)

    async def sample_turn(turn: TurnRequest) -> Sample:
        prompt = replace(request.prompt, token_ids=turn.context_ids, images=turn.images)
        sampling = replace(request.sampling, max_response_len=turn.max_tokens)
        asked = Request(
            prompt,
            index,
            affinity,
            turn.turn,
            turn.stop,
            turn.experts_start,
            adapter=turn.adapter,
        )
        return await session.sample(asked, sampling)

    return sample_turn


def make_gateway_options(agents: AgentsConfig, adapters: Sequence[str] = ()) -> GatewayOptions:
    """Return the options of a collector's gateway; `adapters` as in EpisodeSpec."""
    admission = AdmissionOptions(
        agents.max_requests, agents.min_free_kv, agents.max_wait_s, agents.retry_after_s
    )
    if not adapters:
        return GatewayOptions(admission=admission)
    policy, *others = adapters
    return GatewayOptions(model=policy, adapters=tuple(others), admission=admission)
