"""Packs sequences into micro-batches within a token budget, for every data-parallel rank.

Tokens bound a micro-batch, as its memory follows them. What is balanced is work: attention makes
one sequence of 32k tokens cost more than 32 of 1k. Micro-batches of equal rank are balanced, too:
with expert or pipeline parallelism all data-parallel ranks wait for the slowest at each of them.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mcore_rl.batches.shared_prefixes import Sharing

Work = Callable[[int], float]
"""Tokens of a sequence -> its modeled work, in any unit; it grows with them."""
Plan = list[list[list[int]]]
"""Sequence indices by data-parallel rank and micro-batch."""


def plan_microbatches(
    lens_N: Sequence[int],
    dp_size: int,
    max_tokens: int,
    multiple_of: int = 1,
    work: Work = float,
) -> Plan:
    """Return sequence indices by data-parallel rank and micro-batch; each sequence appears once.
    Deterministic.

    The number of micro-batches of at most `max_tokens` tokens is what first-fit decreasing finds,
    raised to a multiple of dp_size * multiple_of. All ranks get the same number, dealt out so that
    their work is balanced; by default it is their tokens. A micro-batch is empty only if there are
    fewer sequences than micro-batches.

    Raises ValueError if a sequence is longer than `max_tokens`.
    """
    _check_fits(lens_N, max_tokens)
    return _plan(lens_N, [work(n) for n in lens_N], dp_size, max_tokens, multiple_of)


def _plan(
    lens_N: Sequence[int],
    works_N: Sequence[float],
    dp_size: int,
    max_tokens: int,
    multiple_of: int,
) -> Plan:
    """Plan like `plan_microbatches`, for pieces whose tokens and work are known and fit.

    Where no micro-batch has room if work is balanced, tokens are, before there are more of them.
    """
    unit = dp_size * multiple_of
    num_bins = -(-_first_fit(lens_N, max_tokens) // unit) * unit
    while True:
        for balanced_N in (works_N, lens_N):
            bins = _spread(lens_N, balanced_N, num_bins, max_tokens)
            if bins is not None:
                return _deal(bins, works_N, dp_size)
        num_bins += unit


def plan_shared_microbatches(
    lens_N: Sequence[int],
    sharing: Sharing,
    dp_size: int,
    max_tokens: int,
    multiple_of: int = 1,
    work: Work = float,
) -> Plan:
    """Plan like `plan_microbatches`, counting common beginnings within a micro-batch once.

    Sequences that share stay together in pieces of a micro-batch. Of several sizes of pieces the
    one with the least work on the busiest rank is taken.
    """
    _check_fits(lens_N, max_tokens)
    plans = []
    most = max_tokens
    while not plans or 2 * most > max(lens_N):
        pieces = _pieces(lens_N, sharing, most)
        tokens = [piece.num_tokens(lens_N) for piece in pieces]
        works = [piece.work(lens_N, work) for piece in pieces]
        plan = _plan(tokens, works, dp_size, max_tokens, multiple_of)
        busiest = max(sum(works[k] for part in rank for k in part) for rank in plan)
        plans.append((busiest, len(plan[0]), pieces, plan))
        most //= 2
    _, _, pieces, plan = min(plans, key=lambda found: found[:2])
    return [[[n for k in part for n in pieces[k].sequences] for part in rank] for rank in plan]


@dataclass
class _Piece:
    """Sequences that stay together. starts: tokens of each that another of them computes."""

    sequences: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def num_tokens(self, lens_N: Sequence[int]) -> int:
        """Return the tokens that are computed."""
        return sum(lens_N[n] for n in self.sequences) - sum(self.starts)

    def work(self, lens_N: Sequence[int], work: Work) -> float:
        """Return the work of these tokens: their queries see all tokens before them."""
        taken_over = sum(work(start) for start in self.starts if start)
        return sum(work(lens_N[n]) for n in self.sequences) - taken_over


def _pieces(lens_N: Sequence[int], sharing: Sharing, most: int) -> list[_Piece]:
    """Return pieces that compute at most `most` tokens.

    Only a sequence that is longer by itself makes a longer piece.
    """
    children: list[list[int]] = [[] for _ in lens_N]
    for n in reversed(sharing.order):
        if sharing.parents[n] >= 0:
            children[sharing.parents[n]].append(n)
    pieces: list[_Piece] = []
    for root in sharing.order:
        if sharing.parents[root] >= 0:
            continue
        piece = _Piece()
        num_tokens = 0
        to_visit = [root]
        while to_visit:
            n = to_visit.pop()
            to_visit += children[n]
            start = sharing.starts[n] if sharing.parents[n] in piece.sequences else 0
            if piece.sequences and num_tokens + lens_N[n] - start > most:
                pieces.append(piece)
                piece = _Piece()
                num_tokens = 0
                start = 0
            num_tokens += lens_N[n] - start
            piece.sequences.append(n)
            piece.starts.append(start)
        pieces.append(piece)
    return pieces


def _check_fits(lens_N: Sequence[int], max_tokens: int) -> None:
    longest = max(range(len(lens_N)), key=lambda i: lens_N[i])
    if lens_N[longest] > max_tokens:
        raise ValueError(
            f"sequence {longest} has {lens_N[longest]} tokens, more than"
            f" train.max_tokens_per_microbatch={max_tokens}: raise it or shorten prompts or"
            " responses"
        )


def _first_fit(lens_N: Sequence[int], max_tokens: int) -> int:
    """Return the number of bins that first-fit decreasing opens, in O(N log N).

    Bins are the leaves of a tree, node k has the children 2 k and 2 k + 1, and each node knows the
    most room in a bin below it. So the first bin with room is found from the root down.
    """
    num_leaves = 1 << max(len(lens_N) - 1, 0).bit_length()
    room = [max_tokens] * (2 * num_leaves)
    num_opened = 0
    for num_tokens in sorted(lens_N, reverse=True):
        node = 1
        while node < num_leaves:
            node *= 2
            if room[node] < num_tokens:
                node += 1
        num_opened = max(num_opened, node - num_leaves + 1)
        room[node] -= num_tokens
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return num_opened


def _spread(
    lens_N: Sequence[int], balanced_N: Sequence[float], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Put each sequence, in falling order of work, into the bin with room that has least work.

    Graham's longest processing time first; `balanced_N` is the work. None if a sequence finds no
    room. Bins without room for a sequence wait apart until one comes that they have room for, so
    that none is looked at again and again.
    """
    least = [(0.0, k) for k in range(num_bins)]
    waiting: list[tuple[int, float, int]] = []
    """(minus the room, work, bin) of bins that lacked room for a sequence."""
    rooms = [max_tokens] * num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for i in sorted(range(len(lens_N)), key=lambda i: (-balanced_N[i], -lens_N[i], i)):
        while waiting and -waiting[0][0] >= lens_N[i]:
            _, done, k = heapq.heappop(waiting)
            heapq.heappush(least, (done, k))
        while least and rooms[least[0][1]] < lens_N[i]:
            done, k = heapq.heappop(least)
            heapq.heappush(waiting, (-rooms[k], done, k))
        if not least:
            return None
        done, k = least[0]
        bins[k].append(i)
        rooms[k] -= lens_N[i]
        heapq.heapreplace(least, (done + balanced_N[i], k))
    return [sorted(b) for b in bins]


def _deal(bins: list[list[int]], works_N: Sequence[float], dp_size: int) -> Plan:
    """Deal the bins of most work first, reversing direction each round.

    The ranks' work then differs by no more than that of the first bin: what a rank gets more than
    another in one round, it gets less in the next.
    """
    order = sorted(range(len(bins)), key=lambda k: (-sum(works_N[i] for i in bins[k]), k))
    ranks: Plan = [[] for _ in range(dp_size)]
    for turn in range(0, len(order), dp_size):
        row = order[turn : turn + dp_size]
        if (turn // dp_size) % 2:
            row = row[::-1]
        for rank, k in enumerate(row):
            ranks[rank].append(bins[k])
    return ranks
