"""Refuses a command whose files, functions, environment or packages are not there.

Nothing heavy is imported: a mistake is told within a second, before processes start or jobs wait.
"""

import difflib
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mcore_rl.agents.environments.adapters import check_names, find_adapter
from mcore_rl.agents.environments.check import is_there
from mcore_rl.checks.engines import check_lens, check_served
from mcore_rl.checks.first_rows import check_first_row
from mcore_rl.checks.needs import ALGORITHMS, check_needs
from mcore_rl.checks.source import (
    check_name,
    check_registered,
    find_function,
    list_imports,
    parse,
    takes,
)
from mcore_rl.config import (
    AgentsConfig,
    AlarmsConfig,
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    EvalSetConfig,
    LogConfig,
    LoraConfig,
    RewardConfig,
    RolloutConfig,
    SourceConfig,
)
from mcore_rl.config.recipe import require
from mcore_rl.config.shipped import RECIPES_DIR, describe_making, resolve_shipped
from mcore_rl.config.tree import value_of
from mcore_rl.data.columns import Columns
from mcore_rl.data.files import data_files
from mcore_rl.logs.names import METRICS, find_documented
from mcore_rl.process.disk import check_readable, name_user
from mcore_rl.process.network import is_free
from mcore_rl.rewards.user_function import ALL, ONE, find_file
from mcore_rl.weights.hf.config import ModelFacts, parse_hf_config, read_hf_config
from mcore_rl.weights.hf.folder import check_header, find_other_format
from mcore_rl.weights.models.recipe_checks import check_layout, check_routing

DATA_OF_COMMAND: Mapping[str, tuple[str, ...]] = {
    "train": ("data.train", "eval.data"),
    "sft": ("sft.data",),
    "dpo": ("dpo.data", "dpo.held_out"),
    "pairs": ("data.train", "eval.data"),
    "eval": ("eval.data",),
}
MIXING_COMMANDS = ("train", "pairs")
"""Commands that read data.sources."""
SAMPLING_COMMANDS = ("train", "pairs", "eval")
TRAINING_COMMANDS = ("train", "sft", "dpo")
TRAINED_MODELS = ("model.path", "critic.path")
"""Options that name models of families whose tensors we know; engines also serve others."""
_REPO = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
MODEL_ID = re.compile(rf"(?P<repo>{_REPO})(?:@(?P<revision>[\w./-]+))?")
ON_HUB = "hf://"
"""Data files of the hub begin so."""
_NAMED = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)")
"""A function or class of a file, as environments name them."""
Look = Callable[[str, str], Path | None]
"""(option, path in a recipe) -> where this machine has it; None: it cannot be seen from here.

Raises ValueError if the run could not see it either.
"""


def see_here(option: str, path: str) -> Path:
    """Return the path itself: the run has the files of this machine."""
    return Path(path)


@dataclass(frozen=True)
class RunPlace:
    """Where a command will run.

    look      finds a path of the recipe
    is_here   it runs in this interpreter's environment, on this machine's files
    """

    look: Look = see_here
    is_here: bool = True


class HubUnreachableError(ValueError):
    """The Hugging Face hub cannot be asked for a model or a data set that is not here."""


HERE = RunPlace()
Check = Callable[[], object]


def refuse_missing(checks: Iterable[Check]) -> None:
    """Raise ValueError for the first input that is not there, with a remedy."""
    for check in checks:
        check()


def check_has_environment(agents: AgentsConfig) -> None:
    """Raise ValueError if the recipe has no environment."""
    if not agents.is_used:
        raise ValueError("agents.environment is not set: give what the policy talks with")


def find_missing(checks: Iterable[Check]) -> list[str]:
    """Return what `refuse_missing` refuses, each with its remedy."""
    missing = []
    for check in checks:
        try:
            check()
        except (ValueError, OSError) as error:  # OSError: a file that this user may not read
            missing.append(str(error))
    return missing


def check_planned(algorithm: AlgorithmConfig, model_path: str) -> None:
    """Raise ValueError if even a plan lacks something: a known algorithm, the model's config.json.

    Models on the Hugging Face hub are taken for granted.
    """
    check_algorithm_names(algorithm)
    _check_model("model.path", model_path, HERE, has_weights=False)


def list_input_checks(config: Config, command: str, place: RunPlace = HERE) -> Iterator[Check]:
    """Yield the checks of what `command` reads, in the order of a recipe's groups."""
    has_sources = command in MIXING_COMMANDS and config.data.sources
    has_sets = command == "eval" and config.eval.sets
    of_adapters = list_adapter_data(config.train.lora) if command == "train" else {}
    needed = () if has_sources or has_sets or of_adapters else DATA_OF_COMMAND[command][:1]
    options = (*needed, "run.dir", "model.path")
    wanted = {option: value_of(config, option) for option in options}
    trained = {name: files for name, files in of_adapters.items() if name.endswith(".data")}
    yield partial(require, {**wanted, **trained})
    if place.is_here:
        yield partial(check_run_dir, config.run.dir)
        if command in SAMPLING_COMMANDS and config.cluster.address is None:
            yield _check_engine_package
    if command in ("pairs", "eval"):
        yield partial(check_no_trainer, config.rollout)
    if command in ("train", "dpo"):
        yield partial(check_algorithm_names, config.algorithm, place)
    if command == "train" and not config.algorithm.path:
        yield partial(check_needs, config)
    yield partial(_check_policy, config, command, place)
    if command == "train":
        yield partial(_check_model, "critic.path", config.critic.path, place, has_weights=False)
    named = {option: value_of(config, option) for option in DATA_OF_COMMAND[command]}
    named |= of_adapters
    held_out = config.eval.sets if command in SAMPLING_COMMANDS else ()
    sources = config.data.sources if command in MIXING_COMMANDS else ()
    for option, path in _list_data(named, held_out, sources):
        of_prompts = option.startswith(("data.", "eval.", "train.lora."))
        columns = Columns.make(config.data.columns) if of_prompts else None
        yield partial(_check_data, option, path, place, columns)
    if command in SAMPLING_COMMANDS:
        for role, model in config.served_models.items():
            yield partial(_check_model, f"{role}.path", model.path, place, has_weights=True)
        yield partial(check_reward, config.reward, place, asks_judge=config.judge.is_used)
        if config.agents.is_used:
            agents = config.agents
            yield partial(
                check_environment, agents.environment, agents.options, agents.python, place
            )
        if config.search.is_used and (config.cluster.address is None or place is not HERE):
            yield partial(_check_index, config.search.index, place)
    if command != "pairs":
        yield partial(_check_packages, config.log, place)
        yield partial(_check_alarms, config.alarms, place)
        yield partial(_check_port, config.log, place)
    if command in TRAINING_COMMANDS and config.checkpoint.hub_repo and place.is_here:
        yield partial(_check_hub_repo, config.checkpoint)
    if config.checkpoint.keep_best:
        yield partial(_check_metric, "checkpoint.best_metric", config.checkpoint.best_metric)


def list_adapter_data(lora: LoraConfig) -> dict[str, list[str]]:
    """Return the files of prompts of adapters that take turns, by option; {} without."""
    adapters = lora.adapters if lora.rank else []
    named = {f"train.lora.adapters[{i}].data": own.data for i, own in enumerate(adapters)}
    return named | {f"train.lora.adapters[{i}].eval": own.eval for i, own in enumerate(adapters)}


MOST_FILES = 64
"""Files of a folder or of a glob whose first row is read before a run starts."""


def _list_data(
    named: Mapping[str, Sequence[str]],
    held_out: Sequence[EvalSetConfig],
    sources: Sequence[SourceConfig],
) -> Iterator[tuple[str, str]]:
    """Yield (option, path) of each data set: those that options name, eval.sets, data.sources."""
    for option, paths in named.items():
        yield from ((option, path) for path in paths)
    for number, each in enumerate(held_out):
        yield f"eval.sets[{number}].path", each.path
    for number, source in enumerate(sources):
        yield f"data.sources[{number}].path", source.path


def _check_data(option: str, path: str, place: RunPlace, columns: Columns | None) -> None:
    if path.startswith(ON_HUB):
        return
    file = place.look(option, path)
    if file is not None:
        try:
            for name in data_files([str(file)])[:MOST_FILES]:
                check_first_row(Path(name), columns)
        except ValueError as error:
            raise ValueError(f"{option}: {error}") from None


def check_no_trainer(rollout: RolloutConfig) -> None:
    """Raise ValueError if the engines need trainer ranks, for a command that has none."""
    if rollout.quantization != "none":
        raise ValueError(
            f"rollout.quantization={rollout.quantization}: trainer ranks quantize, and an"
            " evaluation has none; use rollout.quantization=none"
        )


def check_run_dir(run_dir: str) -> None:
    """Raise ValueError if the folder of the run is a file, or cannot be made or written to."""
    path = Path(run_dir).absolute()
    existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not existing.is_dir():
        raise ValueError(f"run.dir={run_dir}: {existing} is not a folder; choose another run.dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(
            f"run.dir={run_dir}: no permission for user {name_user()} to write to {existing};"
            " choose another run.dir"
        )


def check_algorithm_names(algorithm: AlgorithmConfig, place: RunPlace = HERE) -> None:
    """Raise ValueError if the advantage or the loss is unknown; a user's file may register any."""
    if algorithm.path:
        _find_file("algorithm.path", algorithm.path, place)
        return
    for option, file, registry in (
        ("advantage", "advantages.py", "advantages"),
        ("loss", "losses.py", "losses"),
    ):
        name = getattr(algorithm, option)
        check_registered(f"algorithm.{option}", name, ALGORITHMS / file, registry)


def is_on_hub(path: str) -> bool:
    """Return whether a model's path is an id of the hub: no such directory is here."""
    return MODEL_ID.fullmatch(path) is not None and not Path(path).exists()


def _check_model(option: str, path: str, place: RunPlace, *, has_weights: bool) -> None:
    """Raise ValueError if a directory holds no model, or no weights where they are needed."""
    folder = None if not path or is_on_hub(path) else place.look(option, path)
    if folder is None:
        return
    try:
        (read_hf_config if option in TRAINED_MODELS else parse_hf_config)(folder)
    except ValueError as error:
        raise ValueError(f"{option}={path}: {error}") from None
    if has_weights and not any(folder.glob("*.safetensors")):
        if folder.absolute().is_relative_to(RECIPES_DIR):
            raise ValueError(
                f"{option}={path} holds config.json alone: set {option} to the folder of the"
                " weights, or to their id on the Hugging Face hub"
            )
        remedy = "; model.init=random starts without" if option == "model.path" else ""
        raise ValueError(
            f"{option}={path}: {folder} has no .safetensors files{find_other_format(folder)}"
            f"{remedy}"
        )
    for file in sorted(folder.glob("*.safetensors")) if has_weights else ():
        check_readable(file)
        check_header(file)


def _check_policy(config: Config, command: str, place: RunPlace) -> None:
    """Raise ValueError if the policy is not there, or the recipe's sizes do not suit it."""
    path = config.model.path
    _check_model("model.path", path, place, has_weights=config.model.init == "hf")
    folder = None if is_on_hub(path) else place.look("model.path", path)
    if folder is None:
        return
    policy = ModelFacts.read(folder)
    if command in TRAINING_COMMANDS:
        check_layout(policy.config, config.parallel)
    if command == "train":
        check_routing(config.train, policy.config)
        check_lens(config.data, config.rollout, config.train, policy)
    if command in SAMPLING_COMMANDS:
        check_served(policy, config.rollout, config.drift, config.data, config.eval)


def _check_index(index: str, place: RunPlace) -> None:
    folder = place.look("search.index", index)
    if folder is not None and not folder.is_dir():
        raise ValueError(
            f"search.index={index}: there is no such folder{describe_making(index)};"
            " `mcore-rl search build` makes an index"
        )


def check_reward(reward: RewardConfig, place: RunPlace, *, asks_judge: bool) -> None:
    """Raise ValueError if the reward's file, its function or the judge's question is not there."""
    if asks_judge:
        _find_file("reward.judge.template", reward.judge.template, place)
    if not reward.path:
        return
    file = _find_file("reward.path", reward.path, place)
    if file is None:
        return
    option = f"reward.path={reward.path}"
    tree = parse(option, file)
    if place.is_here:
        _check_imports(option, file, list_imports(tree))
    check_name(f"{option} with reward.name={reward.name}", tree, file, reward.name)
    function = find_function(tree, reward.name)
    if function is None or function.decorator_list:
        return  # imported or wrapped: only running the file says what it takes
    if not any(takes(function, [*form, *reward.kwargs]) for form in (ONE, ALL)):
        further = f", and reward.kwargs: {', '.join(reward.kwargs)}" if reward.kwargs else ""
        raise ValueError(
            f"{option}: {reward.name}, line {function.lineno}, must take the keyword arguments"
            f" {', '.join(ONE)}, or {', '.join(ALL)}{further}"
        )


def _check_imports(option: str, file: Path, packages: Sequence[str]) -> None:
    for package in packages:
        beside = (file.parent / package, file.parent / f"{package}.py")
        if not is_there(package) and not any(path.exists() for path in beside):
            raise ValueError(
                f"{option}: {file} imports {package}, which this interpreter lacks: install it, or"
                " take the import out"
            )


def check_environment(
    kind: str, options: Mapping[str, Any], python: str, place: RunPlace = HERE
) -> None:
    """Raise ValueError if an environment is unknown, or its options, files or packages are wrong.

    python   interpreter of its workers; empty: this one, whose packages are looked for
    """
    for named in filter(_NAMED.fullmatch, [kind, *_list_texts(options.values())]):
        _check_named(f"agents.environment={kind}", named, place)
    adapter = find_adapter(kind)
    if ":" in kind:
        return
    try:
        check_names(kind, options)
    except ValueError as error:
        raise ValueError(f"agents.environment={kind}: {error}") from None
    missing = [module for module in adapter.modules if not is_there(module)] if adapter else []
    if adapter and missing and place.is_here and not python:
        raise ValueError(
            f"agents.environment={kind} needs {', '.join(missing)}, which this interpreter lacks:"
            f" pip install {' '.join(adapter.packages)}, or name another one as agents.python"
        )


def _list_texts(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | tuple):
            yield from _list_texts(value)


def _check_named(option: str, named: str, place: RunPlace) -> None:
    match = _NAMED.fullmatch(named)
    assert match is not None
    file = place.look(option, resolve_shipped(match["file"]))
    if file is None:
        return
    file = file.expanduser()
    if not file.is_file():
        raise ValueError(f"{option}: there is no file {file.absolute()}, which {named!r} names")
    check_name(option, parse(option, file), file, match["name"])


def _find_file(option: str, path: str, place: RunPlace) -> Path | None:
    """Return where this machine has a file of a recipe; None if it cannot be seen from here."""
    file = place.look(option, path)
    return None if file is None else find_file(option, str(file))


def _check_engine_package() -> None:
    if not _is_installed("sglang"):
        raise ValueError(
            "the engines need SGLang, which is not installed: in the folder of the sources,"
            " pip install -c requirements/gpu.txt '.[gpu]' on a GPU machine, make venv without a"
            " GPU (docs/install.md)"
        )


def _check_packages(log: LogConfig, place: RunPlace) -> None:
    if not place.is_here:
        return
    for option, is_used, package in (
        (f"log.wandb_project={log.wandb_project!r}", log.wandb_project, "wandb"),
        (f"log.mlflow_uri={log.mlflow_uri!r}", log.mlflow_uri, "mlflow"),
        (f"log.trackio_project={log.trackio_project!r}", log.trackio_project, "trackio"),
        (f"log.swanlab_project={log.swanlab_project!r}", log.swanlab_project, "swanlab"),
        (f"log.clearml_project={log.clearml_project!r}", log.clearml_project, "clearml"),
        ("log.tensorboard=true", log.tensorboard, "tensorboard"),
    ):
        if is_used and not _is_installed(package):
            raise ValueError(
                f"{option} needs the package {package}: pip install {package}, or leave the"
                " option out"
            )


def _check_hub_repo(checkpoint: CheckpointConfig) -> None:
    """Raise ValueError if the export could not be uploaded when the run ends."""
    from huggingface_hub import constants, get_token

    option = f"checkpoint.hub_repo={checkpoint.hub_repo}"
    if not re.fullmatch(_REPO, checkpoint.hub_repo):
        raise ValueError(f"{option}: the hub names repositories owner/name")
    if not checkpoint.export_hf:
        raise ValueError(f"{option} uploads the export: set checkpoint.export_hf=true as well")
    if not constants.HF_HUB_OFFLINE and get_token() is None:
        raise ValueError(
            f"{option}: there is no token of the hub here; log in by `hf auth login`, set HF_TOKEN,"
            " or set HF_HUB_OFFLINE=1 to be told what would be uploaded"
        )


def _check_alarms(alarms: AlarmsConfig, place: RunPlace) -> None:
    """Raise ValueError for a rule on no metric, a webhook that is no URL, or a missing command."""
    for rule in alarms.rules:
        _check_metric("alarms.when", rule.metric)
    if alarms.webhook and not alarms.webhook.startswith(("http://", "https://")):
        raise ValueError(
            "alarms.webhook is no URL: give one that begins with https://, or leave the option out"
        )
    if alarms.command and place.is_here and shutil.which(alarms.command[0]) is None:
        raise ValueError(
            f"alarms.command={alarms.command}: there is no program {alarms.command[0]}; give its"
            " path, with its arguments as further elements"
        )


def _check_port(log: LogConfig, place: RunPlace) -> None:
    """Raise ValueError if the port of the metrics is taken, which the run would find out late."""
    if (
        place.is_here
        and log.prometheus_port
        and not is_free(log.prometheus_host, log.prometheus_port)
    ):
        raise ValueError(
            f"log.prometheus_port={log.prometheus_port} is not free on {log.prometheus_host}:"
            " choose another port, or 0 for one that is free"
        )


def _check_metric(option: str, metric: str) -> None:
    if find_documented(metric) is None:
        names = [name for meanings in METRICS.values() for name in meanings]
        close = difflib.get_close_matches(metric, names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"{option}: no metric is called {metric}; {hint}docs/metrics.md lists them"
        )


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported; a mere folder of that name is none."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None
