"""Reads options in the form of Hydra: YAML files, overrides key=value, whole command lines."""

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mcore_rl.config.tree import flatten as flatten_tree
from mcore_rl.tools.translate.translation import ForeignOptions

OWN_CONFIGS = frozenset(
    f"{program}{kind}_trainer"
    for program in ("", "fully_async_", "one_step_off_")
    for kind in ("ppo", "ppo_megatron")
)
"""Configurations of verl's RL training, whose values are its defaults here."""
SFT_CONFIG = "sft_trainer_engine"
"""The configuration of verl's fine-tuning on answers, whose values are its defaults here, too."""
PROGRAMS = {
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    **{f"verl.trainer.sft_trainer{kind}": SFT_CONFIG for kind in ("", "_ray")},
}
"""Programs of verl besides main_ppo, and the configuration that each takes if none is named."""
LAUNCHER_SIZES = {
    "--nnodes": "trainer.nnodes",
    "--nproc_per_node": "trainer.n_gpus_per_node",
    "--nproc-per-node": "trainer.n_gpus_per_node",
}
"""Options of torchrun, which starts verl's fine-tuning, that say how many GPUs there are."""


def read_options(arguments: Sequence[str]) -> ForeignOptions:
    """Return the options of YAML files and of overrides `key=value`; later ones win.

    A file is a configuration, or a list of overrides as Hydra leaves it in .hydra/overrides.yaml.
    A whole command line also has what runs verl, `uv run ... python3 -m <module>`, and what Hydra
    reads, --config-name=<name>. A configuration of that name which is not verl's own is read from
    --config-path, or from that folder beside the module, as Hydra does.
    Raises ValueError naming the file, the override or the program that cannot be read.
    """
    is_whole = False
    program, words = _split_program(arguments)
    flags, rest = _command_line().parse_known_args(words)
    folder = Path(flags.config_path or flags.config_dir or ".")
    beside = Path(*program.split(".")[:-1]) / folder
    name = flags.config_name or PROGRAMS.get(program, "")
    primary = _read_primary(name, (folder, beside) if program else (folder,))
    given = dict(primary.given)
    if primary.config_name == SFT_CONFIG:
        given |= _read_gpus(arguments)
    for argument in rest:
        if argument.endswith((".yaml", ".yml")) and "=" not in argument:
            content = _read_file(Path(argument))
            if isinstance(content, list):
                given |= parse_overrides([str(override) for override in content])
            else:
                is_whole = True
                given |= flatten(content)
        else:
            given |= parse_overrides([argument])
    unreadable = {n: text for n, text in primary.unreadable.items() if n not in given}
    return ForeignOptions(given, is_whole, primary.config_name, unreadable)


OTHER_PROGRAMS = {
    "fsdp_sft": "`mcore-rl sft` trains on answers; options of verl.trainer.sft_trainer, which verl"
    " has instead since 0.8, are read",
    "generation": "`mcore-rl eval` samples without training",
    "eval": "`mcore-rl eval` scores answers",
}
"""Programs of verl that are not translated, by a part of their names, and what there is."""


def _split_program(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the program of a whole command line, and what follows it; "" and other words as they
    are.

    Raises ValueError if the program does not train: its options mean something else.
    """
    modules = [
        place
        for place, (flag, module) in enumerate(pairwise(words))
        if flag == "-m" and module.startswith(("verl.", "recipe."))
    ]
    if not modules:
        files = [place for place, word in enumerate(words) if word.endswith(".py")]
        rest = words[files[-1] + 1 :] if files else words
        return "", rest or words  # A program alone is refused, as any word that sets nothing.
    program = words[modules[-1] + 1]
    for part, instead in OTHER_PROGRAMS.items():
        if part in program.rsplit(".", 1)[-1]:
            raise ValueError(f"{program} is not translated: {instead}")
    return program, words[modules[-1] + 2 :]


def _read_gpus(words: Sequence[str]) -> dict[str, int]:
    """Return the nodes and the GPUs of each that a command line of torchrun names; else 1."""
    sizes = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 1}
    for word, following in pairwise([*words, ""]):
        flag, _, value = word.partition("=")
        number = value or following
        if flag in LAUNCHER_SIZES and number.isdigit():
            sizes[LAUNCHER_SIZES[flag]] = int(number)
    return sizes


def _read_primary(name: str, folders: Sequence[Path]) -> ForeignOptions:
    """Return what the configuration `name` has on top of verl's own, which it names as a default.

    Raises ValueError if it is in none of `folders`: none of its options would be translated.
    """
    stem = name.removesuffix(".yaml")
    if not name or stem in (*OWN_CONFIGS, SFT_CONFIG):
        return ForeignOptions({}, False, stem)
    paths = [folder / f"{stem}.yaml" for folder in folders]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ValueError(
            f"--config-name={name}: there is no {' nor '.join(map(str, paths))}, and what it sets"
            " would be lost; run this in verl's folder, or give the folder where it lies with"
            " --config-path"
        )
    tree = load_tree(path)
    if not isinstance(tree, DictConfig):
        raise ValueError(f"{path}: a list, and no configuration")
    base = ForeignOptions({}, False)
    for default in tree.pop("defaults", None) or ():
        if isinstance(default, str) and default != "_self_":
            base = _read_primary(default, folders)
    tree.pop("hydra", None)
    leaves = flatten(OmegaConf.to_container(tree, resolve=False))  # type: ignore[arg-type]
    computed = {n: value for n, value in leaves.items() if "${" in str(value)}
    given = {n: value for n, value in leaves.items() if n not in computed}
    # A value that is computed replaces what an earlier configuration has, and the other way round.
    earlier = {n: value for n, value in base.given.items() if n not in computed}
    unreadable = {n: text for n, text in base.unreadable.items() if n not in given}
    return ForeignOptions(
        earlier | given,
        False,
        base.config_name,
        unreadable | {n: str(v) for n, v in computed.items()},
    )


def _command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-name", "-cn", default="")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-dir", "-cd")
    return parser


def _read_file(path: Path) -> Any:
    tree = load_tree(path)
    try:
        # A value that is missing ("???") is one that the user had to give elsewhere.
        return OmegaConf.to_container(tree, resolve=True, throw_on_missing=False)
    except (OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"{path}: no configuration in YAML: {error}") from None


def load_tree(path: Path, reader: str = "") -> DictConfig | ListConfig:
    """Return what a YAML file has, with its ${...} as they are.

    reader   what names the file, for the error if it is not there
    """
    try:
        return OmegaConf.load(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file{reader}") from None
    except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        raise ValueError(f"{path}: no configuration in YAML: {error}") from None


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of Hydra's overrides by dotted name; deleted options are None.

    Raises ValueError naming an override that is none.
    """
    given: dict[str, Any] = {}
    for text in overrides:
        if text.endswith((".sh", ".bash")) and "=" not in text:
            raise ValueError(
                f"{text}: a script of verl is not read, but run with what starts Python replaced"
                ' by this command: python3() { mcore-rl translate verl -- "$@"; };'
                ' python() { python3 "$@"; }; uv() { python3 "$@"; }; export -f python3 python uv;'
                f" bash {text} (docs/switching.md#scripts)"
            )
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            raise ValueError(
                f"{text}: neither a YAML file nor an override key=value: {error}"
            ) from None
        value = None if override.is_delete() else override.value()
        name = override.key_or_group
        nested = flatten(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
        given |= nested
    return given


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name; a missing value (???) is None."""
    leaves = flatten_tree(tree, prefix)
    return {name: None if value == "???" else value for name, value in leaves.items()}
