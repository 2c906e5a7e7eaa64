"""Options of episodes: the environment, the worker processes it runs in, how long they go on."""

from dataclasses import dataclass, field
from typing import Any, Literal

from mcore_rl.config.bounds import Options, bounded


@dataclass
class AgentsConfig(Options, group="agents"):
    environment: str = ""
    """Kind of the environment that the policy talks with (docs/agents.md), or a class of your own
    as module:Class or folder/file.py:Class; empty: a sample is one response."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the environment itself."""
    max_turns: int = bounded(16, ge=1)
    """Answers of the policy in an episode."""
    max_turn_len: int = bounded(0, ge=0)
    """Tokens of one answer; 0: up to rollout.max_response_len, which bounds what follows the first
    prompt in all, answers and messages of the environment."""
    deadline_s: float = bounded(600.0, gt=0)
    """For a whole episode, once its environment is reset."""
    max_bad_calls: int = bounded(3, ge=0)
    """Answers in a row whose tool calls cannot be executed, and that the policy is told of; the
    next one ends the episode."""
    reasoning: Literal["template", "keep"] = "template"
    """template: earlier reasoning leaves the context where the chat template leaves it out, which
    begins a new row; keep: it stays."""
    tool_parser: str = "auto"
    """SGLang's parser of tool calls; auto: by the model's architecture; none."""
    reasoning_parser: str = "auto"
    """SGLang's parser of reasoning; auto: by the model's architecture and template; none."""
    template: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""
    history: int = bounded(-1, ge=-1)
    """Earlier answers that the policy is shown, with what follows them and what came before the
    first; others are left out, which begins a new row. 0: the newest messages alone, besides
    those of the system; -1: all."""
    python: str = ""
    """Interpreter of the workers, for environments with packages of their own; empty: this one."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Environment variables of the workers."""
    workers: int = bounded(2, ge=1)
    """Worker processes on each node with engines, at most."""
    episodes_per_worker: int = bounded(64, ge=1)
    """Episodes of a worker process at a time, at most."""
    memory_gib: float = bounded(0.0, ge=0)
    """Memory of a worker with its processes; beyond it, it is ended. 0: no bound."""
    max_requests: int = bounded(0, ge=0)
    """Answers of the policy that are made for programs at once, on each node; 0: no bound."""
    min_free_kv: float = bounded(0.0, ge=0, lt=1)
    """Share of the KV cache that some engine must have free for another request of a program; 0:
    requests wait in the engines."""
    max_wait_s: float = bounded(30.0, ge=0)
    """How long a request beyond max_requests or min_free_kv waits for its turn, before the program
    is told to come again (HTTP 429)."""
    retry_after_s: float = bounded(1.0, gt=0)
    """When programs that were told so are to come again."""
    start_timeout_s: float = bounded(60.0, gt=0)
    """For a worker to start and import what it needs."""
    reset_timeout_s: float = bounded(120.0, gt=0)
    """For an environment to begin an episode."""
    step_timeout_s: float = bounded(120.0, gt=0)
    """For an environment to respond to an answer."""

    @property
    def is_used(self) -> bool:
        return bool(self.environment)
