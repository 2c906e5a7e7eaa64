"""An HTTP server that makes programs trainable which speak OpenAI's or Anthropic's API."""

from mcore_rl.agents.gateway.admission import AdmissionOptions, FreeKv, GatewayOptions
from mcore_rl.agents.gateway.gateway import Gateway, rare_collections
from mcore_rl.agents.gateway.sessions import EpisodeChat, OverloadedError, Session

__all__ = [
    "AdmissionOptions",
    "EpisodeChat",
    "FreeKv",
    "Gateway",
    "GatewayOptions",
    "OverloadedError",
    "Session",
    "rare_collections",
]
