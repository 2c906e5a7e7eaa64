"""The place of a rank in the parallel layout. Imports no Megatron; the controller uses it, too."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankCoordinate:
    """A rank's index in each parallel dimension; `owns_output` is True on one rank per `dp`."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    owns_output: bool
