"""Refuses recipes that lack what their advantage needs, or have a critic or a teacher in vain.

The advantage itself is not imported.
"""

from pathlib import Path

import mcore_rl
from mcore_rl.checks.source import list_needs
from mcore_rl.config import Config, ServedModelConfig
from mcore_rl.config.tree_checks import Unread, refuse

ALGORITHMS = Path(mcore_rl.__file__).parent / "algo"


def check_needs(config: Config) -> None:
    """Raise ValueError if the advantage, which is one of ours, lacks what it needs, a group or a
    teacher, or has no use for a critic or a teacher that the recipe has.
    """
    advantage = config.algorithm.advantage
    needs = list_needs(ALGORITHMS / "advantages.py", "advantages", advantage)
    if "others" in needs:
        check_samples(advantage, config.rollout.samples_per_prompt)
    if "teacher" in needs:
        check_teacher_path(advantage, config.teacher)
    else:
        check_no_teacher(advantage, config.teacher)
    if "critic" not in needs:
        refuse(config, [find_unread_critic(advantage)])


def find_unread_critic(advantage: str) -> Unread:
    """Return that nothing reads the critic's options."""
    return Unread(("critic",), f"algorithm.advantage={advantage}", "set algorithm.advantage=gae")


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


def check_no_teacher(advantage: str, teacher: ServedModelConfig) -> None:
    """Raise ValueError if an advantage that asks no teacher has one."""
    if teacher.is_used:
        raise ValueError(
            f"teacher.path={teacher.path} with algorithm.advantage={advantage}: nothing asks the"
            " teacher; set algorithm.advantage=distillation"
        )
