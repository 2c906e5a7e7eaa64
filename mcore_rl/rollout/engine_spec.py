"""The options of an SGLang engine, its command line, and the address at which it answers."""

from dataclasses import dataclass, field

from mcore_rl.process.network import is_loopback
from mcore_rl.process.server_keys import ServerKeys
from mcore_rl.rollout.adapters import AdapterSlots
from mcore_rl.rollout.speculation import Speculation

UNCOMPILED = "--uncompiled"
"""Argument of mcore_rl.rollout.server; see EngineSpec.compiled."""
SHARE_PROMPTS = "--share-prompts"
SHARE_PROMPTS_ON_CPU = "--share-prompts-on-cpu"
"""Arguments of mcore_rl.rollout.server; see EngineSpec.share_prompts."""
ADAPTERS = "--adapters"
"""Argument of mcore_rl.rollout.server, before encoded AdapterSlots."""
STATES_PER_REQUEST = 5
"""States of its linear attention that SGLang may keep for a request: its own, two in the cache of
prefixes, and two copies while steps overlap. Fewer, and SGLang runs fewer requests at once."""


@dataclass(frozen=True)
class EngineSpec:
    """The options of one engine: `tp` * `pp` ranks on `num_nodes` machines, with a server on each.

    Raises ValueError if sizes do not fit each other.

    dtype                  of weights and activations; not SGLang's auto, see served_models.py
    attention_dp           groups of the `tp` ranks that each hold all attention weights
    kv_cache_len           tokens of KV cache, all requests together
    max_running            requests decoded at once, and states of linear attention, where a model
                           has it: SGLang would give them half of what the weights leave
    weight_version         version of the weights in model_path, which samples report
    deterministic          honor the sampling seed of each request
    routed_experts         answer requests that ask which experts each token went to
    indexer_topk           answer requests that ask which keys indexers chose
    custom_weight_loaders  import paths of functions `load(model, named_tensors)` for weight updates
    tokenizer              take and give text, which needs the model's tokenizer; else token ids
    trust_remote_code      run Python code that comes with the model's configuration or tokenizer
    port                   None: a free one is found when the engine starts
    dist_init_addr         host:port where the ranks meet, needed if num_nodes > 1
    node_addresses         of all machines of an engine that spans several
    gpu_ids                GPUs of this machine that its ranks use, as CUDA_VISIBLE_DEVICES names
                           them; if empty, the first ones that it sees
    keys                   what requests must bring; None admits everyone on this machine, to all
    can_release_memory     its GPU memory can be released and occupied again while it runs
    compiled               on a CPU, run the models that it takes in compiled code (device/native)
    share_prompts          compute a prompt once for all samples of it that come at a time, by a
                           rule that replaces SGLang's (rollout/scheduler_setup.py); None: if
                           the engine has no GPU
    speculation            None: it checks no guesses
    adapters               those that it serves beside the weights; None: none
    batch_timeout_s        a server whose batch takes longer ends itself; SGLang looks at every half
                           of it
    extra_args             further SGLang command-line arguments
    """

    model_path: str
    log_path: str
    dtype: str = "float32"
    tp: int = 1
    ep: int = 1
    pp: int = 1
    attention_dp: int = 1
    kv_cache_len: int = 65536
    max_running: int = 256
    weight_version: int = 0
    deterministic: bool = False
    routed_experts: bool = False
    indexer_topk: bool = False
    custom_weight_loaders: tuple[str, ...] = ()
    tokenizer: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    host: str = "127.0.0.1"
    port: int | None = None
    num_nodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    node_addresses: tuple[str, ...] = ()
    gpu_ids: tuple[str, ...] = ()
    keys: ServerKeys | None = None
    can_release_memory: bool = False
    compiled: bool = True
    share_prompts: bool | None = False
    speculation: Speculation | None = None
    adapters: AdapterSlots | None = None
    batch_timeout_s: float = 300.0
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.dtype != "auto", "SGLang would serve float32 as float16: see served_models.py"
        if self.tp % self.ep:
            raise ValueError(f"ep={self.ep} does not divide tp={self.tp}")
        if self.num_nodes > 1 and self.dist_init_addr is None:
            raise ValueError(
                f"num_nodes={self.num_nodes} needs dist_init_addr, host:port of node 0"
            )
        if self.keys is None and not self.is_local:
            raise ValueError(
                f"host={self.host}: a server without keys may listen on 127.0.0.1 only, as whoever"
                " reaches it can replace its weights"
            )

    @property
    def is_local(self) -> bool:
        """Return whether only this machine reaches the engine, whose ranks are all here then."""
        return is_loopback(self.host)

    def arguments(self) -> list[str]:
        """Return the command-line arguments of mcore_rl.rollout.server; the port must be known."""
        assert self.port is not None
        options: dict[str, object] = {
            "--model-path": self.model_path,
            "--host": self.host,
            "--port": self.port,
            "--dtype": self.dtype,
            "--tp-size": self.tp,
            "--ep-size": self.ep,
            "--max-total-tokens": self.kv_cache_len,
            "--max-running-requests": self.max_running,
            "--max-mamba-cache-size": STATES_PER_REQUEST * self.max_running,
            "--random-seed": self.seed,
            "--weight-version": self.weight_version,
            "--watchdog-timeout": self.batch_timeout_s,
            "--log-level-http": "warning",
        }
        if self.pp > 1:
            options["--pp-size"] = self.pp
        if self.num_nodes > 1:
            options |= {"--nnodes": self.num_nodes, "--node-rank": self.node_rank}
            options |= {"--dist-init-addr": self.dist_init_addr}
        arguments = [str(part) for item in options.items() for part in item]
        if self.adapters is not None:
            arguments = [ADAPTERS, self.adapters.encode(), *arguments]
        if self.share_prompts is not False:
            flag = SHARE_PROMPTS if self.share_prompts else SHARE_PROMPTS_ON_CPU
            arguments = [flag, *arguments]
        if not self.compiled:
            arguments = [UNCOMPILED, *arguments]
        if self.gpu_ids:
            arguments = ["--gpu-ids", ",".join(self.gpu_ids), *arguments]
        return [*arguments, *self._list_flags(), *self.extra_args]

    def _list_flags(self) -> list[str]:
        """Return the options of SGLang that are switched on, and those that few engines need."""
        flags = ["--skip-server-warmup", "--sleep-on-idle"]
        if not self.tokenizer:
            flags += ["--skip-tokenizer-init", "--incremental-streaming-output"]
        else:  # it also reads images, and Pillow resizes them as it does for training
            flags.append("--disable-fast-image-processor")
        if self.trust_remote_code:
            flags.append("--trust-remote-code")
        if self.attention_dp > 1:
            flags += ["--enable-dp-attention", "--dp-size", str(self.attention_dp)]
        if self.deterministic:
            flags.append("--enable-deterministic-inference")
        if self.can_release_memory:
            flags.append("--enable-memory-saver")
        if self.routed_experts:
            flags.append("--enable-return-routed-experts")
        if self.indexer_topk:
            flags.append("--enable-return-indexer-topk")
        if self.speculation is not None:
            flags += self.speculation.list_flags()
        if self.adapters is not None:
            flags += self.adapters.list_flags()
        if self.custom_weight_loaders:
            flags += ["--custom-weight-loader", *self.custom_weight_loaders]
        return flags


@dataclass(frozen=True)
class EngineAddress:
    """Where an engine answers, where it logs, and which keys open it.

    number   of the engine among those of its role
    """

    url: str
    log_path: str
    keys: ServerKeys | None = field(default=None, repr=False)
    number: int = 0

    def __str__(self) -> str:
        return f"engine {self.url} (log {self.log_path})"
