"""Finds the files of a recipe as the nodes of its job will see them; refuses those they cannot."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from launch.options import KubeRayOptions, LaunchOptions, SkyPilotOptions, SlurmOptions
from mcore_rl.checks.inputs import HERE, RunPlace
from mcore_rl.config.shipped import HOME, RECIPES_DIR

Mounts = Mapping[str, Path | None]
"""Folder of the nodes -> where this machine has it; None: it cannot be seen from here."""


def find_place(run_dir: str, options: LaunchOptions) -> RunPlace:
    """Return where the command of a job will run, whose run folder is `run_dir`."""
    mounts = list_mounts(run_dir, options)
    if mounts is None:
        python = getattr(options, "python", "")
        return RunPlace(HERE.look, is_here=not python)
    how = _name_option(options)

    has_cwd = str(Path.cwd()) in mounts

    def look(option: str, path: str) -> Path | None:
        return _see(option, path, mounts, how, has_cwd=has_cwd)

    return RunPlace(look, is_here=False)


def list_mounts(run_dir: str, options: LaunchOptions) -> Mounts | None:
    """Return the folders that the job's processes see; None if they see those of this machine."""
    match options:
        case KubeRayOptions():
            unseen = [*options.claims.values(), *options.image_folders]
            return dict.fromkeys(unseen)
        case SkyPilotOptions():
            unseen = [*options.buckets, *options.volumes, *options.image_folders]
            return dict.fromkeys(unseen)
        case SlurmOptions(container="none"):
            return None
        case SlurmOptions():
            own = {} if options.container == "pyxis" else _list_bound_by_apptainer()
            return {**dict.fromkeys(options.image_folders), **own, run_dir: Path(run_dir)} | {
                _split(mount)[1]: Path(_split(mount)[0]) for mount in options.mounts
            }
        case _:
            return None


def _list_bound_by_apptainer() -> Mounts:
    """Return what apptainer mounts by itself, unless an administrator says otherwise."""
    return {str(path): path for path in (Path.home(), Path.cwd(), Path("/tmp"))}


def _split(mount: str) -> tuple[str, str]:
    """Return host folder and container folder of <host>[:<container>[:<flags>]]."""
    host, *rest = mount.split(":")
    return host, rest[0] if rest else host


def _name_option(options: LaunchOptions) -> str:
    return {
        KubeRayOptions: "launch.claims={<claim>: <folder>}",
        SkyPilotOptions: "launch.volumes={<folder>: <volume>} or launch.buckets",
        SlurmOptions: "launch.mounts=[<folder>:<folder>]",
    }[type(options)]


def _see(option: str, path: str, mounts: Mounts, how: str, *, has_cwd: bool) -> Path | None:
    """Return where this machine has a path of the nodes; None if it cannot be seen from here.

    has_cwd   the job begins in this working folder, which it sees

    Raises ValueError naming the remedy if the nodes do not see the path either.
    """
    shipped = HOME / path  # the path itself, if it is a whole one
    if shipped.is_relative_to(RECIPES_DIR) and shipped.exists():
        return shipped
    if has_cwd:
        path = str(Path(path).absolute())
    known = f"they have {', '.join(sorted(mounts)) or 'no folder of yours'}"
    if not PurePosixPath(path).is_absolute():
        raise ValueError(
            f"{option}: {path} is relative, and the job's nodes do not have this machine's folder"
            f" ({known}): give the whole path there"
        )
    for mount, here in mounts.items():
        if PurePosixPath(path).is_relative_to(mount):
            return None if here is None else here / PurePosixPath(path).relative_to(mount)
    raise ValueError(
        f"{option}: {path} lies in no folder that the job's nodes have ({known}): put it below one"
        f" of these, mount its folder with {how}, or name the folder in launch.image_folders if"
        " the image has it"
    )
