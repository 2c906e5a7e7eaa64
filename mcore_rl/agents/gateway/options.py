"""Where a gateway listens, and its bounds."""

from dataclasses import dataclass, field

from mcore_rl.agents.gateway.admission import AdmissionOptions
from mcore_rl.process.network import is_loopback


@dataclass(frozen=True)
class GatewayOptions:
    """Options of a gateway.

    host             interface that it listens on
    port             0: a free one
    public_host      name by which programs reach it; empty: `host`
    model            name that GET /v1/models shows; requests may name any model
    max_body_bytes   of a request, decompressed
    body_s           a request's body must have arrived by then
    answer_s         an answer must be there by then; the generation goes on for a retry
    retry_window_s   a completion is kept so long for a retry of its request
    keep_alive_s     between signs of life on a stream while the policy generates
    admission        when further requests are refused with 429
    """

    host: str = "127.0.0.1"
    port: int = 0
    public_host: str = ""
    model: str = "policy"
    max_body_bytes: int = 16 << 20
    body_s: float = 60.0
    answer_s: float = 3600.0
    retry_window_s: float = 120.0
    keep_alive_s: float = 5.0
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "body_s", "answer_s", "retry_window_s", "keep_alive_s"):
            value = getattr(self, name)
            if value <= 0:
                raise ValueError(f"GatewayOptions.{name}={value}: must be positive")
        if self.host in ("0.0.0.0", "::") and not self.public_host:
            raise ValueError(
                f"GatewayOptions.host={self.host} is every interface, which is no address to"
                " reach the gateway at: set public_host as well"
            )

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)
