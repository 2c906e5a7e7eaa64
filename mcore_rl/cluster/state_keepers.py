"""Holds the kept memory of ranks, on their node and on a partner node.

    node A                                     node B
    rank --copies its state--> keeper  ------> keeper: A's states again, in the background
                               keeper  <------ keeper <--copies its state-- rank

Where all ranks are on the controller's machine, the controller is the keeper and there is no
partner: a rank that dies leaves its state behind, and so does a controller that starts again. With
several nodes, or where ranks outlive their controller, each node has a process as its keeper, and a
state that was lost with its node comes back from the partner. Ranks that others replace in another
layout are retired: their copies are read, until those of the others are whole.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_rl.cluster.answers import RankHungError, RankLostError, find_death
from mcore_rl.cluster.nodes import list_alive_nodes
from mcore_rl.process.host_memory import count_free_bytes
from mcore_rl.process.kept_copies import Header, Span, decode_index
from mcore_rl.process.kept_memory import HEADER_BYTES, NUM_COPIES, KeptMemory, map_kept

_log = logging.getLogger(__name__)
CHUNK_BYTES = 32 << 20
"""Bytes that one message between keepers has."""
CALLS_AT_ONCE = 16
GIB = 2**30


class NoMemoryError(RuntimeError):
    """A node has too little host memory for the states of its ranks."""


class StateKeeper:
    """The kept memory of one node, and of partners' ranks."""

    def __init__(self) -> None:
        self._memory = KeptMemory()
        self._num_found_bytes = self._memory.count_bytes()
        self._paths: dict[str, str] = {}

    def reserve(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """Return the paths of pieces by name; a piece that is here already stays as it is."""
        for name, num_bytes in sizes.items():
            if name not in self._paths:
                self._paths[name] = self._memory.reserve(name, num_bytes)
        return {name: self._paths[name] for name in sizes}

    def count_free_bytes(self) -> int:
        """Return the host memory that this node could still give, with pieces that it found."""
        return count_free_bytes() + self._num_found_bytes

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a piece."""
        with map_kept(self._paths[name]) as piece:
            return piece[start:stop]

    def pull(self, source: Any, name: str, num_bytes: int, timeout_s: float) -> None:
        """Copy a piece of the keeper `source` into the piece of this name; the header comes last.

        So a copy that is cut off does not count. Each message may take `timeout_s`.
        """
        self.reserve({name: num_bytes})
        with map_kept(self._paths[name]) as piece:
            piece[:HEADER_BYTES] = bytes(HEADER_BYTES)
            for start, stop in [*_cut(HEADER_BYTES, num_bytes), (0, HEADER_BYTES)]:
                content = source.read.remote(name, start, stop)
                piece[start:stop] = ray.get(content, timeout=timeout_s)

    def release(self, names: Collection[str]) -> None:
        """Give up these pieces, as far as they are here."""
        for name in names:
            if self._paths.pop(name, None) is not None:
                self._memory.release(name)

    def close(self) -> None:
        """Give up all pieces."""
        self._memory.close()


def _cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, stop, CHUNK_BYTES):
        yield begin, min(begin + CHUNK_BYTES, stop)


@dataclass
class StatePlace:
    """Where the copies of a rank's state lie: on `node`, and again on `partner` ("": nowhere)."""

    num_bytes: int
    node: str
    partner: str = ""


@dataclass(frozen=True)
class Copy:
    """A whole copy of a rank's state: the node and the piece where it lies, and its header."""

    node: str
    piece: str
    header: Header


@dataclass(frozen=True)
class KeptPlaces:
    """Where states are kept, for another controller: keepers by node, places by rank."""

    actors: Mapping[str, Any]
    places: Mapping[str, StatePlace]


def start_keeper(node: str) -> Any:
    """Start the keeper of a node; return its actor."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    make: Any = ray.remote(StateKeeper)
    options = {"num_cpus": 0, "max_concurrency": CALLS_AT_ONCE}
    return make.options(**options, scheduling_strategy=there).remote()


class StateKeepers:
    """The keepers of all nodes. Ranks are named, such as "trainer0".

    A keeper that dies on a node that lives is replaced: the next step is kept in new memory, and
    until then the copies of the partner count.
    """

    def __init__(
        self,
        nodes: Collection[str],
        timeout_s: float,
        start: Callable[[str], Any] | None = None,
        earlier: KeptPlaces | None = None,
    ) -> None:
        """`timeout_s` bounds each wait for keepers.

        nodes     those with ranks at the start
        start     starts keepers that outlive this process, in place of start_keeper
        earlier   those of an earlier controller, and what they keep
        """
        self._timeout_s = timeout_s
        own = {ray.get_runtime_context().get_node_id()}
        self._is_alone = start is None and set(nodes) <= own
        self._start = start or start_keeper
        self._own = StateKeeper()
        self._actors: dict[str, Any] = dict(earlier.actors) if earlier else {}
        self._places: dict[str, StatePlace] = dict(earlier.places) if earlier else {}
        self._retired: dict[str, StatePlace] = {}
        self._unkept: set[str] = set()
        """Ranks whose copies were lost with their node's keeper, until memory is reserved anew."""
        self._copying: list[Any] = []

    @property
    def outlive_controllers(self) -> bool:
        """Whether a controller that takes the place of a lost one finds the states here."""
        return self._is_alone

    def describe(self) -> KeptPlaces:
        """Return what another controller needs to find the states."""
        return KeptPlaces(dict(self._actors), dict(self._places))

    def reserve(self, sizes: Mapping[str, int], nodes: Mapping[str, str]) -> dict[str, list[str]]:
        """Return, by rank, the paths of NUM_COPIES pieces on the rank's node.

        Raises NoMemoryError if a node has too little memory for them, and for those of its partner.
        """
        self._places |= {name: StatePlace(size, nodes[name]) for name, size in sizes.items()}
        own: dict[str, int] = defaultdict(int)
        for place in self._places.values():
            own[place.node] += place.num_bytes
        self.check_room({node: own[node] for node in sorted(set(nodes.values()))})
        return {name: self._reserve_on(nodes[name], name, size) for name, size in sizes.items()}

    def reserve_lost(self, names: Collection[str]) -> dict[str, list[str]]:
        """Return the paths of these ranks' pieces, some of them new; {}: no keeper of theirs died.

        The new ones take the room of those that were lost.
        """
        if self._unkept.isdisjoint(names):
            return {}
        self._unkept -= set(names)
        places = {name: self._places[name] for name in names}
        return {n: self._reserve_on(place.node, n, place.num_bytes) for n, place in places.items()}

    def mirror(self, copies: Mapping[str, int]) -> None:
        """Begin to copy what ranks have just kept to their partner nodes, if there are any.

        copies   by rank, the number of the copy that was written
        """
        partners = self._choose_partners()
        for name, k in copies.items():
            place = self._places[name]
            if partner := partners.get(place.node, ""):
                self._copying.append(self._pull(partner, place.node, name, k))
                place.partner = partner

    def renew(self) -> None:
        """Begin to copy states to other nodes again whose partner's node is lost, or is now theirs.

        No rank may write a copy until `settle`.
        """
        alive, partners = _list_answering(), self._choose_partners()
        for name, place in self._places.items():
            partner = partners.get(place.node, "")
            is_copied = place.partner in alive and place.partner != place.node
            if not place.partner or is_copied or not partner or name in self._unkept:
                continue
            copying = [self._pull(partner, place.node, name, k) for k in range(NUM_COPIES)]
            self._copying += copying
            place.partner = partner

    def settle(self) -> None:
        """Wait until what ranks have kept lies on their partners' nodes, too.

        Raises RankHungError if it takes too long. A copy that failed because a node is lost is left
        out; the loss shows by itself. A keeper that died alone is replaced.
        """
        copying, self._copying = self._copying, []
        # Where no other node copies from them, nothing else shows that keepers died.
        is_doubtful = not any(place.partner for place in self._places.values())
        for copy in copying:
            try:
                ray.get(copy, timeout=self._timeout_s)
            except GetTimeoutError as error:
                raise RankHungError(
                    f"a state was not copied to its partner node within {self._timeout_s:g} s"
                ) from error
            except RayError:
                is_doubtful = True
        if is_doubtful and self._actors:
            self._forget_dead()

    def _forget_dead(self) -> None:
        """Have other keepers take the place of those that died on nodes that live."""
        nodes = {node.id: node.name for node in list_alive_nodes() if node.answers()}
        asked: dict[str, Any] = {
            node: self._actors[node].count_free_bytes.remote()
            for node in nodes
            if node in self._actors
        }
        for node, count in asked.items():
            cause = _find_death(count, self._timeout_s)
            if cause is None:
                continue
            _log.warning(
                "the keeper of the states on node %s died (%s): another one takes its place, and"
                " has the states of its ranks once the next step is kept",
                *(nodes[node], cause),
            )
            del self._actors[node]
            self._unkept |= {name for name, place in self._places.items() if place.node == node}
            for place in self._places.values():
                if place.partner == node:
                    place.partner = ""

    def find(self, nodes: Mapping[str, str]) -> dict[str, list[str]]:
        """Return, by rank, the paths of its pieces on the node where it is now.

        A rank that is on another node than before, or whose keeper died, gets its state from the
        partner. Raises RankLostError if a keeper does not answer.
        """
        self._forget_dead()
        found = {}
        for name, node in nodes.items():
            place = self._places[name]
            found[name] = self._reserve_on(node, name, place.num_bytes)
            if node != place.node or name in self._unkept:
                self._bring(name, place, node)
                place.node = node
                self._unkept.discard(name)
        return found

    def retire(self, names: Collection[str]) -> None:
        """Note that others take the places of these ranks; their copies stay until `release`."""
        for name in names:
            if name in self._places:
                self._retired[name] = self._places.pop(name)

    def list_copies(self, names: Collection[str]) -> dict[str, dict[int, Copy]]:
        """Return by retired rank the whole copies of its state on living nodes, by their step.

        A copy on the rank's node comes before that on the partner's.
        """
        alive = set(_list_answering())
        found: dict[str, dict[int, Copy]] = {name: {} for name in names}
        for name in names:
            place = self._retired.get(name)
            if place is None:  # it was lost before it kept anything
                continue
            nodes = [node for node in (place.node, place.partner) if node in alive]
            for node, k in product(nodes, range(NUM_COPIES)):
                header = self._read_header(node, _piece(name, k))
                if header is not None:
                    found[name].setdefault(header.step, Copy(node, _piece(name, k), header))
        return found

    def read_index(self, copy: Copy) -> list[Span]:
        """Return where which part of which state lies in a copy."""
        return decode_index(
            self._read(copy.node, copy.piece, copy.header.index, copy.header.num_bytes)
        )

    def bring(self, copies: Mapping[str, Copy], node: str) -> dict[str, str]:
        """Return, by rank, the path of its copy on `node`, to which those elsewhere are brought."""
        elsewhere = {name: copy for name, copy in copies.items() if copy.node != node}
        pulls = [
            self._keeper(node).pull.remote(
                self._keeper(copy.node), copy.piece, self._retired[name].num_bytes, self._timeout_s
            )
            for name, copy in elsewhere.items()
        ]
        ray.get(pulls, timeout=self._timeout_s)
        sizes = {copy.piece: self._retired[name].num_bytes for name, copy in copies.items()}
        paths = self._reserve_pieces(node, sizes)
        return {name: paths[copy.piece] for name, copy in copies.items()}

    def release(self, names: Collection[str]) -> None:
        """Give up the copies of retired ranks, on all nodes."""
        pieces = [_piece(name, k) for name in names for k in range(NUM_COPIES)]
        for name in names:
            self._retired.pop(name, None)
        self._own.release(pieces)
        for keeper in self._actors.values():
            keeper.release.remote(pieces)

    def _read_header(self, node: str, piece: str) -> Header | None:
        try:
            return Header.parse(self._read(node, piece, 0, HEADER_BYTES))
        except (RayError, KeyError):  # the keeper is lost, or never had the piece
            return None

    def _read(self, node: str, piece: str, start: int, stop: int) -> bytes:
        if self._is_alone:
            return self._own.read(piece, start, stop)
        content: Any = self._keeper(node).read.remote(piece, start, stop)
        return ray.get(content, timeout=self._timeout_s)

    def close(self) -> None:
        """End the keepers, and with them all copies."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._own.close()

    def _bring(self, name: str, place: StatePlace, node: str) -> None:
        """Copy the state of a rank from its partner's node to `node`, as far as it is there."""
        if place.partner in ("", node):
            return
        for pull in [self._pull(node, place.partner, name, k) for k in range(NUM_COPIES)]:
            try:
                ray.get(pull, timeout=self._timeout_s)
            except RayError:
                continue  # the partner has no such piece: the state does not count

    def _pull(self, target: str, source: str, name: str, k: int) -> Any:
        """Begin to copy piece `k` of a rank from one node's keeper to another's."""
        piece, size = _piece(name, k), self._places[name].num_bytes
        keeper = self._keeper(source)
        return self._keeper(target).pull.remote(keeper, piece, size, self._timeout_s)

    def check_room(self, sizes: Mapping[str, int]) -> None:
        """Raise NoMemoryError if a node has too little memory for states of so many bytes.

        sizes   by node, the bytes of its ranks' states, of which there are NUM_COPIES; a partner's
                ranks have states of about the same size
        """
        held = 1 if self._is_alone else 2
        for node, num_bytes in sizes.items():
            needed = NUM_COPIES * held * num_bytes
            free = self._count_free(node)
            if needed > free:
                raise NoMemoryError(
                    f"the states of the ranks of a node take {needed / GIB:.1f} GiB of host memory,"
                    f" and {free / GIB:.1f} GiB are free"
                )

    def _count_free(self, node: str) -> int:
        if self._is_alone:
            return self._own.count_free_bytes()
        count: Any = self._keeper(node).count_free_bytes.remote()
        return int(ray.get(count, timeout=self._timeout_s))

    def _reserve_on(self, node: str, name: str, num_bytes: int) -> list[str]:
        pieces = [_piece(name, k) for k in range(NUM_COPIES)]
        paths = self._reserve_pieces(node, dict.fromkeys(pieces, num_bytes))
        return [paths[piece] for piece in pieces]

    def _reserve_pieces(self, node: str, sizes: Mapping[str, int]) -> dict[str, str]:
        """Return the paths of pieces on a node by name; those that are there stay as they are."""
        if self._is_alone:
            return self._own.reserve(sizes)
        try:
            reserved: Any = self._keeper(node).reserve.remote(sizes)
            return ray.get(reserved, timeout=self._timeout_s)
        except RayError as error:
            raise RankLostError(
                f"the keeper of the states on node {_name(node)} gives no memory"
                f" ({_shorten(error)}): see whether the node lives and has host memory left; the"
                " same command continues from the newest checkpoint"
            ) from error

    def _choose_partners(self) -> dict[str, str]:
        """Return node -> the next node with ranks, or another one if all ranks are on one node.

        {} if there is no other node.
        """
        if self._is_alone:
            return {}
        alive = _list_answering()
        nodes = sorted({place.node for place in self._places.values()} & set(alive))
        if len(nodes) == 1:
            nodes += [node for node in alive if node not in nodes][:1]
        return dict(zip(nodes, [*nodes[1:], nodes[0]], strict=True)) if len(nodes) > 1 else {}

    def _keeper(self, node: str) -> Any:
        """Return the keeper of a node, and start it if there is none."""
        if node not in self._actors:
            self._actors[node] = self._start(node)
        return self._actors[node]


def find_earlier(names: Collection[str]) -> dict[str, list[str]]:
    """Return, by rank, the paths of what ranks of a lost controller kept here; {}: not of all."""
    memory = KeptMemory()
    found = {name: [memory.find(_piece(name, k)) for k in range(NUM_COPIES)] for name in names}
    paths = {name: [path for path in pieces if path] for name, pieces in found.items()}
    return paths if all(len(pieces) == NUM_COPIES for pieces in paths.values()) else {}


def _list_answering() -> list[str]:
    """Return the ids of the nodes that answer; Ray takes a lost one for alive for a while."""
    return [node.id for node in list_alive_nodes() if node.answers()]


def _name(node: str) -> str:
    """Return the name of a node; Ray's id if it is lost."""
    return {each.id: each.name for each in list_alive_nodes()}.get(node, node)


def _shorten(error: RayError) -> str:
    return find_death(error) or str(error).strip().splitlines()[-1]


def _find_death(answer: Any, timeout_s: float) -> str | None:
    """Return why the actor of a call died; None if it lives, or does not answer in time."""
    try:
        ray.get(answer, timeout=timeout_s)
    except RayError as error:
        return find_death(error)
    return None


def _piece(name: str, k: int) -> str:
    return f"{name}_{k}"
