"""Options of the engines: how they sample, how weights reach them, how they are checked."""

from dataclasses import dataclass, field
from typing import Any, Literal

from mcore_rl.config.bounds import Options, bounded


@dataclass
class EnginesConfig(Options):
    """Engines of SGLang for one model: the policy, or a model that is served beside it."""

    engines: int = bounded(1, ge=1)
    """Number of engines."""
    tp: int = bounded(1, ge=1)
    """Tensor-parallel size of an engine."""
    ep: int = bounded(1, ge=1)
    """Expert-parallel size of an engine, within its tensor-parallel ranks."""
    pp: int = bounded(1, ge=1)
    """Pipeline stages of an engine."""
    max_concurrency: int = bounded(64, ge=1)
    """Requests in flight per engine."""
    kv_cache_len: int = bounded(65536, ge=1)
    """Tokens of KV cache per engine."""
    request_timeout_s: float = bounded(120.0, gt=0)
    """From a request's first try to the end of its last."""
    restarts: int = bounded(3, ge=0)
    """How often each engine's server is restarted in an hour; 0: a dead engine ends the run."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Further fields of SGLang's ServerArgs for the engines (docs/upstream_options.md)."""

    @property
    def engine_ranks(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp


@dataclass
class RolloutConfig(EnginesConfig, group="rollout"):
    attention_dp: int = bounded(1, ge=1)
    """Groups of an engine's tensor-parallel ranks that each hold all attention weights (DP
    attention)."""
    nodes_per_engine: int = bounded(0, ge=0)
    """Machines that an engine spans, with one server process on each; 0: as many as its GPUs
    fill."""
    quantization: Literal["none", "fp8", "int4"] = "none"
    """fp8: engines hold projections in 128 x 128 blocks of FP8; int4: routed experts in INT4, in
    groups of 32 columns. Trainer ranks quantize before sending."""
    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: sample and train in turns; one_step_off: sample the next step's rollout while
    training on this one; async: engines never wait for the trainer (docs/async.md)."""
    max_staleness: int = bounded(1, ge=1)
    """async: how many versions a sample's oldest token may lag behind the weights that train on
    it."""
    stale: Literal["wait", "drop", "correct"] = "wait"
    """async: how samples are kept within max_staleness. wait: a step includes the samples that
    would exceed it, and waits for them; drop: they are dropped and their prompts sampled again;
    correct: there is no bound; they are trained on when complete, weighted by
    algorithm.correction."""
    partial: Literal["continue", "wait", "restart"] = "continue"
    """async: what becomes of half-done responses when weights change. continue: they go on with
    the new weights and a recomputed KV cache; wait: the change waits for them; restart: they
    are sampled anew."""
    max_in_flight: int = bounded(0, ge=0)
    """one_step_off, async: unfinished samples over all engines; 0: max_concurrency for each
    engine."""
    prompts_per_step: int = bounded(32, ge=1)
    """Prompts of a step."""
    samples_per_prompt: int = bounded(8, ge=1)
    """Responses to each prompt: the group that an advantage compares."""
    dynamic_sampling: bool = False
    """Train only on groups whose rewards differ, and sample other prompts to replace the rest
    (DAPO)."""
    oversampling: float = bounded(1.0, ge=1)
    """dynamic_sampling: prompts sampled for each one that is missing."""
    max_rounds: int = bounded(8, ge=1)
    """dynamic_sampling: rounds per step; after the last one, the step trains on fewer prompts."""
    max_response_len: int = bounded(512, ge=1)
    """Tokens of a response, at most."""
    temperature: float = bounded(1.0, gt=0)
    """Divides the logits, in the engines and in the trainer."""
    top_p: float = bounded(1.0, gt=0, le=1)
    """Below 1, engines report log-probs of the distribution before the cut (docs/recipes.md)."""
    top_k: int = bounded(-1, ge=1, also=-1)
    """-1: all tokens. Otherwise engines report log-probs of the distribution before the cut."""
    max_concurrency: int = bounded(256, ge=1)
    migration_gap: int = bounded(0, ge=0)
    """A node's engine that has so many requests more than another hands some over, with the tokens
    drawn, once none waits to begin; 0: none moves."""
    min_free_kv: float = bounded(0.0, ge=0, lt=1)
    """Share of its KV cache that an engine must have free to be given a request; requests wait in
    their order until one has; 0: engines queue what they have no room for."""
    request_timeout_s: float = bounded(300.0, gt=0)
    """For one try of a request to an engine."""
    retries: int = bounded(3, ge=0)
    """How often a failed request is sent again."""
    stream_every: int = bounded(256, ge=0)
    """Tokens after which an engine sends what it has drawn of a response, so that another one
    goes on with it if the engine is lost; 0: it sends whole responses, and lost ones are drawn
    again (docs/debugging.md)."""
    stage_weights: bool = True
    """Receive weights into a second copy while decoding, and pause only to swap: the weights
    take twice the memory."""
    restarts: int = bounded(1, ge=0)
    """How often each engine's server and each collector is restarted in an hour; 0: its death ends
    the run."""
    min_engines: int = bounded(1, ge=1)
    """Engines that must be left for a run to go on when engines are lost with their nodes and no
    other node has room for them, or when engines are drained."""
    store_gib: float = bounded(0.0, ge=0)
    """Memory of each node for samples, as sampled, before further ones go to files; 0: no bound
    (mcore-rl plan says what they take at most)."""
    spill_dir: str = ""
    """Folder of these files, on a disk of each node; empty: the one for temporary files."""
    logprob_dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers that stores keep log-probs in. bfloat16 takes half the memory and is off by up to
    0.4 % of each log-prob, in ratios of policies, too."""
    deterministic: bool = False
    """Seed the sampling of each request: the same run samples the same tokens again."""
    speculate: Literal["none", "ngram", "mtp"] = "none"
    """Engines guess several tokens and check them in one pass. Tokens are drawn with the same
    probabilities. ngram: they guess from what they have seen; mtp: with the layer that
    train.mtp_loss trains, which weight sync sends them (docs/speculation.md)."""
    speculate_tokens: int = bounded(3, ge=1, le=63)
    """ngram, mtp: guesses that a pass checks for each request."""
    speculate_when: Literal["faster", "always"] = "faster"
    """ngram, mtp: engines check guesses where they measure that tokens come faster with them, or in
    every pass (docs/speculation.md)."""
    compiled: bool = True
    """Engines on a CPU compute the models that docs/cpu.md names in compiled code, if there is a
    C compiler. false: in SGLang's own layers, slower, as rehearsals do."""
    share_prompts: bool | None = None
    """Samples of a prompt wait until an engine has computed it once: a rule of our own in
    SGLang's scheduler. false: SGLang's own, by which samples that are admitted together compute
    it each. None: ours where an engine has no GPU; it was not measured on one (docs/patches.md)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_mode()
        if self.min_engines > self.engines:
            raise ValueError(
                f"rollout.min_engines={self.min_engines} is more than rollout.engines="
                f"{self.engines}: lower it, at least 1"
            )
        for name in ("ep", "attention_dp"):
            if self.tp % getattr(self, name):
                raise ValueError(
                    f"rollout.{name}={getattr(self, name)} does not divide rollout.tp={self.tp}"
                )
        if self.engine_ranks % max(self.nodes_per_engine, 1):
            raise ValueError(
                f"rollout.nodes_per_engine={self.nodes_per_engine} does not divide"
                f" rollout.tp * rollout.pp = {self.engine_ranks}"
            )

    def _check_mode(self) -> None:
        if self.migration_gap and self.deterministic:
            raise ValueError(
                f"rollout.migration_gap={self.migration_gap} with rollout.deterministic=true: which"
                " responses move depends on when others end, so no run is repeated; set"
                " rollout.migration_gap=0"
            )
        if self.max_in_flight and self.max_in_flight < self.samples_per_prompt:
            raise ValueError(
                f"rollout.max_in_flight={self.max_in_flight}: the samples of one prompt,"
                f" rollout.samples_per_prompt={self.samples_per_prompt}, must fit"
            )
        if self.mode == "async" and self.deterministic:
            raise ValueError(
                "rollout.mode=async with rollout.deterministic=true: which weights draw a token"
                " depends on when it is drawn, so no run is repeated; use"
                " rollout.mode=one_step_off or sync"
            )
        if self.mode == "async" and self.partial == "continue" and self.pp > 1:
            raise ValueError(
                f"rollout.partial=continue with rollout.pp={self.pp}: SGLang cannot pause an engine"
                " of several stages half-way through responses; use rollout.partial=wait"
            )

    @property
    def staleness_bound(self) -> int:
        """Largest lag, in versions, of a sample's oldest token behind the weights that
        train on it.
        """
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.mode]

    @property
    def cuts_distribution(self) -> bool:
        """Return whether tokens are drawn from fewer than all, which engines' log-probs do not
        show.
        """
        return self.top_p < 1 or self.top_k != -1


@dataclass
class ServedModelConfig(EnginesConfig):
    """Engines for another model, or a server that runs already; neither by default."""

    path: str = ""
    """HuggingFace directory, or hub id, to start engines for."""
    url: str = ""
    """Address of a running server with an OpenAI-compatible API, instead of `path`."""
    url_model: str = ""
    """Model to ask `url` for; empty: the first that it lists."""
    api_key_env: str = ""
    """Environment variable that holds the key for `url`; empty: no key."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "bfloat16"
    """auto: the one that its config.json names."""
    startup_timeout_s: float = bounded(600.0, gt=0)
    """For its engines to start and load it."""
    colocated: bool = False
    """Its engines take turns with the trainer ranks on their GPUs; otherwise they have their
    own."""

    @property
    def is_used(self) -> bool:
        return bool(self.path or self.url)

    @property
    def is_colocated(self) -> bool:
        """Return whether its engines share the trainer ranks' GPUs, where there is a trainer."""
        return bool(self.path) and self.colocated

    def check(self, role: str) -> None:
        """Raise ValueError if options contradict one another; `role` names their group."""
        if self.path and self.url:
            raise ValueError(
                f"{role}.path={self.path} with {role}.url={self.url}: engines are started or a"
                " running server is used; leave one empty"
            )
        for name in ("url_model", "api_key_env"):
            if getattr(self, name) and not self.url:
                raise ValueError(
                    f"{role}.{name}={getattr(self, name)}: engines of the run need none; it belongs"
                    f" to {role}.url"
                )
        if self.colocated and (self.url or self.restarts):
            raise ValueError(
                f"{role}.colocated=true with {role}.url={self.url!r} and"
                f" {role}.restarts={self.restarts}: it is for engines of the run, and a server that"
                f" starts would take the memory that training uses; set {role}.path and"
                f" {role}.restarts=0"
            )
        if self.tp % self.ep:
            raise ValueError(f"{role}.ep={self.ep} does not divide {role}.tp={self.tp}")


@dataclass
class SyncConfig(Options, group="sync"):
    bucket_mib: float = bounded(4.0, gt=0)
    """Size of the buffers that weights travel in; each end of a link has four of them."""
    delta: Literal["off", "auto", "always"] = "auto"
    """Between machines, send what changed since the last sync. auto: where weights go from host to
    host; always: from GPU to GPU, too, by the hosts instead of NCCL, for slow networks. Both ends
    keep a copy of what travels so."""
    pull: bool = False
    """Engines read weights from the trainer's GPU memory into their parameters, where both are on
    one GPU or linked by NVLink, without buckets in between."""
    relay: bool = True
    """Engines with equal layouts pass weights on to one another; otherwise trainer ranks send
    to each engine."""
    trace: Literal["sampled", "full"] = "sampled"
    """sampled: of layers that are alike, link engines by a trace of one and samples of the others,
    and compare a trace of all after the first sync; full: trace all before engines are linked."""
    verify: Literal["transfer", "destination"] = "destination"
    """transfer: compare each slice's checksum as it arrives; destination: also read slices back
    from the engine's live parameters, before it serves them, and compare those."""
    verify_every: int = bounded(10, ge=1)
    """verify=destination: read back a link's first four syncs and every so many after them."""

    @property
    def reads_back_every(self) -> int:
        """How many syncs come to one that is read back; 0: none is."""
        return self.verify_every if self.verify == "destination" else 0


@dataclass
class DriftConfig(Options, group="drift"):
    """Differences between the trainer's and the engine's log-probs of sampled tokens."""

    routed_experts: bool = True
    """Ask engines which experts each token went to, and count the tokens that the trainer
    routes otherwise."""
    indexer_topk: bool = False
    """Ask engines of a model with sparse attention which keys each token attends to, for
    train.indexer_replay=engine: 2 or 4 bytes for each layer and chosen key of a token."""
    warn_above: float | None = bounded(None, ge=0)
    """Mean |difference| in nats, over tokens drawn from the weights that train, above which a step
    logs a warning; None: 1e-3 with engines in float32, 0.03 in bfloat16, 0.15 in fp8; 0: never."""
    stop_above: float | None = bounded(None, ge=0)
    """The same, above which the run stops after the step is logged; None: 0.01 in float32, 0.3 in
    bfloat16, 0.5 in fp8; 0: only for a NaN. With fewer than 256 such tokens, wider bounds count for
    all tokens (docs/async.md)."""


@dataclass
class ParityCheckConfig(Options, group="parity_check"):
    """After each weight sync, engines and trainer score the same few sequences."""

    sequences: int = bounded(4, ge=0)
    """Number of sequences, taken from the step's own samples; up to 64 if that many have fewer than
    1,024 tokens; 0: no check."""
    tolerance: float | None = bounded(None, gt=0)
    """Mean |difference| in nats above which an engine leaves the rotation; None: learned from syncs
    whose weights were read back (sync.verify), and at most 1e-3 nats of rounding per logit with
    engines in float32, 0.5 in bfloat16, 1 in fp8."""
    factor: float = bounded(2.0, gt=1)
    """tolerance=None: an engine leaves the rotation when rounding seems to have grown to so many
    times what is usual in this run; a warning until four syncs were read back."""
