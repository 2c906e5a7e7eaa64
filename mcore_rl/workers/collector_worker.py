"""Samples on a node's engines, keeps the samples, scores them and gives out columns of them.

It is the worker of an actor that answers many calls at once, in threads. The ranks read columns of
samples from its store, and patches of images from the node's shared memory:

rank on this node        maps the files that `place_images` names
rank on another node     gets the arrays of `put_images`, which travel to each node once
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mcore_rl.batches.assembly import apply_to_stored
from mcore_rl.batches.episodes import LOSS_MASK, TOKEN_IDS
from mcore_rl.batches.group_files import GroupFile, read_groups, write_groups
from mcore_rl.batches.kept_rows import TEACHER_LOGPROBS, ReadRequest, as_response
from mcore_rl.batches.sample_store import LostSampleError, SampleStore, SpillFiles
from mcore_rl.config import RolloutConfig
from mcore_rl.data.decoding import Decode
from mcore_rl.data.images.batch import GroupRow, PatchCache
from mcore_rl.data.images.shared_patches import PlacedPatches, SharedPatches
from mcore_rl.process.errors import ProcessLostError
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.process.http import open_session
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.process.redaction import remember_secret
from mcore_rl.rollout.collector import CollectorCommands, CollectorEvents
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.indexer_topk import IndexerTopkShape
from mcore_rl.rollout.request import RoutedExpertsShape
from mcore_rl.rollout.served_models import ServedEndpoint
from mcore_rl.types import Array, Sample, StoredBatch, StoredColumn, TokenWork
from mcore_rl.types.scores import Scores
from mcore_rl.workers.node_servers import NodeServers, NodeServersSpec
from mcore_rl.workers.stores import SampleStores, StoresBeside


@dataclass(frozen=True)
class PatchMaker:
    """How a node's process makes patches, and how many bytes of them it keeps.

    folder   model directory with the image processor
    """

    folder: Path
    cache_bytes: int

    def make(self) -> SharedPatches:
        """Raises ValueError if the directory has no image processor that can be opened."""
        from mcore_rl.data.images.processor import ImageProcessor

        processor = ImageProcessor(self.folder, cache_bytes=0)
        return SharedPatches(processor.patches_of, self.cache_bytes)


class NodeImages:
    """The patches of the images of the rows in a store."""

    def __init__(
        self, maker: PatchMaker, store: SampleStore, share_array: Callable[[Array], Any]
    ) -> None:
        """`share_array` puts an array into Ray's store and returns a reference to it."""
        self._store = store
        self._share_array = share_array
        self.patches = maker.make()
        self._objects: PatchCache[Any] = PatchCache(maker.cache_bytes)
        """Digest -> reference to an object in Ray's store, which it keeps alive."""

    def place(self, rows: Sequence[GroupRow]) -> dict[GroupRow, list[PlacedPatches]]:
        """Return where the patches of each row lie, in the order of its images.

        Raises KeyError for a row that is not in the store.
        """
        return {
            row: [self.patches.place(image) for image in self._store.images(*row)] for row in rows
        }

    def put(self, rows: Sequence[GroupRow]) -> dict[str, Any]:
        """Return references to the patches of rows, arrays [P, D], by digest."""
        references: dict[str, Any] = {}
        for image in {i.digest: i for row in rows for i in self._store.images(*row)}.values():
            reference = self._objects.get(image.digest)
            if reference is None:
                patches = self.patches.read(image)
                reference = self._share_array(patches.pixels_PD.numpy())
                self._objects.put(image.digest, reference, patches.num_bytes)
            references[image.digest] = reference
        return references

    def close(self) -> None:
        self.patches.close()


if TYPE_CHECKING:  # the modules of episodes are for the recipes that have some
    from mcore_rl.rollout.engine_health import EngineHealth
    from mcore_rl.workers.episodes import EpisodeSpec


@dataclass(frozen=True)
class CollectorSpec:
    """A collector's part of the recipe.

    make_scorer   makes a rewards.scorer.Scorer; None for a command without rewards
    episodes      how samples of several turns are drawn; None: a sample is one response
    servers       what runs beside it for rewards and environments; None: nothing
    secrets       values that its log must not show
    patch_maker   how patches of images are made; None for a model that sees text alone
    """

    rollout: RolloutConfig
    stop_token_ids: tuple[int, ...]
    decode: Decode
    experts_shape: RoutedExpertsShape | None
    make_scorer: Callable[[], Any] | None
    episodes: "EpisodeSpec | None" = None
    servers: NodeServersSpec | None = None
    secrets: tuple[str, ...] = field(default=(), repr=False)
    patch_maker: PatchMaker | None = None
    indexer_shape: IndexerTopkShape | None = None


class CollectorWorker:
    """A collector, the store of its samples, and the rewards; its methods run in many threads.

    Methods that read samples raise SamplesLostError for samples of an earlier process.
    """

    def __init__(
        self,
        spec: CollectorSpec,
        number: int,
        first_group: int,
        share_array: Callable[[Array], Any],
    ) -> None:
        """Make the store, and begin to start what runs beside the collector.

        number        of this collector among all of the run
        first_group   groups with smaller numbers were in an earlier process
        share_array   puts an array where the processes of other nodes get it; see NodeImages
        """
        self._number = number
        for value in spec.secrets:
            remember_secret(value)
        self._spec = spec
        shape = spec.experts_shape
        rollout = spec.rollout
        num_experts = shape.num_experts if shape else 0
        spill = SpillFiles(rollout.spill_dir)
        limit = rollout.store_gib * 2**30
        self._store = SampleStore(num_experts, first_group, limit, spill, rollout.logprob_dtype)
        # First, as a user's file may read their addresses while it is imported.
        self._servers = NodeServers(spec.servers, str(number)) if spec.servers else None
        self._scorer = spec.make_scorer() if spec.make_scorer else None
        self._images = None
        if spec.patch_maker is not None:
            self._images = NodeImages(spec.patch_maker, self._store, share_array)
        self._loop = EventLoop()
        self._teacher: Any = None
        self._collector: Any = None
        self._close_episodes: Callable[[], Awaitable[None]] | None = None
        self._stores: SampleStores | None = None

    def connect(
        self,
        engines: Sequence[EngineAddress],
        own: Sequence[str],
        served: Mapping[str, ServedEndpoint],
        stores: SampleStores,
    ) -> None:
        """Take the engines, those of this node by url, the served models by role, all stores.

        Raises ProcessLostError if a server beside this collector does not start.
        """
        from mcore_rl.rollout.client import RolloutClient
        from mcore_rl.rollout.collector import Collector
        from mcore_rl.rollout.engine_health import EngineHealth
        from mcore_rl.rollout.scoring import Teacher
        from mcore_rl.rollout.served_models import ServedClient
        from mcore_rl.rollout.transport import HttpOptions

        spec = self._spec
        self._wait_for_servers()
        health = EngineHealth([engine.url for engine in engines])
        shapes = spec.experts_shape, spec.indexer_shape
        http = HttpOptions.make(spec.rollout, spec.stop_token_ids, spec.decode, *shapes)
        if self._images is not None:
            http = replace(http, patches=self._images.patches)
        client = RolloutClient(engines, spec.rollout, http.open, health, own, self._number)
        sample_group = None
        if spec.episodes is not None:
            sample_group = self._loop.run(self._start_episodes(spec.episodes, own, engines, health))
        self._collector = Collector(client, health, self._store, sample_group)
        self._stores = stores
        if self._scorer is not None:
            clients = {role: ServedClient(endpoint) for role, endpoint in served.items()}
            posts = {role: client.post_all for role, client in clients.items()}
            self._scorer.connect(posts, asyncio.run)
        if "teacher" in served:
            self._teacher = Teacher(served["teacher"], asyncio.run)

    def _wait_for_servers(self) -> None:
        if self._servers is None:
            return
        try:
            self._servers.wait_healthy()
        except (RuntimeError, TimeoutError) as error:
            raise ProcessLostError(str(error)) from error

    async def _start_episodes(
        self,
        episodes: "EpisodeSpec",
        own: Sequence[str],
        engines: Sequence[EngineAddress],
        health: "EngineHealth",
    ) -> Any:
        """Start what episodes need until `close`; return the function that samples their groups."""
        from mcore_rl.rollout.kv_admission import FreeKvMonitor, ask_free_kv
        from mcore_rl.rollout.transport import EngineAsker
        from mcore_rl.workers.episodes import EpisodeSampler

        near = [engine for engine in engines if engine.url in own]
        stack = AsyncExitStack()
        http = await stack.enter_async_context(open_session(self._spec.rollout.request_timeout_s))
        ask = EngineAsker(http, near, health, self._number)
        name = f"collector_{self._number}"
        monitor = FreeKvMonitor(partial(ask_free_kv, http), near, health, home=self._number)
        if episodes.agents.min_free_kv:
            watching = asyncio.create_task(monitor.watch())
            stack.callback(watching.cancel)
        sampler = EpisodeSampler(episodes, name, self._spec.decode, ask, monitor.most_free)
        stack.push_async_callback(sampler.close)
        await sampler.start()
        self._close_episodes = stack.aclose
        return sampler.sample_group

    def submit(self, commands: CollectorCommands) -> None:
        self._loop.run(self._collector.submit(commands))

    def poll_events(self, wait_s: float, gather_s: float) -> CollectorEvents:
        return self._loop.run(self._collector.poll_events(wait_s, gather_s))

    def hold(self, session: int, cut_off: bool) -> int:
        return self._loop.run(self._collector.hold(session, cut_off))

    def resume(self, session: int) -> None:
        self._loop.run(self._collector.resume(session))

    def idle_seconds(self) -> float:
        return self._loop.run(self._collector.idle_seconds())

    def score(self, group_N: Sequence[int], index_N: Sequence[int]) -> Scores:
        """Return the rewards of samples in the store."""
        assert self._scorer is not None, "this command has no rewards"
        return self._scorer(self._find(group_N, index_N))

    def ask_teacher(
        self, group_N: Sequence[int], row_N: Sequence[int], lens_N: Sequence[int]
    ) -> None:
        """Keep the teacher's log-probs of rows beside them.

        Tokens before the first that a row trains get 0 and are not scored, so an engine computes
        what the samples of a prompt share once.

        row_N    numbers of the rows in their groups; of a single response, its index
        lens_N   their lengths in tokens
        """
        groups = np.array(group_N)
        rows = np.array(row_N)
        ends = np.cumsum(lens_N)[:-1]
        first_of = {group: self._find([group], [0])[0] for group in set(group_N)}
        are_episodes = any(sample.episode is not None for sample in first_of.values())
        names = (TOKEN_IDS, LOSS_MASK) if are_episodes else (TOKEN_IDS,)
        columns = self.read(ReadRequest(groups, rows, names))
        if are_episodes:
            starts = [int(np.argmax(mask)) for mask in np.split(columns[LOSS_MASK], ends)]
        else:
            starts = [len(first_of[group].prompt.token_ids) for group in group_N]
        parts = np.split(columns[TOKEN_IDS], ends)
        asked = [
            as_response(first_of[group].prompt, row, part.tolist(), start)
            for group, row, part, start in zip(group_N, row_N, parts, starts, strict=True)
        ]
        values = [
            np.array([*np.zeros(start), *logprobs], np.float32)
            for start, logprobs in zip(starts, self._teacher(asked), strict=True)
        ]
        self.write(groups, rows, {TEACHER_LOGPROBS: np.concatenate(values)})

    def samples(self, group_N: Sequence[int], index_N: Sequence[int]) -> list[Sample]:
        """Return whole samples, without their experts and chosen keys."""
        found = self._find(group_N, index_N)
        return [replace(sample, routed_experts=None, indexer_topk=None) for sample in found]

    def read(self, request: ReadRequest) -> dict[str, Array]:
        with self._name_lost():
            return self._store.read(request)

    def place_images(self, rows: Sequence[GroupRow]) -> dict[GroupRow, list[PlacedPatches]]:
        """Return where the patches of each row lie, in the order of its images."""
        assert self._images is not None, "the model sees no images"
        with self._name_lost():
            return self._images.place(rows)

    def put_images(self, rows: Sequence[GroupRow]) -> dict[str, Any]:
        """Return the patches of rows as objects in Ray's store, by digest."""
        assert self._images is not None, "the model sees no images"
        with self._name_lost():
            return self._images.put(rows)

    def write_groups(self, folder: str, groups: Sequence[int]) -> GroupFile:
        """Write groups of the store to a file in `folder`. Raises DiskFullError."""
        with self._name_lost():
            kept = dict(zip(groups, self._store.find(groups), strict=True))
        return write_groups(Path(folder) / f"store_{self._number}.pickle", kept)

    def read_groups(self, folder: str, file: GroupFile, numbers: Mapping[int, int]) -> None:
        """Take groups of a file into the store.

        numbers   of the groups in the file -> here

        Raises ValueError or OSError if the file is damaged or not there.
        """
        for number, group in read_groups(Path(folder), file).items():
            self._store.adopt(numbers[number], group)

    def write(self, group_N: Array, index_N: Array, columns: Mapping[str, Array]) -> None:
        with self._name_lost():
            self._store.write(group_N, index_N, columns)

    def apply(
        self, works: Sequence[tuple[TokenWork, StoredBatch]]
    ) -> list[tuple[dict[str, StoredColumn], Any]]:
        """Call each function on its batch with tokens, and keep the fields that the function sets.

        Routed experts, which are nearly all bytes of a batch, are not read. Returns the columns of
        these fields, and the function's own result.
        """
        assert self._stores is not None, "connect comes first"
        stores = StoresBeside(self._stores, self._number, self.read, self.write)
        return [apply_to_stored(work, batch, stores.read, stores.write) for work, batch in works]

    def _find(self, group_N: Sequence[int], index_N: Sequence[int]) -> list[Sample]:
        with self._name_lost():
            return self._store.samples(group_N, index_N)

    @contextmanager
    def _name_lost(self) -> Iterator[None]:
        try:
            yield
        except LostSampleError as error:
            name = f"sample store {self._number} (collector rank {self._number})"
            raise SamplesLostError(f"{name} was started again: {error}", [self._number]) from None

    def close(self) -> None:
        """End the processes of rewards and environments, and the servers; remove the patches."""
        if self._images is not None:
            self._images.close()
        if self._close_episodes is not None:
            self._loop.run(self._close_episodes())
        if self._scorer is not None:
            self._scorer.__exit__(None, None, None)
        if self._servers is not None:
            self._servers.close()
