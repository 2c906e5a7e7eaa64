"""Decides which processes of a run outlive its controller, and finds those of an earlier one.

    cluster.address, run.recovery, GPUs that nobody shares --> run_holder.py owns ranks and engines
    otherwise                                              --> they end with the controller

Processes go on only for the same command, recipe and program.
"""

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mcore_rl import __version__
from mcore_rl.cluster.group import StartActor, start_actor
from mcore_rl.cluster.run_holder import HeldRun, LivingRun, open_holder
from mcore_rl.cluster.state_keepers import KeptPlaces, StateKeepers, start_keeper
from mcore_rl.config import Config
from mcore_rl.config.secrets import dump_config
from mcore_rl.planning.bundles import RunSize
from mcore_rl.planning.slots import RunSlots
from mcore_rl.process.server_keys import ServerKeys

TOKEN = "run.token"


class Outliving:
    """The processes of a run that outlive its controller: none, unless there is a holder."""

    def __init__(
        self, made_by: str = "", held: HeldRun | None = None, living: LivingRun | None = None
    ) -> None:
        """`made_by`: the recipe and the program. `living`: what an earlier controller has left."""
        self._made_by = made_by
        self._held = held
        self._living = living
        self._keepers: StateKeepers | None = None
        self._begun: tuple[RunSlots, ServerKeys] | None = None

    @property
    def slots(self) -> RunSlots | None:
        """The slots of an earlier controller; None: there are none."""
        return None if self._living is None else self._living.slots

    @property
    def keys(self) -> ServerKeys | None:
        """The keys of an earlier controller's servers."""
        return None if self._living is None else self._living.keys

    @property
    def positions(self) -> bytes | None:
        """The positions from which the loop of an earlier controller continues; None: none."""
        return None if self._living is None else self._living.positions

    @property
    def run(self) -> Callable[[Callable[[], Any]], Any]:
        """Calls a function in the process that is to own what it starts."""
        return _call if self._held is None else self._held.run

    @property
    def start(self) -> StartActor:
        """Starts the actors of ranks and engines."""
        run = self.run
        return lambda plan: run(partial(start_actor, plan))

    def begin(self, slots: RunSlots, keys: ServerKeys) -> None:
        """Note what this controller uses; end the earlier one's processes that do not go on."""
        self._begun = slots, keys
        if self._held is not None and self._living is not None:
            self._held.keep_only(self._living.list_actors())

    def find_living(self, role: str) -> Sequence[Any]:
        """Return the actors of "trainer", "critic" or "engines" that go on, in order."""
        return () if self._living is None else self._living.actors.get(role, ())

    def find_keepers(self, timeout_s: float) -> StateKeepers | None:
        """Return what an earlier controller's ranks have kept; None: there was no such one."""
        if self._living is None:
            return None
        return self.open_keepers((), timeout_s)

    def open_keepers(self, nodes: Collection[str], timeout_s: float) -> StateKeepers:
        """Return the keepers of the run: an earlier controller's, if it has left some."""
        if self._keepers is None:
            run = self.run
            start = None if self._held is None else lambda node: run(partial(start_keeper, node))
            earlier = None if self._living is None else self._living.keepers
            self._keepers = StateKeepers(nodes, timeout_s, start, earlier)
        return self._keepers

    def note(self, actors: dict[str, list[Any]], kept: KeptPlaces, positions: bytes) -> None:
        """Have the next controller go on with these actors, by role, and from these positions."""
        if self._held is None:
            return
        assert self._begun is not None, "begin comes first"
        slots, keys = self._begun
        self._held.hold(LivingRun(self._made_by, slots, keys, actors, kept, positions))

    def forget(self) -> None:
        """Have the next controller start anew, from the newest checkpoint."""
        if self._held is not None:
            self._held.hold(None)


def _call(function: Callable[[], Any]) -> Any:
    return function()


@contextmanager
def open_outliving(config: Config, command: str) -> Iterator[Outliving]:
    """Yield what outlives the controller of a command; if the block ends, that ends, too."""
    if not _may_outlive(config, RunSize.make(config, command)):
        yield Outliving()
        return
    made_by = _describe_making(config, command)
    made = name_run(Path(config.run.dir).resolve()), made_by, config.run.startup_timeout_s
    with open_holder(*made, goes_on=bool(config.run.resume)) as (held, living):
        yield Outliving(made_by, held, living)


def name_run(run_dir: Path) -> str:
    """Return the name of the run in its cluster, where other machines may have such a folder, too.

    The folder keeps what tells the names apart.
    """
    token = run_dir / TOKEN
    if not token.is_file():
        run_dir.mkdir(parents=True, exist_ok=True)
        token.write_text(secrets.token_hex(8))
    return f"{run_dir} {token.read_text()}"


def _may_outlive(config: Config, size: RunSize) -> bool:
    """Return whether ranks and engines may go on without this process.

    Ray must go on, and nobody else may know of memory that models on the same GPUs have given up.
    """
    cluster = config.cluster
    shares = (
        cluster.colocated or cluster.offload or config.critic.colocated or size.colocated_served
    )
    recovers = size.trainer > 0 and config.run.recovery.is_used and not config.run.debug
    return cluster.address is not None and recovers and not shares


def _describe_making(config: Config, command: str) -> str:
    """Return all that ranks and engines depend on; a resume is one by another controller."""
    written: dict[str, Any] = dump_config(config)
    written["run"] = {**written["run"], "resume": True}
    return json.dumps([__version__, command, written], sort_keys=True, default=str)
