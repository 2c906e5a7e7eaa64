"""Decides which engines get requests, from what watch and weight sync found out about them.

For each engine it counts the requests that are in flight, and the seconds without any.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from mcore_rl.process.clock import now_s
from mcore_rl.rollout.engine_spec import EngineAddress


class EngineLoad:
    """An engine, the number of its requests in flight, and the seconds it spent without any."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.num_in_flight = 0
        # Seconds of the idle spans that ended, and the start of the present one or None. They are
        # one tuple, so that another thread reads both at once.
        self._idle: tuple[float, float | None] = (0.0, now_s())
        self._changed_s = 0.0
        self._request_s = 0.0
        """Seconds of all requests together until the last of them began or ended."""

    @contextmanager
    def request(self) -> Iterator[Callable[[], tuple[float, float]]]:
        """Count a request for the length of the block.

        The block gets a function that returns the seconds since then, and the mean number of
        requests that were in flight.
        """
        began_s = self._change(1)
        request_s = self._request_s

        def measure() -> tuple[float, float]:
            now = now_s()
            seconds = now - began_s
            sum_s = self._request_s + self.num_in_flight * (now - self._changed_s) - request_s
            return seconds, sum_s / seconds if seconds else float(self.num_in_flight)

        try:
            yield measure
        finally:
            self._change(-1)

    def _change(self, num: int) -> float:
        """Let so many requests begin, or end if it is negative; return the time."""
        now = now_s()
        self._request_s += self.num_in_flight * (now - self._changed_s)
        self._changed_s = now
        idle_s, since_s = self._idle
        if since_s is not None:
            self._idle = idle_s + now - since_s, None
        self.num_in_flight += num
        if not self.num_in_flight:
            self._idle = self._idle[0], now
        return now

    @property
    def idle_s(self) -> float:
        """Seconds without a request so far; safe to read from another thread."""
        idle_s, since_s = self._idle
        return idle_s if since_s is None else idle_s + now_s() - since_s


_log = logging.getLogger(__name__)
FIRST = 0
"""The version of model.path's weights, until a run says otherwise. This module, as processes that
only watch engines import it, does without the torch that WeightVersion comes with.
"""


@dataclass(frozen=True)
class EngineState:
    """An engine as its watch saw it; `restarts` counts its earlier server processes.

    lost   it is gone with its node, for good
    """

    url: str
    restarts: int = 0
    healthy: bool = True
    lost: bool = False


@dataclass(frozen=True)
class JoinedEngine:
    """An engine that came while the run was under way; the collector `home` asks it first."""

    address: EngineAddress
    home: int


@dataclass(frozen=True)
class Rotation:
    """Which engines get requests, and with which weights.

    why_out   why engines get none, by url; empty for those that do. An engine without an entry has
              left
    version   weights that all which do were brought, or newer ones
    joined    engines that came after the start, by url
    """

    why_out: Mapping[str, str]
    version: int = FIRST
    joined: Mapping[str, JoinedEngine] = field(default_factory=dict)


class EngineHealth:
    """The state of each engine, which of them serve, and why the others do not.

    A restarted engine serves again after the next weight sync; with `weights_stay`, as soon as it
    is healthy. An engine that joins serves after the next sync, too.
    """

    def __init__(self, urls: Sequence[str], weights_stay: bool = False) -> None:
        """All of `urls` serve until `note` or `set_serving` says otherwise."""
        self._weights_stay = weights_stay
        self._states = {url: EngineState(url) for url in urls}
        self._why_out = dict.fromkeys(urls, "")
        self._version = FIRST
        self._joined: dict[str, JoinedEngine] = {}
        self._left: list[str] = []
        self.draining: set[str] = set()
        """Urls of engines that get no further requests, and leave."""
        self.num_coming = 0
        """Engines that are being started elsewhere, and have no address yet."""
        self.num_changes = 0
        """How often an engine has joined or left."""
        self.on_change: Callable[[], None] | None = None
        """Called when an engine has joined or left."""
        self.takes_weights = False
        """Whether schedulers may be busy with a weight sync, and answer nothing else."""

    @contextmanager
    def weight_sync(self) -> Iterator[None]:
        """Let schedulers be silent while they take weights; a sync has deadlines of its own."""
        self.takes_weights = True
        try:
            yield
        finally:
            self.takes_weights = False

    @property
    def states(self) -> list[EngineState]:
        return list(self._states.values())

    @property
    def serving(self) -> list[str]:
        """Urls of the engines that get requests."""
        return [url for url, reason in self._why_out.items() if not reason]

    def why_out(self, url: str) -> str:
        """Return why the engine at `url` gets no requests; empty if it does."""
        return self._why_out.get(url, "it has left")

    @property
    def version(self) -> int:
        """Weights that every engine with requests was brought, or newer ones.

        An engine that answers with older ones has started again, which its watch will see, too.
        """
        return self._version

    @property
    def rotation(self) -> Rotation:
        return Rotation(dict(self._why_out), self._version, dict(self._joined))

    def follow(self, rotation: Rotation) -> None:
        """Take over what another process found out about these engines, and who came and left."""
        for url in self._states.keys() - rotation.why_out.keys():
            self.leave(url)
        for url, engine in rotation.joined.items():
            if url not in self._states:
                self.join(engine, "")
        serving = [url for url, reason in rotation.why_out.items() if not reason]
        self.set_serving(serving, rotation.why_out, rotation.version)

    def join(self, engine: JoinedEngine, reason: str) -> None:
        """Take in an engine, which gets no requests for the given reason until a sync admits it."""
        url = engine.address.url
        self._joined[url] = engine
        self._states[url] = EngineState(url)
        self._why_out[url] = reason
        self._note_change()

    def leave(self, url: str) -> None:
        """Forget an engine, which nobody is to ask any more."""
        self._joined.pop(url, None)
        self._states.pop(url, None)
        self._why_out.pop(url, None)
        self._left.append(url)
        self._note_change()

    @contextmanager
    def drain(self, url: str) -> Iterator[None]:
        """Give an engine no further requests within the block; it serves again if it stays."""
        self.draining.add(url)
        self._why_out[url] = "it is being drained"
        self._note_change()
        try:
            yield
        finally:
            self.draining.discard(url)

    def take_left(self) -> list[str]:
        """Return the urls of the engines that left since the last call."""
        left, self._left = self._left, []
        return left

    def list_current(
        self, engines: Sequence[EngineAddress], home: int | None = None
    ) -> list[EngineAddress]:
        """Return those of `engines` that have not left, and those that joined.

        home   number of a collector whose engines are asked for; None: all
        """
        first = self._states.keys() - self._joined.keys()
        return [engine for engine in engines if engine.url in first] + [
            engine.address
            for engine in self._joined.values()
            if home is None or engine.home == home
        ]

    def count_joined(self, home: int) -> int:
        """Return how many engines joined that the collector `home` asks first."""
        return sum(engine.home == home for engine in self._joined.values())

    def _note_change(self) -> None:
        self.num_changes += 1
        if self.on_change is not None:
            self.on_change()

    def note(self, states: Sequence[EngineState]) -> None:
        """Take in what a watch saw; an engine with a new process no longer serves the current
        weights.

        Several watches may run at once, so a state of an earlier process is ignored.
        """
        for state in states:
            url = state.url
            if url not in self._states or state.restarts < self._states[url].restarts:
                continue
            if state.restarts > self._states[url].restarts:
                self._why_out[url] = "its server died and was started again"
                _log.warning("engine %s: %s", url, self._why_out[url])
            elif self._weights_stay and state.healthy and self._why_out[url]:
                self._why_out[url] = ""
                _log.info("engine %s serves again", url)
            self._states[url] = state

    def lose(self, url: str, reason: str) -> None:
        """Take an engine out for good, which is gone with its node."""
        if url in self._states and not self._states[url].lost:
            self._states[url] = replace(self._states[url], healthy=False, lost=True)
            self._why_out[url] = reason
            _log.warning("engine %s is lost: %s", url, reason)

    def set_serving(
        self,
        urls: Collection[str],
        reasons: Mapping[str, str],
        version: int = FIRST,
    ) -> None:
        """Have `urls` and no other engines serve, with weights `version`; `reasons` says why not,
        by url, where that is known.
        """
        self._version = version
        for url, previous in self._why_out.items():
            if url in urls and url not in self.draining:
                self._why_out[url] = ""
                if previous:
                    _log.info("engine %s serves again", url)
                continue
            reason = reasons.get(url) or previous or "it does not hold the current weights"
            self._why_out[url] = reason
            if reason != previous:
                _log.warning("engine %s is out of rotation: %s", url, reason)
