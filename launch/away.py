"""Prepares a run whose nodes do not see this machine: its folder on a mount, its recipe sent."""

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import yaml

from launch.submission import Submission
from mcore_rl.config.shipped import RECIPES_DIR
from mcore_rl.process.redaction import is_secret_name, redact

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def require_mounted(submission: Submission, mounts: Iterable[str], option: str) -> None:
    """Raise ValueError naming the remedy if no mount holds the run's folder.

    Without one the checkpoints are gone with the first node that is.
    """
    known = sorted(mounts)
    if any(PurePosixPath(submission.run_dir).is_relative_to(mount) for mount in known):
        return
    told = f"these are mounted: {', '.join(known)}" if known else "nothing is mounted"
    raise ValueError(
        f"run.dir={submission.run_dir} lies on no storage that outlives the nodes and that all of"
        f" them see ({told}): mount some with {option}, and choose run.dir below it"
    )


def require_absolute(mounts: Iterable[str], option: str) -> None:
    """Raise ValueError naming the first place for a mount that is no whole path, or that is `/`."""
    for mount in mounts:
        if not PurePosixPath(mount).is_absolute() or PurePosixPath(mount) == PurePosixPath("/"):
            raise ValueError(
                f"{option}: {mount!r} is no place to mount at: give a whole path, such as /mnt/runs"
            )


def find_own_recipe(submission: Submission) -> Path | None:
    """The recipe's file if it is one of the user's own, which no image has."""
    given = next(w.partition("=")[2] for w in submission.settings if w.startswith("recipe="))
    return Path(given) if given.endswith((".yaml", ".yml")) else None


def read_recipe(path: Path) -> str:
    """The text of a recipe that is sent along.

    Raises ValueError if it needs files beside it, or holds a secret, which others could read there.
    """
    text = path.read_text()
    if secret := _first_secret(yaml.safe_load(text)):
        raise ValueError(
            f"recipe={path}: {secret} is a secret, and the job's files would show it: write"
            " ${oc.env:NAME} there, and set NAME with launch.secrets"
        )
    folder = path.resolve().parent
    needed = [name for name in _defaults(text) if (folder / name).is_file()]
    if needed and folder != RECIPES_DIR.resolve():
        raise ValueError(
            f"recipe={path} takes {', '.join(needed)} from its folder, and only the recipe itself"
            " is sent along: write into it what it takes from there, or put the folder into the"
            " image and start the run there"
        )
    return text


def _first_secret(tree: object, name: str = "") -> str | None:
    """The name of the first option whose value is a secret, by its name or by how it looks."""
    if isinstance(tree, dict):
        children = [(f"{name}.{key}".lstrip("."), value) for key, value in tree.items()]
        return next((found for key, v in children if (found := _first_secret(v, key))), None)
    if isinstance(tree, list):
        return next((found for value in tree if (found := _first_secret(value, name))), None)
    if not isinstance(tree, str) or not tree or tree.startswith("${"):
        return None
    last_word = name.replace("_", ".").rpartition(".")[2]  # moe_token_dispatcher_type is none
    return name if is_secret_name(last_word) or redact(tree) != tree else None


def _defaults(text: str) -> list[str]:
    """Files that a recipe's defaults list names, relative to where Hydra looks."""
    tree = yaml.safe_load(text)
    entries = tree.get("defaults", []) if isinstance(tree, dict) else []
    pairs = [
        (str(key).split()[-1] + "/", value)
        for entry in entries
        for key, value in (entry.items() if isinstance(entry, dict) else [("/", entry)])
    ]
    return [f"{group.removeprefix('/')}{name}.yaml".lstrip("/") for group, name in pairs]


def replace_recipe(submission: Submission, recipe: str | None) -> list[str]:
    """Arguments of `mcore-rl`, with the path at which the nodes find the user's own recipe."""
    if recipe is None:
        return submission.arguments
    return [
        f"recipe={recipe}" if word.startswith("recipe=") else word for word in submission.arguments
    ]


def make_job_name(given: str, submission: Submission, option: str, most_len: int) -> str:
    """The job's name as Kubernetes wants them, at most `most_len` long.

    Raises ValueError if the name that was given is none.
    """
    if given:
        if len(given) > most_len or not _DNS_LABEL.fullmatch(given):
            raise ValueError(
                f"{option}={given}: expected at most {most_len} lower-case letters, digits and"
                " dashes that begin with a letter and do not end with a dash"
            )
        return given
    name = re.sub(r"[^a-z0-9]+", "-", submission.name.lower())[:most_len].strip("-")
    assert _DNS_LABEL.fullmatch(name), name  # it begins with the command's name
    return name
