"""Refuses recipes that lack what their advantage needs; the advantage itself is not imported."""

from pathlib import Path

import mcore_rl
from mcore_rl.checks.source import list_needs
from mcore_rl.config import AlgorithmConfig, RolloutConfig, ServedModelConfig

ALGORITHMS = Path(mcore_rl.__file__).parent / "algo"


def check_needs(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, teacher: ServedModelConfig
) -> None:
    """Raise ValueError if the advantage, which is one of ours, has no group or no teacher."""
    file = ALGORITHMS / "advantages.py"
    needs = list_needs(file, "advantages", algorithm.advantage)
    if "others" in needs:
        check_samples(algorithm.advantage, rollout.samples_per_prompt)
    if "teacher" in needs:
        check_teacher_path(algorithm.advantage, teacher)


def check_samples(advantage: str, samples_per_prompt: int) -> None:
    """Raise ValueError if samples are to be compared with others of their prompt, and have none."""
    if samples_per_prompt == 1:
        raise ValueError(
            f"algorithm.advantage={advantage} with rollout.samples_per_prompt=1: it"
            " compares a prompt's samples with one another, so that every advantage would be 0; set"
            " rollout.samples_per_prompt=2 or more (8 is usual), or"
            " algorithm.advantage=reinforce_plus_plus, remax or gae"
        )


def check_teacher_path(advantage: str, teacher: ServedModelConfig) -> None:
    """Raise ValueError if an advantage that asks a teacher has none."""
    if not teacher.path:
        raise ValueError(
            f"algorithm.advantage={advantage} with teacher.path='' and teacher.url={teacher.url!r}:"
            " a teacher scores token ids, which needs SGLang's own interface; set teacher.path"
        )
