"""Models that are served beside the policy, as those who ask them see them: addresses and names."""

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.config import ServedModelConfig
from mcore_rl.rollout.engine import EngineAddress
from mcore_rl.rollout.engine_health import EngineHealth

TAKES_TEXT = ("judge",)
"""Roles that are asked in words, so that their servers need tokenizer and chat template."""
_NOT_OURS = "on its own machine"


@dataclass(frozen=True)
class ServedEndpoint:
    """Where a judge, reward model or teacher answers.

    role      the config group, which names it in messages
    engines   its servers; requests go to those that `health` says serve
    model     what requests to OpenAI-compatible endpoints name it
    api_key   empty where none is needed
    """

    role: str
    config: ServedModelConfig
    engines: tuple[EngineAddress, ...]
    health: EngineHealth
    model: str
    api_key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def check_served_path(role: str, config: ServedModelConfig) -> None:
    """ValueError if `config.path` cannot be what engines are started for."""
    folder = Path(config.path)
    needed = ["config.json", *(["tokenizer_config.json"] if role in TAKES_TEXT else [])]
    for name in needed:
        if not (folder / name).is_file():
            raise ValueError(
                f"{role}.path={config.path}: there is no {name}; name a HuggingFace directory"
            )


def find_served(role: str, config: ServedModelConfig) -> ServedEndpoint:
    """The server at `config.url`, which must answer within a request's time.

    ValueError: nothing there lists its models, it has none of the wanted name, or there is no key.
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
    address = EngineAddress(url, _NOT_OURS)
    return ServedEndpoint(
        role, config, (address,), EngineHealth([url]), config.url_model or names[0], key
    )


def _listed_models(url: str, role: str, config: ServedModelConfig, key: str) -> list[str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=config.request_timeout_s) as response:
            return [str(entry["id"]) for entry in json.load(response)["data"]]
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{role}.url={config.url}: GET {url} does not list models: {type(error).__name__}: {error}"
        ) from None
