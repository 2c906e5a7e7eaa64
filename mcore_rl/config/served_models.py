"""Options of models that are served beside the policy: judges, reward models, teachers."""

from dataclasses import dataclass, field
from typing import Any, Literal

from mcore_rl.config.bounds import Options, bounded


@dataclass
class ServedModelConfig(Options):
    """Engines for another model, or a server that runs already; neither by default."""

    path: str = ""
    """HuggingFace directory, or hub id, to start engines for."""
    url: str = ""
    """Address of a running server with an OpenAI-compatible API, instead of `path`."""
    url_model: str = ""
    """Model to ask `url` for; empty: the first that it lists."""
    api_key_env: str = ""
    """Environment variable that holds the key for `url`; empty: no key."""
    engines: int = bounded(1, ge=1)
    tp: int = bounded(1, ge=1)
    ep: int = bounded(1, ge=1)
    pp: int = bounded(1, ge=1)
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "bfloat16"
    """auto: the one that its config.json names."""
    max_concurrency: int = bounded(64, ge=1)
    """Requests in flight per engine."""
    kv_cache_len: int = bounded(65536, ge=1)
    """Tokens of KV cache per engine."""
    request_timeout_s: float = bounded(120.0, gt=0)
    """From a request's first try to the end of its last."""
    startup_timeout_s: float = bounded(600.0, gt=0)
    restarts: int = bounded(3, ge=0)
    """How often each engine's server is restarted in an hour; 0: a dead engine ends the run."""
    colocated: bool = False
    """Its engines take turns with the trainer ranks on their GPUs; otherwise they have their
    own."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Further fields of SGLang's ServerArgs for its engines (docs/upstream_options.md)."""

    @property
    def is_used(self) -> bool:
        return bool(self.path or self.url)

    @property
    def is_colocated(self) -> bool:
        """Return whether its engines share the trainer ranks' GPUs, where there is a trainer."""
        return bool(self.path) and self.colocated

    @property
    def engine_ranks(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp

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
