"""An HTTP server that makes programs trainable which speak OpenAI's or Anthropic's API."""

from mcore_rl.agents.gateway.admission import AdmissionOptions, FreeKv, GatewayOptions
from mcore_rl.agents.gateway.gateway import Gateway, collect_garbage_rarely
from mcore_rl.agents.gateway.sessions import EpisodeChat, OverloadedError, Session

__all__ = [
    "AdmissionOptions",
    "EpisodeChat",
    "FreeKv",
    "Gateway",
    "GatewayOptions",
    "OverloadedError",
    "Session",
    "collect_garbage_rarely",
]
