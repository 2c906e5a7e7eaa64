"""Runs the Megatron ranks of one model as Ray actors: starts, replaces and resizes them.

What ranks of policy and critic are asked for is in model_groups.py.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from mcore_rl.cluster.answers import Answers, RankError, RankLostError
from mcore_rl.cluster.group import LIVING_S, StartActor, start_actor
from mcore_rl.cluster.placement import NoRoomError, Seat, find_places, wait_for_room
from mcore_rl.cluster.shared_folder import CarriedStorage, RunFiles
from mcore_rl.cluster.state_keepers import NoMemoryError, StateKeepers, find_earlier
from mcore_rl.cluster.staying_ranks import StayingRanks
from mcore_rl.cluster.takeover import EarlierRanks, NewRanks, take_over
from mcore_rl.config import ParallelConfig
from mcore_rl.config.deadlines import answer_s
from mcore_rl.planning.slots import Slot
from mcore_rl.planning.smaller_layout import NoLayoutError, PlacedLayout, choose_layout
from mcore_rl.types import FailedSaves
from mcore_rl.workers.model_worker import ModelSpec, ModelWorker
from mcore_rl.workers.stores import SampleStores

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Build:
    """How the ranks of a model are built; see ModelGroup.start_build."""

    spec: ModelSpec
    timeout_s: float

    def fit(self, layout: PlacedLayout) -> "_Build":
        """Return how the ranks of another layout are built."""
        spec = replace(self.spec, parallel=layout.parallel, frozen_paths=())
        return replace(self, spec=spec)


class ModelGroup:
    """All ranks of one model.

    Every call raises RankError if a rank raises, dies or does not answer in time. Ranks wait for
    one another for up to `call_timeout_s`, and calls for ranks ANSWER_MARGIN_S longer.
    """

    role: str
    sizes: str
    """The group of options with the sizes of the layout."""
    worker_cls: type[ModelWorker]

    def __init__(
        self,
        slots: Sequence[Slot],
        log_dir: Path,
        call_timeout_s: float,
        runtime_envs: Mapping[int, Mapping[str, Any]] | None = None,
        stopped_s: float | None = None,
        start: StartActor = start_actor,
        living: Sequence[Any] = (),
    ) -> None:
        """Start the processes, without waiting for them, unless they are `living`.

        runtime_envs   Ray's runtime environments, by rank
        stopped_s      how long a rank may be stopped within a call; None: until its deadline
        living         actors of ranks that an earlier controller of the same run has left
        """
        self._all_slots = self._slots = slots
        """Those of the recipe's layout, and those of the ranks that go on."""
        self._places: Sequence[int] = range(len(slots))
        """Which of the recipe's slots are those of the ranks that go on."""
        self._start: Callable[..., StayingRanks] = partial(
            StayingRanks,
            self.role,
            log_dir=log_dir,
            runtime_envs=runtime_envs,
            stopped_s=stopped_s,
            start=start,
        )
        self.goes_on = bool(living)
        """Whether the ranks are those of an earlier controller, with the weights that they had."""
        self._group = self._start(slots, living=dict(enumerate(living)))
        self._whole: _Build | None = None
        """How the ranks of the recipe's layout are built."""
        self._build: _Build | None = None
        self._find_shared: Callable[[], Mapping[int, Sequence[str]]] | None = None
        self._shared_gpus: dict[int, Sequence[str]] = {}
        """By place, the GPUs of the ranks that these share their GPUs with."""
        self._num_layouts = 1
        self._kept_bytes = 0
        """Those of the rank with the largest state."""
        self._min_dp: int | None = None
        self._earlier: list[EarlierRanks] = []
        """Ranks of layouts before, until the states of this one are kept twice."""
        self._listeners: list[Callable[[ParallelConfig], None]] = []
        self._stores: SampleStores | None = None
        self._keepers: StateKeepers | None = None
        self._call_timeout_s = call_timeout_s
        self._answer_s = answer_s(call_timeout_s)
        self._building: Answers | None = None
        self._files: RunFiles | None = None

    def keep_files_with(self, files: RunFiles) -> None:
        """Have ranks that do not see the run folder bring their files; call this first."""
        self._files = files

    def start_build(
        self,
        spec: ModelSpec,
        timeout_s: float,
        find_shared: Callable[[], Mapping[int, Sequence[str]]] | None = None,
    ) -> None:
        """Start building the model on every rank; `wait_built` waits for it.

        find_shared   returns by place the GPUs of other ranks, which these ranks share, as they are
                      now; None: ranks use the GPUs that Ray assigned
        """
        self._find_shared = find_shared
        self._whole = self._build = _Build(spec, timeout_s)
        if not self.goes_on:
            self._start_build(self._whole)

    def _start_build(self, build: _Build) -> None:
        self._build = build
        timeout_s = build.timeout_s
        address, port = self._group.find_meeting_points(timeout_s)[0]
        self._group.check_environment(timeout_s)
        gpus = self._find_gpus(timeout_s)
        args = [
            (build.spec, rank, address, port, gpus[rank], self._find_storage(rank))
            for rank in range(build.spec.parallel.world_size)
        ]
        self._building = self._group.start_build(self.worker_cls, args, timeout_s)

    def _find_gpus(self, timeout_s: float) -> Sequence[Sequence[str]]:
        """Return the GPUs of each rank."""
        if self._find_shared is None:
            return self._group.gpu_ids(timeout_s)
        # Fewer ranks may have left out a place that these ranks keep.
        self._shared_gpus |= self._find_shared()
        return [self._shared_gpus[place] for place in self._places]

    def _find_storage(self, rank: int) -> CarriedStorage | None:
        node = self._group.ranks[rank].node
        return self._files.find_storage(node) if self._files is not None else None

    def wait_built(self) -> None:
        """Return once every rank has built its share of the model.

        Ranks that an earlier controller left are replaced if they do not answer in time.
        """
        if self.goes_on:
            self._end_last_call()
            return
        assert self._building is not None, "start_build comes first"
        self._group.finish(self._building)
        self._group.find_coordinates(self._answer_s)

    def _end_last_call(self) -> None:
        """Wait until ranks that go on are done with the last call and save of their controller."""
        limit_s = min(LIVING_S, self._answer_s)
        try:
            if any(self._find_storage(rank) for rank in range(self.world_size)):
                raise RankError("files of a node go through a controller that is gone")
            self._group.find_coordinates(limit_s)
            self._group.call_all("finish_save", limit_s, deadline_s=limit_s)
        except RankError as error:
            _log.warning("the ranks of %s are replaced: %s", self.role, error)
            self.start_over()

    def start_over(self) -> None:
        """Replace ranks that an earlier controller left, if these are such."""
        if self.goes_on:
            self.restart()

    @property
    def actors(self) -> list[Any]:
        """The actors of the ranks, in order."""
        return self._group.actors

    @property
    def was_resized(self) -> bool:
        """Whether the ranks have replaced those of another layout."""
        return self._num_layouts > 1

    def find_loss(self, wait_s: float) -> RankLostError | None:
        """See RankGroup.find_loss."""
        return self._group.find_loss(wait_s)

    @property
    def parallel(self) -> ParallelConfig:
        """The layout of the ranks, which may be smaller than the recipe's."""
        assert self._build is not None, "start_build comes first"
        return self._build.spec.parallel

    @property
    def dp_size(self) -> int:
        return self.parallel.dp_size

    def let_shrink(self, min_dp: int | None) -> None:
        """Have `restart` go on with fewer data-parallel ranks, at least `min_dp`; None: never."""
        self._min_dp = min_dp

    def tell_resized(self, listener: Callable[[ParallelConfig], None]) -> None:
        """Have `listener` called with the new layout whenever it becomes another."""
        self._listeners.append(listener)

    def restart(self) -> None:
        """Replace lost processes, and build the model on all ranks as at the start.

        The new ranks know the kept memory of those before them. If a node is lost and no other one
        has room, they are fewer, as far as `let_shrink` allows, and all get new processes. Raises
        RankError as a start does, and NoRoomError if there are too few ranks.
        """
        living = self._group.keep_living()
        try:
            wait_for_room(self._slots)
        except NoRoomError as no_room:
            self._group.kill()
            living = {}
            self._fit_lost(no_room)
        self._replace(living)

    def find_larger(self) -> int:
        """Return the data-parallel size that `grow` would give: the present one without room.

        Needs no call to ranks. A layout as large as the recipe's grows no more.
        """
        layout = self._choose_larger()
        return self.dp_size if layout is None else layout.parallel.dp_size

    def grow(self) -> None:
        """Replace the processes by more of them, as many as have room, up to the recipe's.

        The new ranks know the states that earlier ones kept, which must lie on partner nodes, too.
        Raises RankError as a start does; `restart` then makes as many ranks as have room.
        """
        layout = self._choose_larger()
        if layout is None:
            return
        self._group.kill()
        self._change_to(layout)
        self._replace({})

    def _choose_larger(self) -> PlacedLayout | None:
        """Return the largest layout that has room; None if it is not larger than that of now."""
        assert self._whole is not None, "start_build comes first"
        whole = self._whole.spec.parallel
        if self.dp_size == whole.dp_size or self._keepers is None:
            return None
        places = find_places(self._all_slots)
        try:
            layout = choose_layout(whole, places, self.dp_size + 1, self.sizes)
            nodes = Counter(places[rank] for rank in layout.places)
            # A rank of a larger layout has no larger state.
            self._keepers.check_room({node: n * self._kept_bytes for node, n in nodes.items()})
        except (NoLayoutError, NoMemoryError, RayError):  # of a node that is lost meanwhile
            return None
        return layout

    def _fit_lost(self, no_room: NoRoomError) -> None:
        """Choose the layout of the ranks that have a place. Raises NoRoomError if there is none."""
        assert self._whole is not None and self._keepers is not None
        if self._min_dp is None:
            raise no_room
        places = find_places(self._all_slots)
        if all(place in places for place in self._places):
            return  # there has been room since
        try:
            layout = choose_layout(self._whole.spec.parallel, places, self._min_dp, self.sizes)
        except NoLayoutError as error:
            raise NoRoomError(f"{no_room}; {error}") from error
        self._change_to(layout)

    def _change_to(self, layout: PlacedLayout) -> None:
        """Have the next processes be those of `layout`, in its places."""
        assert self._whole is not None and self._keepers is not None
        replaced = EarlierRanks(self.parallel, self._names)
        self._keepers.retire(replaced.names)
        self._earlier.append(replaced)
        self._num_layouts += 1
        self._places = layout.places
        self._slots = [self._all_slots[place] for place in self._places]
        self._build = self._whole.fit(layout)
        for listener in self._listeners:
            listener(layout.parallel)

    def _replace(self, living: Mapping[int, Any]) -> None:
        """Start all processes but the living, and build the model; ranks then know kept states."""
        assert self._build is not None, "start_build comes first"
        self.goes_on = False
        new = [rank for rank in range(len(self._slots)) if rank not in living]
        told = "%s: ranks %s go on in their processes, ranks %s get new ones"
        _log.warning(told, self.role, list(living), new)
        self._group = self._start(self._slots, living=living)
        self._start_build(self._build)
        self.wait_built()
        if self._stores is not None:
            self.connect_stores(self._stores)
        if self._earlier:
            self._take_over()
        elif self._keepers is not None:
            self._use_kept(self._keepers.find(self._locate()))

    def _take_over(self) -> None:
        """Have the ranks compose their copies of those of the ranks of another layout."""
        assert self._keepers is not None
        try:
            self.keep_in(self._keepers)
        except NoMemoryError as error:
            raise NoRoomError(f"{error}, besides those of the layout before") from error
        nodes = list(self._locate().values())
        ranks = NewRanks(self.parallel, nodes, self._call("read_kept_index"))
        for copies in take_over(self._earlier, ranks, self._keepers, self._call_each):
            self._mirror(copies)

    def find_kept_with(self, keepers: StateKeepers) -> None:
        """Have `find_earlier_steps` find what keepers of an earlier controller hold."""
        self._keepers = keepers

    def find_earlier_steps(self) -> set[int]:
        """Return the steps whose states ranks of a lost controller kept, for `restore_state`."""
        if self._keepers is None:
            paths = find_earlier(self._names)
        else:
            paths = self._keepers.find(self._locate())
        if not paths:
            return set()
        self._use_kept(paths)
        return self.find_kept_steps()

    def keep_in(self, keepers: StateKeepers) -> None:
        """Reserve memory for the copies of each rank's state."""
        self._keepers = keepers
        sizes = self._call("count_kept_bytes")
        self._kept_bytes = max(sizes)
        named = dict(zip(self._names, sizes, strict=True))
        self._use_kept(keepers.reserve(named, self._locate()))

    def _use_kept(self, paths: Mapping[str, Sequence[str]]) -> None:
        self._call_each("use_kept_memory", [(paths[name],) for name in self._names])

    def list_nodes(self) -> list[str]:
        """Return Ray's ids of the nodes with ranks."""
        return sorted(set(self._locate().values()))

    def _locate(self) -> dict[str, str]:
        """Return the node of each rank by the rank's name."""
        nodes = self._group.find_nodes(self._answer_s)
        return dict(zip(self._names, nodes, strict=True))

    @property
    def _names(self) -> tuple[str, ...]:
        """Names of the ranks, which those of no other layout have."""
        return tuple(
            f"{self.role}{rank}.{self._num_layouts}" for rank in range(self.parallel.world_size)
        )

    def keep_state(self, step: int) -> int:
        """Have each rank copy its state after `step`; return the bytes of all.

        The keepers then begin to copy the states to other nodes, if there are any. Memory that was
        lost with a keeper is reserved anew.
        """
        assert self._keepers is not None, "keep_in comes first"
        if self._earlier:
            self._keepers.settle()
            self._keepers.release([name for ranks in self._earlier for name in ranks.names])
            self._earlier = []
        if paths := self._keepers.reserve_lost(self._names):
            self._use_kept(paths)
        kept = self._call("keep_state", step)
        self._mirror([copy for copy, _ in kept])
        return sum(num_bytes for _, num_bytes in kept)

    def _mirror(self, copies: Sequence[int]) -> None:
        """Begin to copy states to partner nodes; `copies`: the number of the copy, by rank."""
        assert self._keepers is not None
        self._keepers.mirror(dict(zip(self._names, copies, strict=True)))

    def find_kept_steps(self) -> set[int]:
        """Return the steps whose states are whole in the memory of every rank."""
        kept = self._call("find_kept_steps")
        return set(kept[0]).intersection(*kept[1:])

    def restore_state(self, step: int) -> None:
        """Have each rank go back to its state after `step`."""
        self._call("restore_state", step)

    @property
    def world_size(self) -> int:
        return len(self._group.ranks)

    def connect_stores(self, stores: SampleStores) -> None:
        """Tell every rank where the samples of StoredBatches lie."""
        self._stores = stores
        self._call("connect_stores", stores)

    async def hold(self, parts: Collection[str]) -> None:
        """Keep these parts of every rank's model in device memory and offload the others."""
        await self._group.call_all_async("hold", tuple(parts), deadline_s=self._answer_s)

    def save(self, folder: str, extra: dict[str, Any]) -> FailedSaves:
        """Start a save: copy the state, and return; files are written while training goes on.

        Returns the saves that failed since the last report, as StepStats.failed_saves.
        """
        return self._call("save", folder, extra)[0]

    def finish_save(self, deadline_s: float | None = None) -> FailedSaves:
        """Wait until the save in progress is complete, if there is one; return those that failed.

        deadline_s   for that, and for what the ranks do before; None: as of any call
        """
        timeout_s = self._call_timeout_s if deadline_s is None else deadline_s
        answer_s = self._answer_s if deadline_s is None else deadline_s
        return self._group.call_all("finish_save", timeout_s, deadline_s=answer_s)[0]

    def load(self, folder: str, *, verify: bool = True) -> dict[str, Any]:
        """Load the checkpoint and return the `extra` that was saved with it.

        `verify`: first compare the checkpoint's files with its checksums.
        """
        return self._call("load", folder, verify)[0]

    def export_hf(self, folder: str) -> None:
        self._call("export_hf", folder)

    def first_of_nodes(self) -> dict[str, Any]:
        """See RankGroup.first_of_nodes."""
        return self._group.first_of_nodes()

    async def watch(self) -> None:
        """Never return; raise RankError once a rank's process is gone."""
        await self._group.watch(call_timeout_s=self._answer_s)

    def peak_flops(self) -> float | None:
        """Return the peak operations per second of a rank's GPU; None on a CPU."""
        return self._call("peak_flops")[0]

    def device_names(self) -> list[str]:
        """Return the names of the ranks' GPUs, "cpu" for ranks without one; each name once."""
        return sorted(set(self._call("device_name")))

    def gpu_ids(self) -> list[tuple[str, ...]]:
        """Return, by rank, the GPUs that Ray assigned; may be called before the model is built."""
        return self._group.gpu_ids(self._answer_s)

    def list_gpus(self) -> dict[int, tuple[str, ...]]:
        """Return what `gpu_ids` does, by the ranks' places in the recipe's layout."""
        return dict(zip(self._places, self.gpu_ids(), strict=True))

    async def find_seats(self) -> dict[int, Seat]:
        """Return where ranks are, by their places in the recipe's layout."""
        nodes = await asyncio.to_thread(self._group.find_nodes, self._answer_s)
        gpus = await asyncio.to_thread(self.list_gpus)
        pairs = zip(nodes, gpus.items(), strict=True)
        return {place: Seat(node, ids) for node, (place, ids) in pairs}

    def find_frozen_paths(self) -> tuple[str, ...]:
        """Return, by rank, where others can map the weights below low-rank factors."""
        return tuple(self._call("find_frozen_path"))

    def pids(self) -> list[int]:
        """Return process ids by rank, each on its own machine."""
        return self._group.pids(self._answer_s)

    def _call(self, method: str, *args: object) -> list[Any]:
        return self._group.call_all(method, *args, deadline_s=self._answer_s)

    def _call_each(self, method: str, args_per_rank: Sequence[Sequence[object]], /) -> list[Any]:
        return self._group.call_each(method, args_per_rank, deadline_s=self._answer_s)
