"""Packs sequences into micro-batches within a token budget, for every data-parallel rank."""

import heapq
from collections.abc import Sequence

from mcore_rl.data.shared_prefixes import Sharing


def plan_microbatches(
    lens_N: Sequence[int], dp_size: int, max_tokens: int, multiple_of: int = 1
) -> list[list[list[int]]]:
    """Return sequence indices by data-parallel rank and micro-batch; each sequence appears once.
    Deterministic.

    The number of micro-batches of at most `max_tokens` tokens is what first-fit decreasing finds,
    raised to a multiple of dp_size * multiple_of. All ranks get the same number, dealt out so that
    their tokens are balanced. A micro-batch is empty only if there are fewer sequences than
    micro-batches.

    Raises ValueError if a sequence is longer than `max_tokens`.
    """
    _check_fits(lens_N, max_tokens)
    unit = dp_size * multiple_of
    num_bins = -(-_first_fit(lens_N, max_tokens) // unit) * unit
    while (bins := _spread(lens_N, num_bins, max_tokens)) is None:
        num_bins += unit
    return _deal(bins, lens_N, dp_size)


def plan_shared_microbatches(
    lens_N: Sequence[int],
    sharing: Sharing,
    dp_size: int,
    max_tokens: int,
    multiple_of: int = 1,
) -> list[list[list[int]]]:
    """Do as `plan_microbatches` where common beginnings within a micro-batch count once.

    Sequences that share stay together in pieces of a micro-batch. Of several sizes of pieces the
    one with the fewest tokens on the fullest rank is taken.
    """
    _check_fits(lens_N, max_tokens)
    plans = []
    most = max_tokens
    while not plans or 2 * most > max(lens_N):
        pieces = _pieces(lens_N, sharing, most)
        costs = [cost for cost, _ in pieces]
        plan = plan_microbatches(costs, dp_size, max_tokens, multiple_of)
        fullest = max(sum(costs[k] for part in rank for k in part) for rank in plan)
        plans.append((fullest, len(plan[0]), pieces, plan))
        most //= 2
    _, _, pieces, plan = min(plans, key=lambda found: found[:2])
    return [[[n for k in part for n in pieces[k][1]] for part in rank] for rank in plan]


def _pieces(lens_N: Sequence[int], sharing: Sharing, most: int) -> list[tuple[int, list[int]]]:
    """Return (tokens to compute, sequences) of pieces of at most `most` tokens.

    Only a sequence that is longer by itself makes a longer piece.
    """
    children: list[list[int]] = [[] for _ in lens_N]
    for n in reversed(sharing.order):
        if sharing.parents[n] >= 0:
            children[sharing.parents[n]].append(n)
    pieces: list[tuple[int, list[int]]] = []
    for root in sharing.order:
        if sharing.parents[root] >= 0:
            continue
        cost, piece, to_visit = 0, list[int](), [root]
        while to_visit:
            n = to_visit.pop()
            to_visit += children[n]
            own = lens_N[n] - (sharing.starts[n] if sharing.parents[n] in piece else 0)
            if piece and cost + own > most:
                pieces.append((cost, piece))
                cost, piece, own = 0, [], lens_N[n]
            cost += own
            piece.append(n)
        pieces.append((cost, piece))
    return pieces


def _check_fits(lens_N: Sequence[int], max_tokens: int) -> None:
    longest = max(range(len(lens_N)), key=lambda i: lens_N[i])
    if lens_N[longest] > max_tokens:
        raise ValueError(
            f"sequence {longest} has {lens_N[longest]} tokens, more than"
            f" train.max_tokens_per_microbatch={max_tokens}: raise it or shorten prompts or"
            " responses"
        )


def _by_len(lens_N: Sequence[int]) -> list[int]:
    return sorted(range(len(lens_N)), key=lambda i: (-lens_N[i], i))


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


def _spread(lens_N: Sequence[int], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Put sequences, longest first, into the emptiest bin; None if that overfills a bin."""
    heap = [(0, k) for k in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for i in _by_len(lens_N):
        used, k = heapq.heappop(heap)
        if used + lens_N[i] > max_tokens:
            return None
        bins[k].append(i)
        heapq.heappush(heap, (used + lens_N[i], k))
    return [sorted(b) for b in bins]


def _deal(bins: list[list[int]], lens_N: Sequence[int], dp_size: int) -> list[list[list[int]]]:
    """Deal the fullest bins first, reversing direction each round, so that the ranks' tokens are
    balanced.
    """
    order = sorted(range(len(bins)), key=lambda k: (-sum(lens_N[i] for i in bins[k]), k))
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for turn in range(0, len(order), dp_size):
        row = order[turn : turn + dp_size]
        if (turn // dp_size) % 2:
            row = row[::-1]
        for rank, k in enumerate(row):
            ranks[rank].append(bins[k])
    return ranks
