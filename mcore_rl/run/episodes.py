"""Makes the specifications of a recipe's episodes and of the servers beside its collectors.

Refuses environments that cannot be used, and servers that would not start.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mcore_rl.agents.chat.setup import make_format_and_parser
from mcore_rl.agents.environments.check import check as check_environment
from mcore_rl.agents.images import ImageLimits
from mcore_rl.config import (
    AgentsConfig,
    ClusterConfig,
    DataConfig,
    ImagesConfig,
    ModelConfig,
    RunConfig,
    SandboxConfig,
    SearchConfig,
    ServedModelConfig,
)
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process.server_keys import SANDBOX_URL, SEARCH_URL
from mcore_rl.run.images import image_marks, sees_images
from mcore_rl.services.search.index import read_manifest
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.models.tower import read_placeholder
from mcore_rl.workers.episodes import EpisodeSpec, make_environment_options
from mcore_rl.workers.node_servers import NodeServersSpec

_log = logging.getLogger(__name__)
_NOWHERE = "http://127.0.0.1:1"


def episode_spec(
    agents: AgentsConfig,
    model: ModelConfig,
    data: DataConfig,
    max_response_len: int,
    run_dir: str,
    policy: ModelFacts,
    tokenizer: PreTrainedTokenizerBase,
    adapters: tuple[str, ...] = (),
) -> EpisodeSpec:
    """Return the specification from which collectors run episodes.

    max_response_len   rollout.max_response_len
    adapters           names that engines serve, as in EpisodeSpec
    """
    placeholder_id = read_placeholder(policy.config)
    return EpisodeSpec(
        agents=agents,
        model_path=model.path,
        trust_remote_code=model.trust_remote_code,
        architecture=policy.architecture,
        stop_token_ids=stop_token_ids(tokenizer, Path(model.path)),
        max_tokens=data.max_prompt_len + max_response_len,
        max_turn_len=agents.max_turn_len or max_response_len,
        log_dir=RunFolder(run_dir).logs / "environments",
        images=_image_limits(data.images) if sees_images(policy) else None,
        placeholder_id=-1 if placeholder_id is None else placeholder_id,
        image_marks=image_marks(policy),
        adapters=adapters,
    )


def _image_limits(images: ImagesConfig) -> ImageLimits:
    return ImageLimits(images.max_pixels, images.max_mib << 20, images.max_tokens)


def check_episodes(
    spec: EpisodeSpec,
    tokenizer: PreTrainedTokenizerBase,
    teacher: ServedModelConfig,
    urls: Mapping[str, str],
) -> None:
    """Log what the chat template does to rows of episodes.

    `urls` are the addresses of the recipe's servers, by variable. Raises ValueError if the
    environment, the template or the parsers cannot be used.
    """
    if spec.images is not None and teacher.is_used:
        raise ValueError(
            f"teacher.path={teacher.path or teacher.url} with"
            f" agents.environment={spec.agents.environment} and a model that sees images: the"
            " teacher would read their placeholders alone; leave it out"
        )
    options = make_environment_options(spec, "check")
    check_environment(replace(options, variables={**urls, **options.variables}))
    chat_format, _ = make_format_and_parser(
        tokenizer, spec.stop_token_ids, spec.architecture, spec.agents, _ask_nobody
    )
    for line in chat_format.probe().lines:
        _log.info("chat template: %s", line)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model_dir: Path) -> tuple[int, ...]:
    """Return the tokens that end a response.

    These are the tokenizer's end of sequence and the ends that generation_config.json and
    config.json name, at which engines stop, too.
    """
    stops: list[Any] = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        named = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        stops += named if isinstance(named, list) else [named]
    return tuple(sorted({stop for stop in stops if isinstance(stop, int)}))


async def _ask_nobody(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    raise AssertionError(f"no engine is there yet to ask {path}")


def node_servers_spec(
    run: RunConfig, sandbox: SandboxConfig, search: SearchConfig
) -> NodeServersSpec | None:
    """Return the servers that each collector starts; None if the recipe has none."""
    if not (sandbox.is_used or search.is_used):
        return None
    if search.is_used:
        search = replace(search, index=str(Path(search.index).absolute()))
    return NodeServersSpec(sandbox, search, RunFolder(run.dir).logs, run.startup_timeout_s)


def check_search(search: SearchConfig, cluster: ClusterConfig) -> None:
    """Raise ValueError if the recipe has a search that would not start.

    On a joined cluster, the nodes check an index that this machine lacks when they open it.
    """
    if search.is_used and (cluster.address is None or Path(search.index).exists()):
        try:
            read_manifest(Path(search.index))
        except (ValueError, OSError) as error:
            raise ValueError(f"search.index={search.index}: {error}") from None


def stand_in_urls(sandbox: SandboxConfig, search: SearchConfig) -> Mapping[str, str]:
    """Return placeholder addresses, by variable, so that options can be checked without servers."""
    urls: dict[str, str] = {}
    if sandbox.is_used:
        urls[SANDBOX_URL] = f"{_NOWHERE}/run_code"
    if search.is_used:
        urls[SEARCH_URL] = f"{_NOWHERE}/retrieve"
    return urls
