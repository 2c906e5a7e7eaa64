"""Packs sequences into micro-batches within a token budget, for every data-parallel rank."""

import heapq
from collections.abc import Sequence


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
    unit = dp_size * multiple_of
    longest = max(range(len(lens_N)), key=lambda i: lens_N[i])
    if lens_N[longest] > max_tokens:
        raise ValueError(
            f"sequence {longest} has {lens_N[longest]} tokens, more than"
            f" train.max_tokens_per_microbatch={max_tokens}: raise it or shorten prompts or"
            " responses"
        )
    num_bins = -(-_first_fit(lens_N, max_tokens) // unit) * unit
    while (bins := _spread(lens_N, num_bins, max_tokens)) is None:
        num_bins += unit
    return _deal(bins, lens_N, dp_size)


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
