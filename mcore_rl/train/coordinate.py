"""The place of a rank, free of Megatron imports: the controller reads it too."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankCoordinate:
    """Where a rank stands in each parallel dimension; `owns_output` is true on one rank per `dp`."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    owns_output: bool
