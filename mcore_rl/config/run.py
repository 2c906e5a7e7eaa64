"""Options of the run itself: folder, data, reward, evaluation, checkpoints, logs, cluster."""

import re
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.config.checks import one_of, positive


@dataclass
class RunConfig:
    dir: str = ""
    """Folder of everything the run writes: logs, metrics, checkpoints, export, summary."""
    seed: int = 0
    steps: int = 100
    resume: bool = True
    """Continue from the newest complete checkpoint in `dir`, if there is one."""
    call_timeout_s: float = 600.0
    """Deadline of any one call to the ranks or engines (a step, a save, a weight sync)."""
    startup_timeout_s: float = 240.0

    def __post_init__(self) -> None:
        positive("run.steps", self.steps)
        positive("run.call_timeout_s", self.call_timeout_s)
        positive("run.startup_timeout_s", self.startup_timeout_s)


@dataclass
class DataConfig:
    train: list[str] = field(default_factory=list)
    """Prompt files, parquet (verl columns) or jsonl with the same keys."""
    max_prompt_len: int = 512
    overlong: str = "filter"
    shuffle: bool = True

    def __post_init__(self) -> None:
        one_of("data.overlong", self.overlong, ("filter", "error"))


@dataclass
class JudgeConfig:
    """What the model in the group `judge` is asked of each sample, and how its answer is read."""

    template: str = "recipes/rewards/judge.jinja"
    """Jinja file of the question, with prompt, response, ground_truth, messages, data_source, extra_info."""
    verdict: str = r"(?i)verdict:[\s*_]*([-+]?(?:\d+(?:\.\d+)?|[a-zA-Z]+))"
    """Regular expression whose one group is the verdict; of several in an answer the last counts."""
    words: dict[str, float] = field(default_factory=dict)
    """What verdicts in words are worth, {correct: 1, incorrect: 0}; empty: verdicts are numbers."""
    low: float = 0.0
    """A verdict below this or above `high` is none."""
    high: float = 1.0
    temperature: float = 0.0
    max_tokens: int = 1024
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, such as {chat_template_kwargs: {enable_thinking: false}}."""

    def __post_init__(self) -> None:
        try:
            num_groups = re.compile(self.verdict).groups
        except re.error as error:
            raise ValueError(f"reward.judge.verdict={self.verdict!r}: {error}") from None
        if num_groups != 1:
            raise ValueError(
                f"reward.judge.verdict={self.verdict!r}: has {num_groups} groups, needs one"
            )
        if self.low >= self.high:
            raise ValueError(
                f"reward.judge.low={self.low} is not below reward.judge.high={self.high}"
            )
        outside = [word for word, value in self.words.items() if not self.low <= value <= self.high]
        if outside:
            raise ValueError(
                f"reward.judge.words: {outside[0]}={self.words[outside[0]]} lies outside"
                f" reward.judge.low={self.low} to reward.judge.high={self.high}"
            )
        positive("reward.judge.max_tokens", self.max_tokens)


@dataclass
class RewardConfig:
    path: str = ""
    """Python file; a relative path is looked up from the working directory, then beside recipes/."""
    name: str = "reward"
    parts: list[str] = field(default_factory=list)
    """Names of the numbers that rewards are the weighted sum of: those that the function returns, "judge" and
    "reward_model"; empty: the function's "score", or what there is if there is no function."""
    weights: list[float] = field(default_factory=list)
    """One per part."""
    error_value: float = 0.0
    """Reward of a sample whose function or model failed or did not answer in time."""
    workers: int = 0
    """Processes that call the function, sample by sample; 0 calls it in the controller."""
    timeout_s: float = 30.0
    """Per sample; functions that are not async have it only in `workers`, which are killed for it."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    model_tokenizer: str = ""
    """Directory of the reward model's tokenizer and chat template, where it is not reward_model.path."""
    overlong_buffer_len: int = 0
    """Tokens before rollout.max_response_len over which a penalty grows; 0: none (DAPO)."""
    overlong_penalty: float = 1.0
    """What a response of the full length loses."""
    noise: float = 0.0
    """Add to each part of a reward a pseudo-random number in [0, noise) made of prompt and response;
    rehearse=true sets it, as a random model earns nothing that could move its weights."""

    def __post_init__(self) -> None:
        positive("reward.timeout_s", self.timeout_s)
        if self.noise < 0:
            raise ValueError(f"reward.noise={self.noise}: must not be negative")
        if len(self.parts) != len(self.weights):
            raise ValueError(
                f"reward.parts={self.parts} and reward.weights={self.weights}: there must be one per part"
            )
        for name in ("workers", "overlong_buffer_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"reward.{name}={getattr(self, name)}: must not be negative")

    @property
    def part_weights(self) -> dict[str, float]:
        return dict(zip(self.parts, self.weights, strict=True))


@dataclass
class EvalConfig:
    data: list[str] = field(default_factory=list)
    every_steps: int = 0
    """0 evaluates only before the first and after the last step."""
    max_prompts: int = 256
    pass_k: int = 1
    """Besides greedy accuracy, report pass@k from k samples at the rollout temperature; 1 leaves it out."""


@dataclass
class CheckpointConfig:
    every_steps: int = 0
    """0 saves only after the last step."""
    keep: int = 2
    asynchronous: bool = True
    verify: bool = True
    """Compare a checkpoint with its checksums.json before resuming from it; all ranks read it once together."""
    export_hf: bool = True
    """Write the final policy to <run.dir>/hf."""


@dataclass
class LogConfig:
    console: bool = True
    tensorboard: bool = True
    wandb_project: str | None = None
    mlflow_uri: str | None = None


@dataclass
class ClusterConfig:
    address: str | None = None
    """Ray address to join; None starts Ray on this machine for the length of the run."""
    colocated: bool = False
    """Engines run on the trainer ranks' GPUs, rank by rank, and give up their memory while those train."""
    offload: bool = False
    """Trainer, and critic, have weights, gradients and optimizer in host memory while others use the GPU."""
    cpus_per_rank: float = 1.0
    object_store_mib: int = 512
