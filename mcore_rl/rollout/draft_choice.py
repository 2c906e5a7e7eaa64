"""Chooses for each pass of an engine that speculates whether it checks drafts, by what it measured.

    requests of a pass   -> seconds of a pass of each way       for 1, 2 to 3, 4 to 7, ... requests
    version of weights   -> tokens that a pass with drafts draws for a request

    gain = tokens of a pass with drafts * seconds of a plain pass / seconds of a pass with drafts

Seconds are measured anew from time to time, and what is accepted for each version of weights.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

_log = logging.getLogger(__name__)


class Way(StrEnum):
    """A pass checks drafts; draws a token for a request, and no more, so that a draft model lacks
    it in its KV cache; or draws it, and the draft model reads it.

    The ways are timed in this order: drafts behind a pass that left a draft model out are bad.
    """

    DRAFT = "with drafts"
    PLAIN = "without drafts and without the draft model"
    KEEP = "without drafts"


UNTIMED = 2
"""Passes after a change of way that are not timed, as an engine may run a pass ahead."""
BURST, BURSTS = 2, 4
"""Passes that are timed one after another, and how often: the ways take turns, so that what slows
the machine down for a while slows them all. The quickest quarter counts, so prompts between passes
do not."""
TIMED_FOR = 2048
"""Passes after which they are timed again: sequences are longer by then."""
FEWEST, ENOUGH = 8, 64
"""Drafted passes of a request after which its acceptance may be known, and is."""
REMEMBERED = 2048
"""Drafted passes of a request after which older ones count half."""
MARGIN = 0.03
"""The gain above 1 at which an engine begins to check drafts again."""
KEEPING_SHARE = 0.02
"""The share of a plain pass that the draft model may cost while no drafts are checked."""
Seconds = Mapping[Way, float]
WITHOUT_MODEL = (Way.DRAFT, Way.PLAIN)
"""The ways of an engine that guesses with n-grams."""


@dataclass
class _Room:
    """Passes of about as many requests.

    seconds   of a pass of each way; {}: not yet known
    samples   of the times that are being measured
    passes    since `seconds` were measured
    drafts    what was last decided; None: nothing yet
    """

    seconds: Seconds = field(default_factory=dict)
    samples: dict[Way, list[float]] = field(default_factory=dict)
    passes: int = 0
    drafts: bool | None = None


@dataclass(frozen=True)
class Told:
    """A pass that has been processed: its way, and the gain of drafts there, if it is known."""

    way: Way
    gain: float | None


@dataclass(frozen=True)
class _Pass:
    """A pass that has begun; `counts`: its drafts tell what the weights accept."""

    room: int
    way: Way
    version: str
    counts: bool


class DraftChoice:
    """Chooses the way of each pass. All ranks of an engine choose the same: what they measure
    by their clocks is agreed on, and all else they see alike.

    told   the last pass that was noted
    """

    def __init__(
        self,
        clock: Callable[[], float],
        agree: Callable[[Seconds], Seconds],
        ways: Sequence[Way] = tuple(Way),
    ) -> None:
        """Choose between `ways`, two of them if the engine guesses without a draft model.

        agree   returns the first rank's seconds on all ranks, which call it together
        """
        self._clock = clock
        self._agree = agree
        self._ways = ways
        self._rooms: dict[int, _Room] = {}
        self._pending: deque[_Pass] = deque()
        self._version = ""
        self._accepted = _Accepted()
        self._last: _Pass | None = None
        self._begun_at: float | None = None
        self._streak = 0
        self.told = Told(Way.DRAFT, None)

    def choose(self, num_requests: int, version: str, only: Way | None = None) -> Way:
        """Return the way of the pass that is about to begin; `only`: the one that it can have."""
        if version != self._version:
            self._version, self._accepted = version, _Accepted()
        number = num_requests.bit_length()
        room = self._rooms.setdefault(number, _Room())
        self._time_last(number)
        way = only or self._find_way(number, room)
        last = self._last
        counts = way is Way.DRAFT and not self._lacks_tokens(last)
        goes_on = last is not None and (last.room, last.way) == (number, way)
        self._streak = self._streak + 1 if goes_on else 1
        self._last = _Pass(number, way, version, counts)
        self._pending.append(self._last)
        room.passes += 1
        return way

    def _lacks_tokens(self, last: _Pass | None) -> bool:
        """Return whether there is a draft model and the last pass left it out."""
        return Way.KEEP in self._ways and last is not None and last.way is Way.PLAIN

    def note(self, num_accepted: Sequence[int]) -> None:
        """Note how many drafts of each request the oldest pending pass accepted."""
        done = self._pending.popleft()
        if done.counts and done.version == self._version:
            self._accepted.add(num_accepted)
        self.told = Told(done.way, self._measure_gain(self._rooms[done.room]))

    def _measure_gain(self, room: _Room) -> float | None:
        """Return by how much drafts speed up passes of a room; None: not yet known."""
        if not room.seconds or not self._accepted.num:
            return None
        return (1 + self._accepted.mean) * room.seconds[Way.PLAIN] / room.seconds[Way.DRAFT]

    def _time_last(self, number: int) -> None:
        """Take the time from the beginning of the last pass to that of the one in its room.

        The clock is read only while a room is measured: on a CPU it is a call of the system.
        """
        room = self._rooms[number]
        begun_at = self._begun_at
        self._begun_at = self._clock() if room.samples else None
        if begun_at is None or self._begun_at is None or self._last is None:
            return
        if self._last.room == number and self._streak > UNTIMED:
            room.samples[self._last.way].append(self._begun_at - begun_at)

    def _find_way(self, number: int, room: _Room) -> Way:
        if not room.samples and (not room.seconds or room.passes >= TIMED_FOR):
            room.samples = {way: [] for way in self._ways}
            if room.seconds:
                self._accepted = _Accepted()
        if room.samples:
            behind = min(self._ways, key=lambda way: len(room.samples[way]) // BURST)
            if len(room.samples[behind]) < BURST * BURSTS:
                return behind
            room.seconds = self._agree(find_quick(room.samples))
            room.samples, room.passes = {}, 0
        needed = room.seconds[Way.DRAFT] / room.seconds[Way.PLAIN] - 1
        if not self._accepted.is_clear_of(needed):
            return Way.DRAFT
        return self._decide(number, room)

    def _decide(self, number: int, room: _Room) -> Way:
        gain = self._measure_gain(room)
        assert gain is not None, "nothing is decided before all is measured"
        drafts = gain >= (1 + MARGIN if room.drafts is False else 1)
        most_s = (1 + KEEPING_SHARE) * room.seconds[Way.PLAIN]
        way = Way.KEEP if room.seconds.get(Way.KEEP, math.inf) <= most_s else Way.PLAIN
        if drafts != room.drafts:
            _log.info(
                "%d to %d requests, weights %s: passes with drafts draw %.2f tokens for a request"
                " in %.2f times the time of others, %.2f times as fast: %s",
                *(2 ** (number - 1), 2**number - 1, self._version, 1 + self._accepted.mean),
                room.seconds[Way.DRAFT] / room.seconds[Way.PLAIN],
                *(gain, Way.DRAFT if drafts else way),
            )
        room.drafts = drafts
        return Way.DRAFT if drafts else way


def find_quick(samples: Mapping[Way, Sequence[float]]) -> dict[Way, float]:
    """Return, for each way, the seconds that its quickest quarter of passes stayed below.

    A pass that the draft model reads is the dearer of what these and the quickest passes say of it:
    if other work on the machine makes it look cheap by chance, it is chosen for long.
    """
    quick = {way: sorted(timed)[BURST * BURSTS // 4] for way, timed in samples.items()}
    if Way.KEEP in quick:
        share = min(samples[Way.KEEP]) / min(samples[Way.PLAIN])
        quick[Way.KEEP] = max(quick[Way.KEEP], share * quick[Way.PLAIN])
    return quick


@dataclass
class _Accepted:
    """Drafts that the current weights accepted: passes of requests, sums, and sums of squares."""

    num: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, num_accepted: Sequence[int]) -> None:
        if self.num >= REMEMBERED:
            self.num, self.total, self.squares = self.num / 2, self.total / 2, self.squares / 2
        self.num += len(num_accepted)
        self.total += sum(num_accepted)
        self.squares += sum(number * number for number in num_accepted)

    @property
    def mean(self) -> float:
        return self.total / self.num

    def is_clear_of(self, mean: float) -> bool:
        """Return whether the mean is known well enough to say on which side of `mean` it is."""
        if self.num < FEWEST:
            return False
        variance = max(self.squares / self.num - self.mean**2, 0.0)
        return self.num >= ENOUGH or (self.mean - mean) ** 2 > 4 * variance / self.num
