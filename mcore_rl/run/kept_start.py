"""Continues a run whose controller was lost, from the states that its ranks kept in memory.

    step 7 is done -> the loop's positions are held     controller lost    ranks take back the state
                      beside the ranks' states      ---------------------> of step 7, the loop its
                      (process/relaunch.py)                                positions

The memory is on the controller's machine. Where ranks have it on other nodes it ends with them, and
a checkpoint is continued from.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.cluster.model_groups import ModelGroup
from mcore_rl.logs.progress import say
from mcore_rl.loops.roles import State
from mcore_rl.process import relaunch
from mcore_rl.process.kept_memory import KeptMemory
from mcore_rl.process.plain_pickle import load_plain


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a command goes on from, or a later state that is held in memory.

    newest   None: there is no checkpoint
    held     the loop's positions after a step, which has the name "step"; None: there is none
    """

    newest: Path | None
    held: Mapping[str, Any] | None = None

    @staticmethod
    def find(newest: Path | None, newest_step: int) -> "Origin":
        """Return the checkpoint and its step, or what this process's predecessor had held."""
        content = relaunch.read_state()
        held = None if content is None else load_plain(content, Path("memory"))
        return Origin(newest, held if held is not None and held["step"] > newest_step else None)

    def restore(
        self,
        models: Sequence[ModelGroup],
        parts: Mapping[str, Any],
        prepare: Callable[[str], None] = lambda role: None,
    ) -> int:
        """Take models and parts back to the step that is held, and return it.

        Returns 0 if there is none, or if it is not whole in the memory of all ranks.

        prepare   called with the role of a model before its ranks go back
        """
        held = self.held or {}
        step = int(held.get("step", 0))
        if not step or not all(step in model.find_earlier_steps() for model in models):
            KeptMemory().close()  # no copy of another time may count later
            if step:
                say(f"the state of step {step} is not whole in memory, and a checkpoint counts")
            return 0
        for model in models:
            prepare(model.role)
            model.restore_state(step)
        for name, part in parts.items():
            part.load_state_dict(held[name])
        return step


def hold_positions(state: State) -> None:
    """Hold what the loop continues from, with the "step" that was done, for another controller."""
    relaunch.hold_state(pickle.dumps(dict(state)))
