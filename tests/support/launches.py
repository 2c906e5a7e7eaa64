"""Makes the files of a submission as `mcore-rl submit` does, without a scheduler."""

from collections.abc import Sequence
from pathlib import Path

from launch.options import LaunchOptions
from launch.submission import DOCTOR, Submission, find_needs, make_submission
from launch.submit import split
from launch.targets import TARGETS, load_launch
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.bundles import RunSize

GOLDEN = Path(__file__).parents[1] / "launch" / "golden"


def prepare(words: Sequence[str]) -> tuple[Submission, LaunchOptions]:
    """Read the words of `mcore-rl submit` as it does."""
    command, launch, overrides, settings = split(words)
    recipe = next(w.removeprefix("recipe=") for w in settings if w.startswith("recipe="))
    rest = [word for word in settings if not word.startswith("recipe=")]
    options = load_launch(launch, overrides)
    config = load_recipe(recipe, [*rest, "cluster.address=auto"])
    size = RunSize.make(config, "train" if command == DOCTOR else command)
    needs = find_needs(size, config.rollout, config.cluster, config.plan, options)
    run_dir = Path(config.run.dir)
    return make_submission(command, settings, run_dir, needs, options), options


def files_of(*words: str) -> dict[str, str]:
    """Return the text of each file that `mcore-rl submit` writes for its target."""
    submission, options = prepare(words)
    return TARGETS[options.target].make_files(submission, options)


def written(*words: str) -> Submission:
    """Write the files as `mcore-rl submit` does; return the submission."""
    submission, options = prepare(words)
    submission.folder.mkdir(parents=True)
    for name, text in TARGETS[options.target].make_files(submission, options).items():
        (submission.folder / name).write_text(text)
    return submission
