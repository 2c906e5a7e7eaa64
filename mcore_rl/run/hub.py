"""Downloads a recipe's models and data from the Hugging Face hub; puts local paths in their place.

    models      owner/name or owner/name@revision, unless a folder of that name is here
    data files  hf://datasets/owner/name/path/to/file.parquet or hf://datasets/owner/name@revision/...

Downloads land in huggingface_hub's cache (HF_HOME) and are reused without a network.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from mcore_rl.algo.lookup import needs_of
from mcore_rl.checks.inputs import (
    DATA_OF_COMMAND,
    MIXING_COMMANDS,
    MODEL_ID,
    ON_HUB,
    SAMPLING_COMMANDS,
    HubUnreachableError,
)
from mcore_rl.config import (
    AdapterConfig,
    AlgorithmConfig,
    Config,
    EvalSetConfig,
    LoraConfig,
    SourceConfig,
)
from mcore_rl.config.tree import value_of, with_settings

DATA_FILE = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?/(?P<file>.+)"
)
SETTINGS = ("*.json", "*.jinja", "*.py", "*.model", "*.tiktoken", "*.txt")
WEIGHTS = ("*.safetensors",)
DataSet = TypeVar("DataSet", SourceConfig, EvalSetConfig)
OTHER_FORMATS = ("*/*", "consolidated*")
"""Patterns of files that are not downloaded: the same weights in other formats."""


def fetch_inputs(config: Config, command: str) -> Config:
    """Download everything that `command` reads; return the recipe with local paths.

    A plan needs only the config.json of the models that are trained.

    Raises ValueError naming the option if something is neither here nor on the hub, or if the hub
    cannot be reached.
    """
    of_plan = ("config.json",)
    weights = () if config.model.init == "random" else WEIGHTS
    patterns = of_plan if command == "plan" else (*SETTINGS, *weights)
    policy = _local_model("model.path", config.model.path, config.model.revision, patterns)
    # The revision has been followed.
    settings = {"model.path": policy, "model.revision": None}
    patterns = of_plan if command == "plan" else (*SETTINGS, *WEIGHTS)
    for option in _list_other_models(command, config.served_models, config.algorithm):
        settings[option] = _local_model(option, value_of(config, option), None, patterns)
    config = with_settings(config, settings)
    if command == "plan":
        return config
    for option in DATA_OF_COMMAND[command]:
        files = [_local_file(option, name) for name in value_of(config, option)]
        config = with_settings(config, {option: files})
    if command in MIXING_COMMANDS:
        config = with_settings(
            config, {"data.sources": _take_local("data.sources", config.data.sources)}
        )
    if command == "train" and config.train.lora.adapters:
        config = with_settings(config, {"train.lora.adapters": _take_adapters(config.train.lora)})
    if command in SAMPLING_COMMANDS:
        config = with_settings(config, {"eval.sets": _take_local("eval.sets", config.eval.sets)})
    return config


def _take_local(option: str, entries: Sequence[DataSet]) -> list[DataSet]:
    """Return the entries of a list of data sets, with local paths."""
    return [
        replace(entry, path=_local_file(f"{option}[{i}].path", entry.path))
        for i, entry in enumerate(entries)
    ]


def _take_adapters(lora: LoraConfig) -> list[AdapterConfig]:
    """Return the adapters that take turns, with local paths of their prompts."""
    return [
        replace(
            own,
            data=[_local_file(f"train.lora.adapters[{i}].data", name) for name in own.data],
            eval=[_local_file(f"train.lora.adapters[{i}].eval", name) for name in own.eval],
        )
        for i, own in enumerate(lora.adapters)
    ]


def _list_other_models(
    command: str, served: Iterable[str], algorithm: AlgorithmConfig
) -> list[str]:
    """Return the options with models that the command reads beside the policy.

    served   roles of the models that the recipe serves
    """
    if command == "plan":
        return ["critic.path"]
    options = []
    if command not in ("sft", "dpo"):
        options = [f"{role}.path" for role in served] + ["reward.model_tokenizer"]
    if command == "train" and needs_of(algorithm).critic:
        options.append("critic.path")
    return options


def _local_model(option: str, path: str, revision: str | None, patterns: Sequence[str]) -> str:
    name = MODEL_ID.fullmatch(path)
    if name is None or Path(path).exists():
        if revision is not None:
            raise ValueError(
                f"model.revision={revision} with {option}={path}, which is no id on the Hugging"
                " Face hub: leave model.revision out"
            )
        return path
    if revision is not None and name["revision"] is not None:
        raise ValueError(
            f"model.revision={revision} with {option}={path}: there are two revisions; leave one"
            " out"
        )
    revision = revision or name["revision"]
    return str(_download(f"{option}={path}", "model", name["repo"], revision, patterns))


def _local_file(option: str, name: str) -> str:
    if not name.startswith(ON_HUB):
        return name
    parts = DATA_FILE.fullmatch(name)
    if parts is None:
        raise ValueError(
            f"{option}: {name} is no file of a data set on the Hugging Face hub; write"
            " hf://datasets/<owner>/<name>/<path of the file>"
        )
    what = f"{option}: {name}"
    folder = _download(what, "dataset", parts["repo"], parts["revision"], [parts["file"]])
    if not (folder / parts["file"]).is_file():
        raise ValueError(f"{what}: the data set {parts['repo']} has no such file")
    return str(folder / parts["file"])


def _download(
    what: str,
    kind: Literal["model", "dataset"],
    repo: str,
    revision: str | None,
    patterns: Sequence[str],
) -> Path:
    """Return the folder of the snapshot; download the snapshot if the cache lacks it."""
    left_out = OTHER_FORMATS if kind == "model" else None
    try:
        folder = snapshot_download(
            repo,
            repo_type=kind,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(left_out) if left_out else None,
        )
    except LocalEntryNotFoundError as error:
        first_line = str(error).partition("\n")[0]
        flag = " --repo-type dataset" if kind == "dataset" else ""
        raise HubUnreachableError(
            f"{what}: it is not here, and the Hugging Face hub cannot be reached ({first_line})."
            f" Where there is a network, run `hf download {repo}{flag}` and copy what it downloads"
            " here; or set HF_HOME to a cache that has it"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split()[:20])
        raise ValueError(
            f"{what}: it is not here, and the Hugging Face hub does not give it ({reason});"
            " check the name and the revision, and `hf auth login` if it is private or gated"
        ) from None
    return Path(folder)
