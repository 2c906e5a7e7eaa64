"""Chooses the data-parallel layout in which a model goes on once nodes are lost, or come back.

    dp 3, pp 2; a letter is a block: the tp * cp ranks      b and f are lost      dp 2, pp 2
    of a data-parallel coordinate in a pipeline stage
                     stage 0:  a b c                        a . c                 a c
                     stage 1:  d e f                        d e .                 d e

Blocks stay whole, as their ranks share a node. A stage takes its own blocks, as their states are
near. If it has too few, it takes what another stage has too many.
"""

from collections.abc import Collection
from dataclasses import dataclass

from mcore_rl.config import ParallelConfig


class NoLayoutError(ValueError):
    """No layout is legal with the ranks that have a place."""


@dataclass(frozen=True)
class PlacedLayout:
    """A layout, and by its ranks those of the recipe's layout whose places they take."""

    parallel: ParallelConfig
    places: tuple[int, ...]


def choose_layout(
    parallel: ParallelConfig, left: Collection[int], min_dp: int, group: str
) -> PlacedLayout:
    """Return the layout of the largest data-parallel size that the ranks `left` can form.

    parallel   the layout of the recipe, which is never exceeded
    left       those of its ranks that have a place
    group      of the sizes: "parallel" or "critic.parallel"
    Raises NoLayoutError, which says why no size from `min_dp` on is possible.
    """
    blocks = _list_blocks(parallel, left)
    most = min(sum(map(len, blocks)) // parallel.pp, parallel.dp_size)
    if most < min_dp:
        size = parallel.tp * parallel.cp
        raise NoLayoutError(
            f"{len(left)} of {parallel.world_size} ranks are left, in whole blocks of {group}.tp *"
            f" {group}.cp = {size} enough for {group}.dp={most}; run.recovery.min_dp={min_dp}"
        )
    try:
        legal = parallel.shrink(most, min_dp, group)
    except ValueError as error:
        raise NoLayoutError(str(error)) from error
    taken = [of_stage[: legal.dp_size] for of_stage in blocks]
    spare = [block for of_stage in blocks for block in of_stage[legal.dp_size :]]
    for of_stage in taken:
        while len(of_stage) < legal.dp_size:
            of_stage.append(spare.pop(0))
    places = (rank for of_stage in taken for block in of_stage for rank in block)
    return PlacedLayout(legal, tuple(places))


def find_namesake(earlier: ParallelConfig, parallel: ParallelConfig, rank: int) -> int:
    """Return an earlier rank with the coordinates of `rank` in the layout `parallel`.

    If the earlier layout is the smaller one, this is a rank with the same expert-parallel
    coordinate, as ep * etp divides tp * cp * dp. Ranks are numbered by tensor, context, data and
    pipeline parallelism, as megatron-core does.
    """
    block = parallel.tp * parallel.cp
    dp, within = divmod(rank % (block * parallel.dp_size), block)
    stage = rank // (block * parallel.dp_size)
    return (stage * earlier.dp_size + dp % earlier.dp_size) * block + within


def _list_blocks(parallel: ParallelConfig, left: Collection[int]) -> list[list[range]]:
    """Return by stage the blocks of ranks that are all in `left`."""
    size = parallel.tp * parallel.cp
    stages = []
    for stage in range(parallel.pp):
        first = stage * parallel.dp_size * size
        starts = range(first, first + parallel.dp_size * size, size)
        blocks = [range(start, start + size) for start in starts]
        stages.append([block for block in blocks if set(block) <= set(left)])
    return stages
