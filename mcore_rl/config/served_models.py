"""Options of models that are served beside the policy: judges, reward models, teachers."""

from dataclasses import dataclass, field

from mcore_rl.config.checks import one_of, positive


@dataclass
class ServedModelConfig:
    """Engines of their own for another model, or a server that runs already; neither by default."""

    path: str = ""
    """HuggingFace directory to start engines for."""
    url: str = ""
    """Address of a running server with an OpenAI-compatible API, instead of `path`."""
    url_model: str = ""
    """Model to ask `url` for; empty: the first that it lists."""
    api_key_env: str = ""
    """Environment variable that holds the key for `url`; empty: it wants none."""
    engines: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    dtype: str = "bfloat16"
    max_concurrency: int = 64
    """Requests in flight per engine."""
    kv_cache_len: int = 65536
    """Tokens of KV cache per engine."""
    request_timeout_s: float = 120.0
    """From a request's first try to the end of its last."""
    startup_timeout_s: float = 600.0
    restarts: int = 3
    """How often the server of each engine is started again in a run; 0: a dead one ends the run."""
    colocated: bool = False
    """Its engines run on the trainer ranks' GPUs, in turn with them; else on GPUs of their own."""
    sglang_args: list[str] = field(default_factory=list)
    """Further arguments of its servers, as on SGLang's command line."""

    @property
    def is_used(self) -> bool:
        return bool(self.path or self.url)

    @property
    def is_colocated(self) -> bool:
        """Whether its engines share the trainer ranks' GPUs, where there is a trainer."""
        return bool(self.path) and self.colocated

    @property
    def engine_ranks(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp

    def check(self, role: str) -> None:
        """ValueError that names the option as `role`'s."""
        if self.path and self.url:
            raise ValueError(
                f"{role}.path={self.path} with {role}.url={self.url}: engines are started or a running server"
                " is used; leave one empty"
            )
        for name in ("url_model", "api_key_env"):
            if getattr(self, name) and not self.url:
                raise ValueError(
                    f"{role}.{name}={getattr(self, name)}: engines of the run need none; it belongs to"
                    f" {role}.url"
                )
        if self.colocated and (self.url or self.restarts):
            raise ValueError(
                f"{role}.colocated=true with {role}.url={self.url!r} and {role}.restarts={self.restarts}: it"
                " is for engines of the run, and a server that starts would take the memory that training"
                f" uses; set {role}.path and {role}.restarts=0"
            )
        for name in ("engines", "tp", "ep", "pp", "max_concurrency", "kv_cache_len"):
            positive(f"{role}.{name}", getattr(self, name))
        for name in ("request_timeout_s", "startup_timeout_s"):
            positive(f"{role}.{name}", getattr(self, name))
        one_of(f"{role}.dtype", self.dtype, ("float32", "bfloat16", "float16", "auto"))
        if self.restarts < 0:
            raise ValueError(f"{role}.restarts={self.restarts}: must not be negative")
        if self.tp % self.ep:
            raise ValueError(f"{role}.ep={self.ep} does not divide {role}.tp={self.tp}")
