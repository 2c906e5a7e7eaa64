"""Options of the engines: what they sample, how weights reach them, how they are checked."""

from dataclasses import dataclass

from mcore_rl.config.checks import one_of, positive


@dataclass
class RolloutConfig:
    engines: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    attention_dp: int = 1
    """Groups of an engine's tensor-parallel ranks that each hold all attention weights (DP attention)."""
    nodes_per_engine: int = 0
    """Machines that an engine spans, with one server process on each; 0: as many as its GPUs fill."""
    quantization: str = "none"
    """fp8: engines serve projections in 128 x 128 blocks of FP8, which trainer ranks compute as they send."""
    mode: str = "sync"
    """sync: sample, then train, in turns; one_step_off: the next step's samples are drawn while this one
    trains; async: engines never wait for the trainer (docs/async.md)."""
    max_staleness: int = 1
    """async: how many versions older than the weights that train on it a sample's oldest token may be."""
    stale: str = "wait"
    """async: what keeps samples from growing older than that. wait: a step takes those that would, and waits
    for them; drop: they are dropped, their prompts sampled again; correct: nothing does, they are trained on
    when they are done and weighed by algorithm.correction."""
    partial: str = "continue"
    """async: responses that are half done when weights change. continue: with the new weights, their KV cache
    computed anew; wait: the change waits for them; restart: they are sampled again from their beginning."""
    max_in_flight: int = 0
    """one_step_off, async: samples begun and not done, all engines together; 0: max_concurrency of each."""
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    dynamic_sampling: bool = False
    """Train on groups only whose rewards differ, and sample other prompts in place of the rest (DAPO)."""
    oversampling: float = 1.0
    """dynamic_sampling: prompts sampled for each that is missing."""
    max_rounds: int = 8
    """dynamic_sampling: rounds of a step; after the last, fewer prompts are trained on."""
    max_response_len: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_concurrency: int = 256
    """Requests in flight per engine."""
    kv_cache_len: int = 65536
    """Tokens of KV cache per engine."""
    request_timeout_s: float = 300.0
    retries: int = 3
    stage_weights: bool = True
    """Receive weights beside the decoding, pause only to swap them in; takes memory for the weights twice."""
    restarts: int = 1
    """How often the server of each engine is started again in a run; 0: a dead one ends the run."""
    deterministic: bool = False
    """Sampling seeded per request: the same run samples the same tokens again."""

    def __post_init__(self) -> None:
        sizes = ("engines", "tp", "ep", "pp", "attention_dp")
        for name in (*sizes, "prompts_per_step", "samples_per_prompt", "max_response_len"):
            positive(f"rollout.{name}", getattr(self, name))
        positive("rollout.temperature", self.temperature)
        positive("rollout.max_rounds", self.max_rounds)
        if self.oversampling < 1:
            raise ValueError(f"rollout.oversampling={self.oversampling}: must be at least 1")
        one_of("rollout.quantization", self.quantization, ("none", "fp8"))
        self._check_mode()
        for name in ("ep", "attention_dp"):
            if self.tp % getattr(self, name):
                raise ValueError(
                    f"rollout.{name}={getattr(self, name)} does not divide rollout.tp={self.tp}"
                )
        if self.nodes_per_engine < 0 or self.engine_ranks % max(self.nodes_per_engine, 1):
            raise ValueError(
                f"rollout.nodes_per_engine={self.nodes_per_engine} does not divide"
                f" rollout.tp * rollout.pp = {self.engine_ranks}"
            )

    def _check_mode(self) -> None:
        one_of("rollout.mode", self.mode, ("sync", "one_step_off", "async"))
        one_of("rollout.stale", self.stale, ("wait", "drop", "correct"))
        one_of("rollout.partial", self.partial, ("continue", "wait", "restart"))
        positive("rollout.max_staleness", self.max_staleness)
        only_async = {"max_staleness": 1, "stale": "wait", "partial": "continue"}
        unread = {} if self.mode == "async" else only_async
        unread = unread | ({"max_in_flight": 0} if self.mode == "sync" else {"oversampling": 1.0})
        for name, default in unread.items():
            if getattr(self, name) != default:
                raise ValueError(
                    f"rollout.{name}={getattr(self, name)} with rollout.mode={self.mode}, which has no use"
                    f" for it: leave rollout.{name} out, or choose another rollout.mode"
                )
        if self.max_in_flight and self.max_in_flight < self.samples_per_prompt:
            raise ValueError(
                f"rollout.max_in_flight={self.max_in_flight}: the samples of one prompt,"
                f" rollout.samples_per_prompt={self.samples_per_prompt}, must fit"
            )
        if self.mode == "async" and self.deterministic:
            raise ValueError(
                "rollout.mode=async with rollout.deterministic=true: which weights draw a token depends on"
                " when it is drawn, so no run is repeated; use rollout.mode=one_step_off or sync"
            )
        if self.mode == "async" and self.partial == "continue" and self.pp > 1:
            raise ValueError(
                f"rollout.partial=continue with rollout.pp={self.pp}: SGLang cannot pause an engine of"
                " several stages half-way through responses; use rollout.partial=wait"
            )

    @property
    def staleness_bound(self) -> int:
        """Versions between the oldest token of a sample and the weights that train on it, at most."""
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.mode]

    @property
    def engine_ranks(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp


@dataclass
class SyncConfig:
    bucket_mib: float = 4.0
    """Size of the buffers that weights travel in; each end of a link has four of them."""
    relay: bool = True
    """Engines with equal layouts pass weights on to one another; else trainer ranks send to each of them."""

    def __post_init__(self) -> None:
        positive("sync.bucket_mib", self.bucket_mib)


@dataclass
class DriftConfig:
    """How far the trainer's log-probs of sampled tokens may be from the engine's, and why they are."""

    routed_experts: bool = True
    """Ask engines which experts each token went to; count the tokens that the trainer routes otherwise."""
    warn_above: float = 0.0
    """Mean |difference| in nats beyond which a step warns; 0 never does."""
    stop_above: float = 0.0
    """Mean |difference| in nats beyond which the run stops, after the step is logged; 0 never does."""


@dataclass
class CanaryConfig:
    """After each weight sync, engines and trainer score the same few sequences."""

    sequences: int = 2
    """How many, out of the step's own samples; 0 checks nothing."""
    tolerance: float | None = None
    """Mean |difference| in nats beyond which an engine is taken out of rotation; None goes by model.dtype."""


@dataclass
class PlanConfig:
    """What `mcore-rl plan` assumes of the cluster."""

    link_gbps: float = 400.0
    """Speed of each rank's network link, 10**9 bits per second, in each direction."""
    ranks_per_host: int = 8
    gpu_memory_gib: float = 80.0
    process_gib: float = 5.0
    """What each process takes of it besides: CUDA context, NCCL, CUDA graphs, fragments."""
    expert_load: float = 1.25
    """Tokens of the experts of the fullest rank over the mean."""

    def __post_init__(self) -> None:
        for name in ("link_gbps", "ranks_per_host", "gpu_memory_gib", "process_gib"):
            positive(f"plan.{name}", getattr(self, name))
        if self.expert_load < 1:
            raise ValueError(f"plan.expert_load={self.expert_load}: must be at least 1")
