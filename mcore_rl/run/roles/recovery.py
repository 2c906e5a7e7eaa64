"""Recovers lost ranks of trainer and critic, from the states that they kept in memory.

    work fails -> is a rank dead or hung? -> lost ranks are replaced -> every rank of both
    models goes back to the newest state that all have -> engines are linked by the next sync
    -> the work is done again

So the run goes on as if nothing had happened, bit for bit. Where the ranks of a lost node find no
room, run.recovery.min_dp lets fewer ranks go on, until there is room for more at the beginning of
two steps in a row. An error of a rank's program ends the run: it would come again. Where an error
may be of the GPU or of the program, this is tried once.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from mcore_rl.cluster.answers import GRACE_S, RankError, RankLostError
from mcore_rl.cluster.placement import NoRoomError
from mcore_rl.logs.progress import say
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.loops.roles import State
from mcore_rl.process.clock import now_s
from mcore_rl.process.process_state import RestartBudget
from mcore_rl.process.signals import forbid_interruption
from mcore_rl.run.roles.colocation import ALL, SharedGpus
from mcore_rl.run.roles.failed_saves import note_failed_saves
from mcore_rl.types import FailedSaves
from mcore_rl.weight_sync.controller.sync import SyncError

_log = logging.getLogger(__name__)
T = TypeVar("T")
BACKOFF_S = 2.0
"""Wait before the second recovery between two steps; it doubles with each further one."""
MAX_BACKOFF_S = 60.0
SAVING_STEPS = 3
"""Steps for which a checkpoint that is being written puts off that a model takes more ranks."""


def backoff_s(num_in_row: int) -> float:
    """Return the seconds to wait before the last of `num_in_row` recoveries between two steps."""
    return 0.0 if num_in_row < 2 else min(BACKOFF_S * 2 ** (num_in_row - 2), MAX_BACKOFF_S)


class KeptModel(Protocol):
    """The ranks of trainer or critic; see cluster.model_groups.ModelGroup."""

    role: str

    @property
    def dp_size(self) -> int: ...

    def find_loss(self, wait_s: float) -> RankLostError | None: ...

    def restart(self) -> None: ...

    def find_larger(self) -> int: ...

    def grow(self) -> None: ...

    def finish_save(self) -> FailedSaves: ...

    def keep_state(self, step: int) -> int: ...

    def find_kept_steps(self) -> set[int]: ...

    def restore_state(self, step: int) -> None: ...


class Rewound(Protocol):
    """A role of the controller that goes back with the ranks."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


@dataclass(frozen=True)
class Recovered:
    """The models of a run that are recovered, and what depends on their ranks.

    prepare       does what a start does with a model before it loads a state
    renew         begins to copy states to partner nodes again whose partner is lost
    settle        waits until kept states lie on partner nodes, too
    forget_links  has the next weight sync link the engines to the new ranks
    rewound       goes back with the ranks, if the loop's work changes it
    note_done     has the state of a step outlive this process, where the ranks' does
    """

    models: Sequence[KeptModel]
    gpus: SharedGpus
    folder: RunFolder
    prepare: Callable[[str], None]
    renew: Callable[[], None]
    settle: Callable[[], None]
    forget_links: Callable[[], None]
    rewound: Rewound | None
    note_done: Callable[[State], None]


@dataclass(frozen=True)
class _Trained:
    """The work that trained a step, until the step's state lies on partner nodes, too."""

    step: int
    work: Callable[[], object]


class RankRecovery:
    """Implements roles.Recovery."""

    def __init__(self, recovered: Recovered, most: int, start_step: int) -> None:
        """Keep the state after `start_step`, which the models have. `most`: recoveries an hour."""
        self._of = recovered
        self._most = most
        self._budget = RestartBudget()
        self._rewound: dict[int, Mapping[str, object]] = {}
        self._save: tuple[int, Callable[[], None]] | None = None
        self._trained = _Trained(start_step, _do_nothing)
        self._num_recovered = 0
        self._num_in_row = 0
        """Recoveries since a step was trained."""
        self._larger: dict[str, int] = {}
        """By role, the data-parallel size that there was room for when the last step began."""
        self._num_put_off = 0
        """Steps for which there was room, and a checkpoint was being written."""
        self._doubted: RankLostError | None = None
        """An error since the last work that succeeded, of a GPU or of the program."""
        self._keep(start_step)
        recovered.settle()

    def train(self, step: int, work: Callable[[], T]) -> tuple[T, Mapping[str, float]]:
        def train_and_keep() -> tuple[T, Mapping[str, float]]:
            self._of.settle()
            self._maybe_grow()
            trained = work()
            return trained, self._keep(step)

        found = self.repeat(train_and_keep)
        self._num_in_row = 0
        self._trained = _Trained(step, work)
        return found

    def repeat(self, work: Callable[[], T]) -> T:
        """Return work(); recover lost ranks and call `work` again as often as the budget allows.

        Raises the error of `work` if no rank is lost, or one recovery too many is needed. An engine
        that starts again in `work` may have met the loss of a rank that is recovered beside it.
        """
        while True:
            num_recovered = self._num_recovered
            try:
                found = work()
                if self._trained.work is not _do_nothing:
                    self._of.settle()
                    self._trained = _Trained(self._trained.step, _do_nothing)
                self._doubted = None
                return found
            except SyncError as error:
                if self._num_recovered == num_recovered:
                    self.recover(error)
                else:
                    _log.warning("%s, while ranks were recovered; trying again", error)
            except Exception as error:
                self.recover(error)

    def take_back(self) -> bool:
        with forbid_interruption():
            self.repeat(lambda: self._restore(self._trained.step))
        return True

    def save(self, step: int, work: Callable[[], None]) -> None:
        self._save = (step, work)
        self.repeat(work)

    def note_done(self, step: int, state: State) -> None:
        self._of.note_done({**state, "step": step})

    def _keep(self, step: int) -> dict[str, float]:
        """Keep the state of models and advantages after `step`; return metrics."""
        began_s = now_s()
        num_bytes = sum(model.keep_state(step) for model in self._of.models)
        if self._of.rewound is not None:
            state = deepcopy(dict(self._of.rewound.state_dict()))
            self._rewound = {step - 1: self._rewound.get(step - 1, {}), step: state}
        return {
            "recovery/kept_bytes": float(num_bytes),
            "recovery/keep_seconds": now_s() - began_s,
            "recovery/count": float(self._num_recovered),
            "recovery/dp": float(self._of.models[0].dp_size),
        }

    def recover(self, error: Exception) -> None:
        """Replace lost ranks and go back; raise `error` if none is lost or the budget is spent.

        A stop that becomes overdue waits until ranks have a state again, which can be saved.
        """
        with forbid_interruption():
            self._recover(error)

    def _recover(self, error: Exception) -> None:
        while True:
            lost = self._find_losses()
            if not lost:
                raise error
            self._refuse_again(lost.values())
            if not self._budget.take(self._most):
                reason = f"{error}\nrun.recovery.restarts={self._most} within an hour are spent"
                raise RankLostError(reason) from error
            began_s = now_s()
            reasons = "; ".join(dict.fromkeys(str(loss) for loss in lost.values()))
            _tell(f"replacing the ranks of {' and '.join(sorted(lost))}: {reasons}")
            self._num_in_row += 1
            time.sleep(backoff_s(self._num_in_row))
            try:
                step = self._go_back(lost)
            except NoRoomError as no_room:
                raise RankLostError(f"{error}\n{no_room}") from no_room
            except Exception as next_error:  # ranks may be lost during a recovery, too
                error = next_error
                continue
            self._num_recovered += 1
            _tell(
                f"recovered step {step} from memory in {now_s() - began_s:.1f} s"
                f" ({self._budget.num_recent} of {self._most} within an hour)"
            )
            return

    def _refuse_again(self, losses: Iterable[RankLostError]) -> None:
        """Raise RankError for the second doubtful error in a row: it is the program's."""
        doubtful = next((loss for loss in losses if loss.is_doubtful), None)
        if doubtful is not None and self._doubted is not None:
            raise RankError(
                f"{doubtful}\nsuch an error came when the work was done first, too: it is taken for"
                " one of the program, not of a GPU"
            ) from self._doubted
        self._doubted = doubtful or self._doubted

    def _find_losses(self) -> dict[str, RankLostError]:
        """Return, by role, why the ranks of a model are lost."""
        losses = {model.role: model.find_loss(GRACE_S) for model in self._of.models}
        return {role: loss for role, loss in losses.items() if loss is not None}

    def _go_back(self, lost: Mapping[str, RankLostError]) -> int:
        """Replace the ranks of the models `lost`; return the step that all ranks are back at.

        A step whose state was lost with a node, before it was on the partner's, is trained again.
        """
        of = self._of
        of.forget_links()
        of.gpus.forget(lost)
        for model in of.models:
            if model.role in lost:
                of.gpus.replace(model.role, partial(self._restart, model))
        kept = [model.find_kept_steps() for model in of.models]
        common = kept[0].intersection(*kept[1:])
        wanted = self._trained.step  # a later one is of work that will be done again
        step = next((step for step in (wanted, wanted - 1) if step in common), None)
        if step is None:
            raise RankLostError(
                f"the state of step {wanted} is not whole in the memory of all ranks:"
                " the same command continues from the newest checkpoint"
            )
        self._restore(step)
        if step < wanted:
            self._trained.work()
            self._keep(wanted)
        self._save_again(wanted)
        of.renew()
        of.settle()
        return step

    def _restore(self, step: int) -> None:
        """Have models and advantages go back to their state after `step`."""
        for model in self._of.models:
            self._of.gpus.load(model.role, ALL)
            model.restore_state(step)
        if self._of.rewound is not None:
            self._of.rewound.load_state_dict(deepcopy(dict(self._rewound[step])))

    def _restart(self, model: KeptModel) -> None:
        before = model.dp_size
        model.restart()
        self._larger = {}
        if model.dp_size < before:
            _tell(
                f"{model.role}: dp {before} -> {model.dp_size}, as no node has room for the ranks"
                " of a lost one; each rank trains on more of the batch"
            )
        self._of.prepare(model.role)

    def _maybe_grow(self) -> None:
        """Have a model take more ranks, once there was room for them when two steps began.

        Kept states must lie on partner nodes, too. A checkpoint that is being written puts it off
        for up to SAVING_STEPS steps; then it is waited for.
        """
        larger = {model.role: model.find_larger() for model in self._of.models}
        before, self._larger = self._larger, larger
        growing = [
            model
            for model in self._of.models
            if model.dp_size < larger[model.role] == before.get(model.role)
        ]
        if growing and self._is_saving() and self._num_put_off < SAVING_STEPS:
            self._num_put_off += 1
            return
        self._num_put_off = 0
        if growing and self._is_saving():
            for model in self._of.models:
                note_failed_saves(self._of.folder, model.finish_save())
        for model in growing:
            self._grow(model)

    def _grow(self, model: KeptModel) -> None:
        """Replace the ranks of a model by more of them, with the state that it has now."""
        of = self._of
        began_s, before = now_s(), model.dp_size
        of.forget_links()
        of.gpus.forget([model.role])

        def grow() -> None:
            model.grow()
            of.prepare(model.role)

        of.gpus.replace(model.role, grow)
        of.gpus.load(model.role, ALL)
        model.restore_state(self._trained.step)
        _tell(
            f"{model.role}: dp {before} -> {model.dp_size} in {now_s() - began_s:.1f} s, as nodes"
            " have room for more ranks again"
        )

    def _is_saving(self) -> bool:
        """Return whether ranks may be writing the last checkpoint that was begun."""
        if self._save is None or self._of.folder.is_saved(self._save[0]):
            return False
        return self._save[0] not in self._of.folder.failed_saves

    def _save_again(self, step: int) -> None:
        """Save once more what the lost ranks had begun to save, if that is still possible."""
        if self._save is None or self._of.folder.is_saved(self._save[0]):
            return
        saved_step, work = self._save
        if saved_step == step:
            self._of.folder.failed_saves.pop(step, None)
            work()
        else:
            _log.warning(
                "the checkpoint of step %d was not complete and is lost: memory has step %d",
                *(saved_step, step),
            )


def _tell(text: str) -> None:
    """Tell something on the console and in the controller's log."""
    _log.warning(text)
    say(text)


def _do_nothing() -> None:
    """Stand in the place of work that need not be done again."""
