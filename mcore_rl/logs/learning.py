"""Notices steps that teach the policy nothing, and warns of them in one line, with the remedy.

metrics of a step --> has it no signal, are all responses cut off? --> five in a row --> a warning
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

STEPS_IN_A_ROW = 5
"""So many steps in a row are told, and as many without the trouble let it be told again."""


@dataclass
class Trouble:
    """A fault that steps may have, and for how many steps in a row they have it."""

    is_met: Callable[[Mapping[str, float]], bool]
    text: str
    _is_so: bool = False
    _num_in_row: int = 0
    _is_told: bool = False

    def note(self, metrics: Mapping[str, float]) -> str:
        """Return the text if this step makes it due, and otherwise ""."""
        is_so = self.is_met(metrics)
        self._num_in_row = self._num_in_row + 1 if is_so == self._is_so else 1
        self._is_so = is_so
        if self._num_in_row < STEPS_IN_A_ROW or is_so == self._is_told:
            return ""
        self._is_told = is_so
        return self.text if is_so else ""


class LearningWatch:
    """The troubles of a run of reinforcement learning."""

    def __init__(
        self, *, max_response_len: int, compares_groups: bool, reads_rewards: bool = True
    ) -> None:
        """
        max_response_len   rollout.max_response_len
        compares_groups    the advantage compares a prompt's samples with one another; others
                           compare all samples of a step, or these with a critic's values
        reads_rewards      False: a teacher's log-probs take the place of rewards
        """
        name = "reward/groups_without_signal" if compares_groups else ""
        among = "of each prompt" if compares_groups else "of a step"
        cut_off = Trouble(
            lambda metrics: metrics.get("rollout/truncated_share") == 1.0,
            f"all responses are cut off at rollout.max_response_len={max_response_len}: raise it,"
            " or see in samples.jsonl why the model does not end its answers",
        )
        equal = Trouble(
            lambda metrics: metrics.get(name) == 1.0 if name else _is_flat(metrics),
            f"all rewards {among} are equal, so there is nothing to learn from: see the answers in"
            " samples.jsonl; take prompts that the model answers sometimes right, or set"
            " rollout.dynamic_sampling=true or a larger rollout.samples_per_prompt",
        )
        self._troubles = [cut_off, equal] if reads_rewards else [cut_off]

    def note(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return the warning that is due after a step; "" if none is."""
        if "reward/mean" not in metrics:
            return ""
        due = [text for trouble in self._troubles if (text := trouble.note(metrics))]
        if not due:
            return ""
        return f"warning: steps {step - STEPS_IN_A_ROW + 1} to {step}: {'; '.join(due)}"


def _is_flat(metrics: Mapping[str, float]) -> bool:
    return metrics.get("reward/std") == 0.0
