"""What a recipe says of episodes, for collectors and for the checks before a run."""

from dataclasses import dataclass
from pathlib import Path

from mcore_rl.agents.environments.options import EnvironmentOptions
from mcore_rl.config import AgentsConfig


@dataclass(frozen=True)
class EpisodeSpec:
    """What a recipe says of episodes.

    model_path      directory with tokenizer and chat template
    max_tokens      tokens of a row, the first context included
    max_turn_len    tokens of an answer
    log_dir         where the output of the environments' workers goes
    """

    agents: AgentsConfig
    model_path: str
    trust_remote_code: bool
    architecture: str
    stop_token_ids: tuple[int, ...]
    max_tokens: int
    max_turn_len: int
    log_dir: Path


def environment_options(spec: EpisodeSpec, name: str) -> EnvironmentOptions:
    """Return the options of the workers of the collector `name`."""
    agents = spec.agents
    return EnvironmentOptions(
        kind=agents.environment,
        options=agents.options,
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
