"""Options of the run itself: folder, reward, evaluation, checkpoints, logs, cluster."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from mcore_rl.config.bounds import Options, bounded

_SET_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass
class RecoveryConfig(Options, group="run.recovery"):
    """Recovery of a run that loses ranks of trainer or critic, or its controller
    (docs/recovery.md)."""

    partner: Literal["memory", "none"] = "memory"
    """memory: after each step, ranks copy their state to host memory that outlives them; if a rank
    dies or hangs, it is replaced, and all ranks of its model go on from there, and so does another
    controller if it is lost. none: the run ends, and the same command continues from the newest
    checkpoint."""
    restarts: int | None = bounded(None, ge=0)
    """Recoveries within an hour, at most, and as many controllers in the place of lost ones; beyond
    them the run ends. None: 4, and one more recovery for every 256 ranks of trainer and critic.
    0: as partner=none."""
    min_dp: int | None = bounded(None, ge=1)
    """If a node is lost and no other one has room for its ranks: the smallest data-parallel size
    with which trainer and critic go on, each rank with more of the batch, until nodes have room for
    more ranks again. None: the run ends."""

    @property
    def is_used(self) -> bool:
        return self.partner != "none" and self.restarts != 0

    def limit_restarts(self, num_ranks: int) -> int:
        """Return the recoveries within an hour that a run with so many ranks has."""
        return 4 + num_ranks // 256 if self.restarts is None else self.restarts


@dataclass
class RunConfig(Options, group="run"):
    dir: str = ""
    """Folder of everything the run writes: logs, metrics, checkpoints, export, summary."""
    seed: int = bounded(0, ge=0)
    """Seed of sampling, shuffling and random weights."""
    steps: int = bounded(100, ge=1)
    """Steps of the loop: each samples a rollout and trains on it."""
    epochs: float | None = bounded(None, gt=0)
    """Passes over data.train, in place of `steps`: rows of its files by rollout.prompts_per_step;
    None: `steps` counts."""
    resume: bool | Literal["newest_whole"] = True
    """Continue from the newest checkpoint in `dir` whose files are all there and of the right
    sizes; one with damaged bytes ends the start. newest_whole: read checkpoints first, and continue
    from the newest whole one. Damaged ones are named and renamed."""
    call_timeout_s: float = bounded(600.0, gt=0)
    """Deadline of any one call to the ranks or engines (a step, a save, a weight sync)."""
    startup_timeout_s: float = bounded(240.0, gt=0)
    """For ranks and engines to start and load the model."""
    grace_s: float = bounded(30.0, ge=0)
    """From SIGTERM or SIGUSR1 to the end of the run. It saves at the end of its step or, if that
    takes longer than half of the grace, as soon as it does not train, and exits with status 75;
    SIGTERM ends it after the grace at the latest. 0: SIGTERM ends it at once, SIGUSR1 after its
    step (docs/checkpoints.md)."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    debug: bool = False
    """For a debugger (docs/debugging.md): deadlines are a week, breakpoints of ranks are named on
    the terminal, and collectors call the reward function themselves, despite reward.workers."""


@dataclass
class JudgeConfig(Options, group="reward.judge"):
    """The question about each sample to the model in the group `judge`, and its answer."""

    template: str = "recipes/rewards/judge.jinja"
    """Jinja file of the question, with prompt, response, ground_truth, messages, data_source,
    extra_info."""
    verdict: str = r"(?i)verdict:[\s*_]*([-+]?(?:\d+(?:\.\d+)?|[a-zA-Z]+))"
    """Regular expression whose one group is the verdict; if an answer has several, the last one
    counts."""
    words: dict[str, float] = field(default_factory=dict)
    """Values of verdicts in words, such as {correct: 1, incorrect: 0}; empty: verdicts are
    numbers."""
    low: float = 0.0
    """A verdict below this or above `high` is invalid."""
    high: float = 1.0
    """The largest valid verdict."""
    temperature: float = bounded(0.0, ge=0)
    """Temperature of the judge's answers; 0: greedy."""
    max_tokens: int = bounded(1024, ge=1)
    """Tokens of the judge's answer, at most."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, such as {chat_template_kwargs: {enable_thinking: false}}."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        for word, value in self.words.items():
            if not self.low <= value <= self.high:
                raise ValueError(
                    f"reward.judge.words: {word}={value} lies outside reward.judge.low={self.low}"
                    f" to reward.judge.high={self.high}"
                )


@dataclass
class RewardConfig(Options, group="reward"):
    path: str = ""
    """Python file; a relative path is looked up from the working directory, then beside
    recipes/."""
    name: str = "reward"
    """Function in that file."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function, such as {sandbox_url: "http://10.0.0.7:8080"}."""
    parts: list[str] = field(default_factory=list)
    """Numbers that the reward is the weighted sum of: names that the function returns, "judge" and
    "reward_model". Empty: the function's "score", or the only model's number if there is no
    function."""
    weights: list[float] = field(default_factory=list)
    """One per part."""
    on_error: Literal["leave_out", "value", "stop"] = "leave_out"
    """When a function or model fails or does not answer in time. leave_out: no step trains on the
    sample, and its group is compared without it; value: its reward is `error_value`; stop: the
    run ends. An episode whose environment failed or was lost is left out in each case."""
    error_value: float | None = None
    """on_error=value: reward of a sample whose reward failed."""
    max_failed_share: float = bounded(0.25, ge=0, le=1)
    """Share of the samples of a step, or of an evaluation, whose rewards or environments may fail;
    beyond it the run ends. It counts from 8 failures on, or if all samples failed. 1: no bound."""
    workers: int = bounded(0, ge=0)
    """Processes that call the function, sample by sample; 0: the controller calls it."""
    timeout_s: float = bounded(30.0, gt=0)
    """Per sample. Sync functions are timed only in worker processes, which are killed on
    timeout."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    model_tokenizer: str = ""
    """Directory of the reward model's tokenizer and chat template, if not reward_model.path."""
    overlong_buffer_len: int = bounded(0, ge=0)
    """Tokens before rollout.max_response_len over which a penalty grows; 0: none (DAPO)."""
    overlong_penalty: float = bounded(1.0, ge=0)
    """Subtracted from the reward of a response of the full length."""
    noise: float = bounded(0.0, ge=0)
    """Add to each part of a reward a pseudo-random number in [0, noise) made of prompt and
    response; rehearse=true sets it, as a random model earns nothing that could move its weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.parts) != len(self.weights):
            raise ValueError(
                f"reward.parts={self.parts} and reward.weights={self.weights}: there must be one"
                " per part"
            )
        if self.on_error == "value" and self.error_value is None:
            raise ValueError(
                "reward.on_error=value without reward.error_value: say what a reward that failed"
                " counts as, such as reward.error_value=0, or set reward.on_error=leave_out"
            )

    @property
    def part_weights(self) -> dict[str, float]:
        return dict(zip(self.parts, self.weights, strict=True))


@dataclass
class EvalSetConfig(Options, group="eval.sets"):
    """Held-out prompts whose metrics are also logged alone."""

    name: str = ""
    """Letters, digits, ".", "_" and "-"; metrics are named eval/<name>/..."""
    path: str = ""
    """A file, folder or glob, as in data.train."""
    model: Literal["policy", "base"] = "policy"
    """Who answers. base: the weights below low-rank factors (train.lora.sync=adapter), whose
    answers don't count in the metrics of all prompts."""


@dataclass
class EvalConfig(Options, group="eval"):
    data: list[str] = field(default_factory=list)
    """Prompt files, as in data.train; empty, and without eval.sets: no evaluation."""
    sets: list[EvalSetConfig] = field(default_factory=list)
    """Further held-out data sets, each with a name (docs/recipes.md)."""
    every_steps: int = bounded(0, ge=0)
    """0: only before the first and after the last step."""
    max_prompts: int = bounded(256, ge=1)
    """Prompts of eval.data, and of each entry of eval.sets, at most: the first ones."""
    samples: int = bounded(0, ge=0)
    """Samples of each prompt that avg@n and pass@k are estimated from, besides the greedy one; 0:
    pass_k of them, or none if pass_k=1."""
    pass_k: int = bounded(1, ge=1)
    """Report pass@k of so many samples; more samples than that make the estimate better."""
    temperature: float | None = bounded(None, gt=0)
    """Temperature of these samples; None: rollout.temperature."""
    top_p: float | None = bounded(None, gt=0, le=1)
    """Nucleus of these samples; None: rollout.top_p."""
    max_response_len: int = bounded(0, ge=0)
    """Tokens of each response, greedy ones included; 0: rollout.max_response_len."""
    correct_part: str = ""
    """Part of the reward that says whether an answer is right; empty: the reward before
    penalties."""
    correct_at: float | None = None
    """Least value of a right answer; None: full marks, 1 for a number that rates an answer from 0
    to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in self.sets:
            if not _SET_NAME.fullmatch(each.name) or not each.path:
                raise ValueError(
                    f"eval.sets: an entry has name={each.name!r} and path={each.path!r}; give"
                    " both, such as {name: aime24, path: data/aime24.parquet}, with a name of"
                    " letters, digits, '.', '_' and '-'"
                )
        names = [each.name for each in self.sets]
        if "preference" in names:
            raise ValueError("eval.sets: name=preference is taken by dpo.held_out; take another")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"eval.sets: {', '.join(twice)} names several entries; one entry may have a folder"
                " or a glob as its path"
            )
        if self.samples and self.samples < self.pass_k:
            raise ValueError(
                f"eval.samples={self.samples} is less than eval.pass_k={self.pass_k}: pass@"
                f"{self.pass_k} takes at least {self.pass_k} samples of a prompt; raise"
                " eval.samples, or set it to 0"
            )

    @property
    def files(self) -> list[str]:
        """All files with held-out prompts: first eval.data, then the sets."""
        return [*self.data, *(each.path for each in self.sets)]

    @property
    def num_samples(self) -> int:
        """Samples of each prompt besides the greedy one."""
        return self.samples or (self.pass_k if self.pass_k > 1 else 0)

    def reduce_to(self, file: str, max_prompts: int) -> "EvalConfig":
        """Return these options with greedy answers alone, to a few prompts of one file."""
        return EvalConfig(
            data=[file],
            every_steps=self.every_steps,
            max_prompts=max_prompts,
            correct_part=self.correct_part,
            correct_at=self.correct_at,
        )


@dataclass
class CheckpointConfig(Options, group="checkpoint"):
    every_steps: int = bounded(0, ge=0)
    """0: only after the last step."""
    keep: int = bounded(2, ge=1)
    """Newest checkpoints that are kept; older ones are deleted."""
    keep_best: int = bounded(0, ge=0)
    """So many checkpoints with the best `best_metric` are kept, too, however old; 0: none."""
    best_metric: str = "eval/greedy_accuracy"
    """Metric, logged at the step of a checkpoint, by which keep_best compares (docs/metrics.md)."""
    best_value: Literal["highest", "lowest"] = "highest"
    """Which value of best_metric is the best one."""
    asynchronous: bool = True
    """Write a checkpoint while training goes on."""
    on_error: Literal["end", "continue"] = "end"
    """When a checkpoint cannot be written: the disk is full, read-only or fails. end: the run ends;
    continue: it says so, goes on, and tries again when the next checkpoint is due."""
    verify: bool = True
    """Compare a checkpoint with its checksums.json before resuming from it; all ranks read it once
    together.
    """
    export_hf: bool = True
    """Write the final policy to <run.dir>/hf."""
    export_every_steps: int = bounded(0, ge=0)
    """With every checkpoint of a step that this divides, also write the policy to
    <run.dir>/hf_steps/step_000010; training waits for it. A multiple of every_steps; 0: none."""
    hub_repo: str = ""
    """owner/name on the Hugging Face hub to which <run.dir>/hf is uploaded after the last step; a
    repository that is not there is created, private. Empty: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        exports, saves = self.export_every_steps, self.every_steps
        if exports and (not saves or exports % saves):
            raise ValueError(
                f"checkpoint.export_every_steps={exports} must be a multiple of"
                f" checkpoint.every_steps={saves}, since exports come with checkpoints;"
                f" set both, such as to {exports}"
            )


@dataclass
class TrackingConfig(Options, group="log.tracking"):
    """How trackers file the run; each takes what it has."""

    name: str = ""
    """Name of the run; empty: that of its folder."""
    entity: str = ""
    """Team of W&B, workspace of SwanLab, Space of trackio (owner/name); empty: one's own."""
    group: str = ""
    """Group of runs; in MLflow the experiment, "mcore_rl" if this is empty; in ClearML a project
    within the project."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run; trackio has none."""
    samples: int = bounded(0, ge=0, le=64)
    """Samples of each step, and of each evaluation, that trackers get as a table, MLflow also as
    traces; 0: none."""
    charts: Literal["first", "all"] = "first"
    """Charts that W&B and SwanLab show by themselves: the first ones (docs/monitoring.md), or those
    of all metrics. The others are logged too, and wait among the hidden ones."""


@dataclass
class LogConfig(Options, group="log"):
    console: bool = True
    """Print a line per step."""
    tensorboard: bool = True
    """Write metrics for TensorBoard to <run.dir>/tensorboard."""
    wandb_project: str | None = None
    """Project of Weights & Biases to log to; None: none."""
    mlflow_uri: str | None = None
    """Tracking server of MLflow to log to; None: none."""
    trackio_project: str | None = None
    """Project of trackio to log to; None: none."""
    swanlab_project: str | None = None
    """Project of SwanLab to log to; None: none."""
    clearml_project: str | None = None
    """Project of ClearML to log to; None: none."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    prometheus_port: int | None = bounded(None, ge=0, le=65535)
    """Port of this process at which Prometheus reads /metrics while the run goes on; 0: a free one;
    None: none (docs/monitoring.md)."""
    prometheus_host: str = "127.0.0.1"
    """Address that prometheus_port is bound to; 0.0.0.0: all of this machine's, without a key."""
    token_samples: int = bounded(4, ge=0)
    """Samples of a step, and of an evaluation, whose tokens samples.jsonl has with the engine's
    log-probs and the weights that sampled them: about 15 bytes a token; 0: none."""
    rotate_mib: int = bounded(256, ge=0)
    """Size in MiB at which a file of rows or a log of a process becomes a numbered segment and a
    new one begins; 0: never."""

    @property
    def rotate_bytes(self) -> int:
        return self.rotate_mib << 20


@dataclass
class ProfileConfig(Options, group="profile"):
    """Captures of what chosen trainer ranks do in chosen optimizer steps, in <run.dir>/profile."""

    steps: list[int] = field(default_factory=list)
    """Optimizer steps of the policy, from 1; empty: none."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Trainer ranks, from 0."""
    tool: Literal["torch", "nsys"] = "torch"
    """torch: a trace that Perfetto (ui.perfetto.dev) opens; nsys: Nsight Systems, which has to be
    installed where the ranks run."""

    def check(self, num_ranks: int) -> None:
        """Raise ValueError if a step or rank cannot be; there are `num_ranks` trainer ranks."""
        for step in self.steps:
            if step < 1:
                raise ValueError(
                    f"profile.steps={self.steps}: steps are counted from 1, not {step}"
                )
        for rank in self.ranks:
            if not 0 <= rank < num_ranks:
                raise ValueError(
                    f"profile.ranks={self.ranks}: there are {num_ranks} trainer ranks, counted from"
                    f" 0; {rank} is none of them"
                )


@dataclass
class ClusterConfig(Options, group="cluster"):
    gpus: int | None = bounded(None, ge=1)
    """GPUs of the whole run, at most. Where parallel.dp is left out, it is the largest one for
    which trainer, critic, engines and served models fit into them; None: as many as the sizes
    make."""
    address: str | None = None
    """Ray address to join; None: start Ray on this machine for the length of the run."""
    num_nodes: int = bounded(1, ge=1)
    """Nodes of the joined cluster to wait for before anything is placed."""
    separate_nodes: bool = False
    """Trainer and critic run on other nodes than engines: those with Ray's resources trainer_node
    and engine_node, which `mcore-rl submit` gives them."""
    colocated: bool = False
    """Engines run on the trainer ranks' GPUs, rank by rank, and release their memory during
    training."""
    offload: bool = False
    """Trainer and critic keep weights, gradients and optimizer in host memory while others use
    the GPU."""
    cpus_per_rank: float = bounded(1.0, gt=0)
    """CPUs reserved in Ray for each rank; those that share a GPU share them, too."""
    dashboard: bool = False
    """The Ray that is started here has its dashboard, on loopback (docs/debugging.md)."""
    object_store_mib: int | None = bounded(None, ge=75)
    """Ray's shared memory on this machine, at least Ray's minimum; None: 8192 with GPUs, 512
    without. A cluster that is joined has its own."""
