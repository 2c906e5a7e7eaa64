"""The typed tree behind every recipe; a YAML key or value that does not fit it is refused by name.

Every leaf has a reader in the package. Units are in the names: _s seconds, _len tokens, _mib 2**20 bytes.
"""

from dataclasses import dataclass, field

from mcore_rl.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CovarianceConfig,
    KLConfig,
    PreferenceConfig,
)
from mcore_rl.config.rollout import (
    CanaryConfig,
    DriftConfig,
    PlanConfig,
    RolloutConfig,
    SyncConfig,
)
from mcore_rl.config.run import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    RewardConfig,
    RunConfig,
)
from mcore_rl.config.served import ServedModelConfig
from mcore_rl.config.training import (
    CriticConfig,
    DpoConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SftConfig,
    TrainConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CanaryConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CorrectionConfig",
    "CovarianceConfig",
    "CriticConfig",
    "DataConfig",
    "DpoConfig",
    "DriftConfig",
    "EvalConfig",
    "KLConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PlanConfig",
    "PreferenceConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "ServedModelConfig",
    "SftConfig",
    "SyncConfig",
    "TrainConfig",
]


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    judge: ServedModelConfig = field(default_factory=ServedModelConfig)
    reward_model: ServedModelConfig = field(default_factory=ServedModelConfig)
    teacher: ServedModelConfig = field(default_factory=ServedModelConfig)

    @property
    def served_models(self) -> dict[str, ServedModelConfig]:
        """The models that are served beside the policy, by role."""
        models = {"judge": self.judge, "reward_model": self.reward_model, "teacher": self.teacher}
        return {role: model for role, model in models.items() if model.is_used}

    def __post_init__(self) -> None:
        for role, model in self.served_models.items():
            model.check(role)
        if self.rollout.quantization == "fp8" and self.model.dtype != "bfloat16":
            raise ValueError(
                f"rollout.quantization=fp8 with model.dtype={self.model.dtype}: needs model.dtype=bfloat16"
            )
        _check_replay(self.train, self.algorithm, self.drift)
        if self.cluster.colocated:
            _check_colocated(self.parallel, self.rollout)
        self._check_teacher()
        num_steps = self.train.mini_batches * self.train.epochs
        if self.algorithm.advantage == "dpo" and num_steps > 1:
            raise ValueError(
                f"algorithm.advantage=dpo with train.mini_batches * train.epochs = {num_steps}: the pairs'"
                " gradient is that of the policy before the first of these steps; set both to 1"
            )
        if self.rollout.stale == "correct" and not self.algorithm.correction.is_on:
            raise ValueError(
                "rollout.stale=correct with algorithm.correction.weight=none and bypass=false: none corrects;"
                " set algorithm.correction.weight=token, or rollout.stale=wait"
            )
        if self.has_critic and self.critic.colocated:
            _check_critic_fits(self.critic.parallel, self.parallel)
        shared = self.cluster.colocated or (self.has_critic and self.critic.colocated)
        if self.cluster.offload and not shared:
            raise ValueError(
                "cluster.offload=true: nobody else is on the trainer ranks' GPUs; set cluster.colocated=true,"
                " critic.colocated=true or cluster.offload=false"
            )
        num_samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        for name, mini_batches in (("train", self.train.mini_batches), ("critic", self.critic.mini_batches)):
            if num_samples % mini_batches:
                raise ValueError(
                    f"rollout.prompts_per_step * rollout.samples_per_prompt = {num_samples} is not divisible"
                    f" by {name}.mini_batches={mini_batches}"
                )

    @property
    def has_critic(self) -> bool:
        return self.algorithm.needs_critic


def _check_critic_fits(critic: ParallelConfig, trainer: ParallelConfig) -> None:
    if critic.world_size > trainer.world_size:
        raise ValueError(
            f"critic.colocated=true with {critic.world_size} ranks by critic.parallel: there are"
            f" {trainer.world_size} by parallel to share a GPU with; lower critic.parallel.*"
        )

    def _check_teacher(self) -> None:
        distils = self.algorithm.advantage == "distillation"
        if distils and not self.teacher.path:
            raise ValueError(
                f"algorithm.advantage=distillation with teacher.path='' and teacher.url={self.teacher.url!r}:"
                " a teacher is asked about token ids, by SGLang's own interface; set teacher.path"
            )
        if self.teacher.is_used and not distils:
            raise ValueError(
                f"teacher.path={self.teacher.path} with algorithm.advantage={self.algorithm.advantage}:"
                " nothing asks the teacher; set algorithm.advantage=distillation"
            )
        if distils and self.rollout.temperature != 1:
            raise ValueError(
                f"algorithm.advantage=distillation with rollout.temperature={self.rollout.temperature}: a"
                " teacher's log-probs are those at temperature 1; set rollout.temperature=1"
            )


def _check_replay(train: TrainConfig, algorithm: AlgorithmConfig, drift: DriftConfig) -> None:
    if train.router_replay == "engine" and not drift.routed_experts:
        raise ValueError(
            "train.router_replay=engine with drift.routed_experts=False: engines are not asked for their"
            " experts; set drift.routed_experts=true"
        )
    has_old_pass = train.epochs * train.mini_batches > 1 or algorithm.needs_old_logprobs
    if train.router_replay == "old_pass" and (algorithm.correction.bypass or not has_old_pass):
        raise ValueError(
            f"train.router_replay=old_pass with train.mini_batches={train.mini_batches}, train.epochs="
            f"{train.epochs} and algorithm.correction.bypass={algorithm.correction.bypass}: there is no pass"
            " for the old log-probs; set train.router_replay=engine or none"
        )


def _check_colocated(parallel: ParallelConfig, rollout: RolloutConfig) -> None:
    needed = rollout.engines * rollout.engine_ranks
    if needed > parallel.world_size:
        raise ValueError(
            f"cluster.colocated=true with rollout.engines * rollout.tp * rollout.pp = {needed}: there are"
            f" parallel.world_size={parallel.world_size} trainer ranks to share a GPU with"
        )
    for name, needs, why in (
        ("mode", "sync", "an engine cannot generate while its GPUs train"),
        ("stage_weights", False, "there is no memory for the weights twice"),
        ("restarts", 0, "a server that starts would take the memory that training uses"),
    ):
        if getattr(rollout, name) != needs:
            raise ValueError(
                f"cluster.colocated=true with rollout.{name}={getattr(rollout, name)}: {why};"
                f" set rollout.{name}={str(needs).lower()}"
            )
