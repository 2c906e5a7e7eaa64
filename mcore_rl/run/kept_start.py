"""Continues a run whose controller was lost, from the states that its ranks kept in memory.

    step 7 is done -> the loop's positions are held     controller lost    ranks take back the state
                      beside the ranks' states      ---------------------> of step 7, the loop its
                                                                           positions

Where the controller has started Ray, its command holds both (process/relaunch.py), and ranks are
new. Where others have, ranks and engines go on (cluster/run_holder.py).
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.cluster.model_group import ModelGroup
from mcore_rl.cluster.run import RunProcesses
from mcore_rl.cluster.state_keepers import StateKeepers
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
    def find(newest: Path | None, newest_step: int, positions: bytes | None) -> "Origin":
        """Return the checkpoint and its step, or what this process's predecessor had held.

        positions   those that outlived the predecessor with its ranks, if there are any
        """
        content = positions or relaunch.read_state()
        held = None if content is None else load_plain(content, Path("memory"))
        return Origin(newest, held if held is not None and held["step"] >= newest_step else None)

    def find_held(self, models: Sequence[ModelGroup]) -> int:
        """Return the step that is held; 0 if there is none that is whole in all ranks' memory.

        Ranks that an earlier controller left are replaced then, as nothing says what they hold.
        """
        step = 0 if self.held is None else int(self.held["step"])
        if step and all(step in model.find_earlier_steps() for model in models):
            return step
        KeptMemory().close()  # no copy of another time may count later
        if step:
            say(f"the state of step {step} is not whole in memory, and a checkpoint counts")
        for model in models:
            model.start_over()
        return 0

    def restore(
        self,
        models: Sequence[ModelGroup],
        parts: Mapping[str, Any],
        prepare: Callable[[str], None] = lambda role: None,
    ) -> None:
        """Take models and parts back to the step that is held.

        prepare   called with the role of a model before its ranks go back
        """
        assert self.held is not None, "find_held comes first"
        for model in models:
            prepare(model.role)
            model.restore_state(int(self.held["step"]))
        for name, part in parts.items():
            part.load_state_dict(self.held[name])


def hold_positions(processes: RunProcesses, keepers: StateKeepers, state: State) -> None:
    """Hold what the loop continues from, with the "step" that was done, for another controller."""
    positions = pickle.dumps(dict(state))
    if keepers.outlive_controllers:
        relaunch.hold_state(positions)
    processes.note_done(positions, keepers)
