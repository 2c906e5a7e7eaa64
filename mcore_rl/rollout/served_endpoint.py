"""Finds the addresses and the model name that clients of a served model need, from its options.

A served model is one that runs beside the policy: a judge, a reward model or a teacher. Its engines
are started by the run (`path`) or run already (`url`).
"""

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rl.config import ServedModelConfig
from mcore_rl.process.errors import describe_error
from mcore_rl.process.network import open_directly
from mcore_rl.process.server_keys import bearer
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.served_dtype import find_dtype

TEXT_ROLES = ("judge",)
"""Roles that get text instead of token ids; their servers need tokenizer and chat template."""
_REMOTE_LOG = "on its own machine"


@dataclass(frozen=True)
class ServedEndpoint:
    """Where a served model answers.

    role      judge, reward_model or teacher: the config group, which messages name
    engines   its servers; requests go to those that `health` says serve
    model     the model's name in requests to OpenAI-compatible endpoints
    api_key   empty if none is needed
    """

    role: str
    config: ServedModelConfig
    engines: tuple[EngineAddress, ...]
    health: EngineHealth
    model: str
    api_key: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return bearer(self.api_key)


def check_served_path(role: str, config: ServedModelConfig) -> None:
    """Raise ValueError if no engine can be started on `config.path`, in the dtype that it names."""
    folder = Path(config.path)
    needed = ["config.json"]
    if role in TEXT_ROLES:
        needed.append("tokenizer_config.json")
    for name in needed:
        if not (folder / name).is_file():
            raise ValueError(
                f"{role}.path={config.path}: there is no {name}; name a HuggingFace directory"
            )
    find_dtype(config.dtype, folder, f"{role}.dtype")


def find_endpoint(role: str, config: ServedModelConfig) -> ServedEndpoint:
    """Return the server at `config.url`, which must answer within request_timeout_s.

    Raises ValueError if the server does not list its models, has none of the wanted name, or if the
    environment variable with its key is not set.
    """
    url = config.url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
    if config.api_key_env and not key:
        raise ValueError(
            f"{role}.api_key_env={config.api_key_env}: there is no such environment variable"
        )
    names = _listed_models(f"{url}/v1/models", role, config, key)
    if not names or config.url_model not in ("", *names):
        raise ValueError(
            f"{role}.url={config.url}: it has no model {config.url_model!r}, but"
            f" {', '.join(names) or 'none'}; set {role}.url_model"
        )
    return ServedEndpoint(
        role,
        config,
        engines=(EngineAddress(url, _REMOTE_LOG),),
        health=EngineHealth([url]),
        model=config.url_model or names[0],
        api_key=key,
    )


def _listed_models(url: str, role: str, config: ServedModelConfig, key: str) -> list[str]:
    request = urllib.request.Request(url, headers=bearer(key))
    try:
        with open_directly(request, config.request_timeout_s) as response:
            return [str(entry["id"]) for entry in json.load(response)["data"]]
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{role}.url={config.url}: GET {url} does not list models: {describe_error(error)}"
        ) from None
