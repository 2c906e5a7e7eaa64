"""Runs episodes of a recipe with one engine and prints their conversations (mcore-rl agent)."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase

from mcore_rl.agents.messages import EndReason
from mcore_rl.cluster.adapter_slots import list_served_names, make_adapter_slots
from mcore_rl.cluster.engine_specs import make_engine_spec
from mcore_rl.config import Config, RolloutConfig
from mcore_rl.data.decoding import make_decode
from mcore_rl.process.errors import describe_error
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.process.http import open_session
from mcore_rl.process.server_keys import ServerKeys
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.collector import GroupRequest
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import EngineAsker, HttpOptions
from mcore_rl.run.episodes import (
    check_episodes,
    check_search,
    episode_spec,
    node_servers_spec,
    stand_in_urls,
)
from mcore_rl.run.inputs import check_sampling, list_prompt_options, open_policy
from mcore_rl.run.prompts import PromptReader
from mcore_rl.run.roles.generator import make_sampling
from mcore_rl.types import EpisodeRecord, Prompt, Sample, TurnRecord
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.workers.episodes import EpisodeSampler, EpisodeSpec
from mcore_rl.workers.node_servers import NodeServers, NodeServersSpec

_SHOWN_REASONS = 3


def run_agent(config: Config, num_episodes: int, *, greedy: bool) -> None:
    """Run an episode of each of the first prompts, and print the conversations.

    Held-out prompts come first, if the recipe has any. The command has checked what it names.
    Raises ValueError for wrong input before the engine is started, and RuntimeError if the
    environment failed in every episode.
    """
    needed = list_prompt_options(config.data)
    policy, tokenizer = open_policy(config.model, config.algorithm, config.run.dir, needed)
    check_sampling(config, policy)
    check_search(config.search, config.cluster)
    place = config.rollout.max_response_len, config.run.dir
    served = list_served_names(config.train.lora, has_trainer=False)
    groups = config.agents, config.model, config.data
    episodes = episode_spec(*groups, *place, policy, tokenizer, served)
    urls = stand_in_urls(config.sandbox, config.search)
    check_episodes(episodes, tokenizer, config.teacher, urls)
    files = config.eval.files or config.data.train
    prompts = PromptReader.make(config, tokenizer).load(files)[:num_episodes]
    sampling = make_sampling(config.rollout, greedy=greedy, seed=config.run.seed)
    with TemporaryDirectory(prefix="mcore_rl_agent_") as folder:
        engine = EngineProcess(_make_engine_spec(config, policy, Path(folder) / "sglang.log"))
        loop = EventLoop()
        nothing = NodeServersSpec(config.sandbox, config.search, Path(folder), 0.0)
        spec_of_servers = node_servers_spec(config.run, config.sandbox, config.search)
        beside = replace(spec_of_servers or nothing, log_dir=Path(folder))
        servers = NodeServers(beside, "agent")
        try:
            engine.start()
            engine.wait_healthy(config.run.startup_timeout_s)
            servers.wait_healthy()
            samples, hidden = loop.run(
                _run_episodes(episodes, config.rollout, tokenizer, engine, prompts, sampling)
            )
        except TimeoutError as error:
            raise RuntimeError(str(error) or describe_error(error)) from error
        finally:
            loop.close()
            engine.stop()
            servers.close()
    for sample in samples:
        print(format_episode(sample), flush=True)
    if hidden:
        print(explain_hidden_tools(config.model.path, hidden), flush=True)
    refuse_broken_environment(samples, config.agents.environment)


def _make_engine_spec(config: Config, policy: ModelFacts, log_path: Path) -> EngineSpec:
    return make_engine_spec(
        config.model,
        config.rollout,
        config.drift,
        policy,
        log_path,
        ServerKeys.make(),
        seed=config.run.seed,
        adapters=make_adapter_slots(config.train.lora, policy, has_trainer=False),
    )


def explain_hidden_tools(model_path: str, hidden: Sequence[str]) -> str:
    """Return a warning with the names of tools that the model's chat template did not show."""
    return (
        f"warning: the chat template of model.path={model_path} shows no tools, so the policy was"
        f" not told of {', '.join(hidden)}: save a template that shows them as chat_template.jinja"
        " beside tokenizer.json, or have the environment describe them in its messages"
    )


def refuse_broken_environment(samples: Sequence[Sample], environment: str) -> None:
    """Raise RuntimeError if every episode ended in an error of the environment."""
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    failed = [episode for episode in episodes if episode.end == EndReason.ENV_ERROR]
    if not failed or len(failed) < len(episodes):
        return
    reasons = sorted({episode.detail for episode in failed})
    raise RuntimeError(
        f"agents.environment={environment}: all {len(failed)} episodes ended in {failed[0].end}, so"
        f" nothing was learned of the policy: {'; '.join(reasons[:_SHOWN_REASONS])}"
    )


async def _run_episodes(
    spec: EpisodeSpec,
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    engine: EngineProcess,
    prompts: Sequence[Prompt],
    sampling: Sampling,
) -> tuple[list[Sample], list[str]]:
    """Return an episode of each prompt, and the names of tools that the template did not show."""
    decode = make_decode(tokenizer)
    health = EngineHealth([engine.url])
    http = HttpOptions.make(rollout, spec.stop_token_ids, decode)
    client = RolloutClient([engine.address], rollout, http.open, health)
    async with AsyncExitStack() as stack:
        posts = await stack.enter_async_context(open_session(rollout.request_timeout_s))
        sampler = EpisodeSampler(
            spec, "agent", decode, EngineAsker(posts, [engine.address], health)
        )
        stack.push_async_callback(sampler.close)
        await sampler.start()
        session = await stack.enter_async_context(client.open())
        groups = [
            await sampler.sample_group(session, GroupRequest(0, i, prompt, 1, sampling))
            for i, prompt in enumerate(prompts)
        ]
    return [sample for group in groups for sample in group], sampler.hidden_tools


def format_episode(sample: Sample) -> str:
    """Return the conversation of an episode, its rewards and the reason of its end."""
    episode = sample.episode
    assert episode is not None, "an episode is shown"
    prompt = sample.prompt
    lines = [f"=== prompt {prompt.index} of {prompt.data_source!r} ==="]
    for turn in episode.turns:
        lines += _format_turn(turn)
    return "\n".join([*lines, _format_end(episode, prompt), ""])


def _format_turn(turn: TurnRecord) -> list[str]:
    lines = [f"--- a new row: {turn.fork} ---"] if turn.fork else []
    lines += [f"--- answered by {turn.adapter}, and not trained ---"] if turn.adapter else []
    lines += [_format_message(message) for message in turn.messages]
    lines.append(_format_message(turn.answer))
    lines += [f"    call {call}" for call in turn.calls]
    if turn.reward:
        lines.append(f"    reward {turn.reward:g}")
    return lines


def _format_message(message: Mapping[str, Any]) -> str:
    parts = [str(message.get("content") or "")]
    if reasoning := message.get("reasoning_content"):
        parts.insert(0, f"({reasoning})")
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        parts.append(f"{function['name']} {text}")
    return f"[{message['role']}] {' '.join(part for part in parts if part)}"


def _format_end(episode: EpisodeRecord, prompt: Prompt) -> str:
    num_tokens = sum(turn.num_tokens for turn in episode.turns)
    truth = f"; ground truth {prompt.ground_truth!r}" if prompt.ground_truth else ""
    detail = f" ({episode.detail})" if episode.detail else ""
    return (
        f"=== {episode.end}{detail}: reward {episode.reward:g}, {len(episode.turns)} answers,"
        f" {num_tokens} sampled tokens, {len(episode.rows)} rows{truth} ==="
    )
