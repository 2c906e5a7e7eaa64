"""The typed tree behind every recipe; a YAML key or value that does not fit it is refused by name.

Every option has a reader in the package. Units are in the names: _s seconds, _len tokens, _mib
2**20 bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from mcore_rl.config.agents import AgentsConfig
from mcore_rl.config.alarms import AlarmsConfig
from mcore_rl.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CovarianceConfig,
    KLConfig,
    PreferenceConfig,
    VespoConfig,
)
from mcore_rl.config.assumptions import PlanConfig, SimulateConfig
from mcore_rl.config.bounds import Options
from mcore_rl.config.data import (
    ColumnsConfig,
    CurriculumConfig,
    DataConfig,
    ImagesConfig,
    SourceConfig,
    StageConfig,
)
from mcore_rl.config.lora_checks import check_base_sets, check_lora, find_unread_beside_lora
from mcore_rl.config.rollout import (
    DriftConfig,
    ParityCheckConfig,
    RolloutConfig,
    ServedModelConfig,
    SyncConfig,
)
from mcore_rl.config.run import (
    CheckpointConfig,
    ClusterConfig,
    EvalConfig,
    EvalSetConfig,
    JudgeConfig,
    LogConfig,
    ProfileConfig,
    RewardConfig,
    RunConfig,
    TrackingConfig,
)
from mcore_rl.config.servers import SandboxConfig, SearchConfig
from mcore_rl.config.speculation import check_speculation, find_unread_in_speculation
from mcore_rl.config.training import (
    AdapterConfig,
    CriticConfig,
    CriticLoraConfig,
    DpoConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SftConfig,
    TrainConfig,
)
from mcore_rl.config.tree_checks import (
    Unread,
    check_agents,
    check_best,
    check_colocated,
    check_colocated_models,
    check_epochs,
    check_fake_quantization,
    check_overlong,
    check_quantization,
    check_recovery,
    check_replay,
    check_steps,
    fill_gpus,
    find_unread_in_cluster,
    find_unread_in_correction,
    find_unread_in_episodes,
    find_unread_in_kl,
    find_unread_in_optimizer,
    find_unread_in_profile,
    find_unread_in_recovery,
    find_unread_in_reward,
    find_unread_in_rollout,
    find_unread_in_served,
    find_unread_in_servers,
    find_unread_in_sync,
    find_unread_without_models,
    refuse,
)
from mcore_rl.config.turn_checks import check_turns
from mcore_rl.config.upstream import TO_SERVED, check_passed
from mcore_rl.config.upstream.groups import check_engines, check_optimizer, check_training

__all__ = [
    "AdapterConfig",
    "AgentsConfig",
    "AlarmsConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "ColumnsConfig",
    "Config",
    "CorrectionConfig",
    "CovarianceConfig",
    "CriticConfig",
    "CriticLoraConfig",
    "CurriculumConfig",
    "DataConfig",
    "DpoConfig",
    "DriftConfig",
    "EvalConfig",
    "EvalSetConfig",
    "ImagesConfig",
    "JudgeConfig",
    "KLConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParityCheckConfig",
    "PlanConfig",
    "PreferenceConfig",
    "ProfileConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SandboxConfig",
    "SearchConfig",
    "ServedModelConfig",
    "SftConfig",
    "SimulateConfig",
    "SourceConfig",
    "StageConfig",
    "SyncConfig",
    "TrackingConfig",
    "TrainConfig",
    "VespoConfig",
]


@dataclass
class Config(Options, group=""):
    rehearse: bool = False
    """Run the recipe's rehearsal instead: everything in its smallest size, on a laptop
    (docs/recipes.md)."""
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    agents: AgentsConfig = field(default_factory=AgentsConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)
    parity_check: ParityCheckConfig = field(default_factory=ParityCheckConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    judge: ServedModelConfig = field(default_factory=ServedModelConfig)
    reward_model: ServedModelConfig = field(default_factory=ServedModelConfig)
    teacher: ServedModelConfig = field(default_factory=ServedModelConfig)

    @property
    def served_groups(self) -> dict[str, ServedModelConfig]:
        """The groups of models that may be served beside the policy, by role."""
        return {"judge": self.judge, "reward_model": self.reward_model, "teacher": self.teacher}

    @property
    def served_models(self) -> dict[str, ServedModelConfig]:
        """The models that are served beside the policy, by role."""
        return {role: model for role, model in self.served_groups.items() if model.is_used}

    @property
    def engine_precision(self) -> str:
        """Return the precision of what engines hold: "fp8", "int4", or model.dtype."""
        quantization = self.rollout.quantization
        return self.model.dtype if quantization == "none" else quantization

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """All optimizers, by the dotted names of their groups."""
        return {
            "train.optimizer": self.train.optimizer,
            "critic.optimizer": self.critic.optimizer,
            "sft.optimizer": self.sft.optimizer,
            "dpo.optimizer": self.dpo.optimizer,
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster.gpus is not None and self.parallel.dp is None:
            self.parallel = fill_gpus(self.cluster.gpus, self.parallel, self._list_other_gpus())
        self.parallel.check("parallel")
        self.profile.check(self.parallel.world_size)
        self.critic.parallel.check("critic.parallel")
        for role, model in self.served_groups.items():
            model.check(role)
        for group, optimizer in self.optimizers.items():
            optimizer.check(group)
        check_quantization(self.rollout, self.model, self.train)
        check_fake_quantization(self.train, self.rollout)
        check_overlong(self.reward, self.rollout)
        check_best(self.checkpoint, self.eval)
        check_epochs(self.run, self.data)
        check_replay(self.train, self.drift)
        check_colocated_models(self.served_models, self.parallel, self.rollout)
        check_agents(self.agents, self.rollout)
        check_steps(self.algorithm, self.rollout, self.train, self.critic)
        check_lora(self.train, self.critic, self.optimizers, self.rollout)
        check_base_sets(self.eval, self.train.lora, self.agents)
        prompts = self.data, self.eval, self.rollout, self.agents, self.algorithm
        check_turns(self.train.lora, self.run, *prompts, self.checkpoint)
        check_recovery(self.run.recovery, self._layouts)
        if self.cluster.colocated:
            check_colocated(self.parallel, self.rollout)
        refuse(self, self._list_unread())
        self._check_upstream()

    def _list_unread(self) -> Iterator[Unread]:
        """Yield the options that nothing reads, by the groups whose values make them so."""
        yield from find_unread_in_rollout(self.rollout)
        yield from find_unread_in_speculation(self.rollout)
        yield from find_unread_in_kl(self.algorithm.kl)
        yield from find_unread_in_correction(self.algorithm.correction)
        yield from find_unread_in_reward(self.reward, self.agents.is_used)
        yield from find_unread_in_episodes(self.agents, self.eval)
        yield from find_unread_in_servers(self.sandbox, self.search)
        for role, model in self.served_groups.items():
            yield from find_unread_in_served(role, model)
        yield from find_unread_without_models(self.judge.is_used, self.reward_model.is_used)
        for group, optimizer in self.optimizers.items():
            yield from find_unread_in_optimizer(group, optimizer)
        yield from find_unread_beside_lora(self.train, self.critic, self.optimizers)
        yield from find_unread_in_cluster(self.cluster)
        yield from find_unread_in_recovery(self.run.recovery)
        yield from find_unread_in_profile(self.profile)
        yield from find_unread_in_sync(self.parity_check, self.sync)

    @property
    def _layouts(self) -> dict[str, ParallelConfig]:
        """Return the layouts of trainer and critic, if there is one, by their groups."""
        has_critic = self.algorithm.advantage == "gae"
        critic = {"critic.parallel": self.critic.parallel} if has_critic else {}
        return {"parallel": self.parallel, **critic}

    def _list_other_gpus(self) -> dict[str, int]:
        """Return the GPUs of a training run that are not its trainer's, by the options that set
        them.
        """
        others: dict[str, int] = {}
        if not self.cluster.colocated:
            others["rollout.engines"] = self.rollout.engines * self.rollout.engine_ranks
        if self.algorithm.advantage == "gae" and not self.critic.colocated:
            others["critic.parallel"] = self.critic.parallel.world_size
        for role, model in self.served_models.items():
            if model.path and not model.is_colocated:
                others[f"{role}.engines"] = model.engines * model.engine_ranks
        return others

    def _check_upstream(self) -> None:
        check_training("train", "parallel", self.train, self.train)
        check_training("critic", "critic.parallel", self.critic, self.train)
        for group, optimizer in self.optimizers.items():
            check_optimizer(group, optimizer)
        for role, model in self.served_groups.items():
            check_passed(f"{role}.sglang", model.sglang, TO_SERVED, {"engine": role})
        check_engines(self.rollout)
        check_speculation(self.rollout, self.drift, self.train)
