"""A recipe's options of episodes, for collectors and for the checks before a run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.agents.environments.options import EnvironmentOptions
from mcore_rl.agents.images import ImageLimits, Sight
from mcore_rl.config import AgentsConfig
from mcore_rl.config.shipped import shipped_path
from mcore_rl.data.images.processor import ImageProcessor


@dataclass(frozen=True)
class EpisodeSpec:
    """A recipe's options of episodes.

    model_path      directory with tokenizer and chat template
    max_tokens      tokens of a row, the first context included
    max_turn_len    tokens of an answer
    log_dir         where the output of the environments' workers goes
    images          bounds of the images that environments give; None: the model sees text alone
    placeholder_id  the token that stands for a piece of an image
    image_marks     tokens by which engines find images in ids, the placeholder among them
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


def environment_options(spec: EpisodeSpec, name: str) -> EnvironmentOptions:
    """Return the options of the workers of the collector `name`."""
    agents = spec.agents
    return EnvironmentOptions(
        kind=absolute(agents.environment),
        options=absolute(agents.options),
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


def absolute(value: Any) -> Any:
    """Return options with absolute paths of the files named as folder/file.py:name.

    They are looked for from the working directory, then beside the shipped recipes.
    """
    if isinstance(value, Mapping):
        return {key: absolute(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [absolute(item) for item in value]
    if not isinstance(value, str) or not re.fullmatch(r"[^:\s]+\.py:\w+", value):
        return value
    path, _, name = value.rpartition(":")
    return f"{Path(shipped_path(path)).absolute()}:{name}"
