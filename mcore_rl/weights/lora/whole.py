"""Refuses an adapter with factors that are missing, alone, misshapen, doubled or of no matrix."""

from collections.abc import Mapping
from pathlib import Path

from mcore_rl.weights.models.table import Shape

_OTHER = {"A": "B", "B": "A"}


def check_factor_shapes(
    found: Mapping[str, Shape], wanted: Mapping[str, Shape], where: Path | str
) -> None:
    """Raise ValueError, naming `where` and the tensor, unless exactly the wanted factors are there.

    found, wanted   shapes by "<HF tensor>.A" and "<HF tensor>.B"
    """
    missing = [key for key in wanted if key not in found]
    for key in missing:
        name, letter = key[:-2], key[-1]
        if f"{name}.{_OTHER[letter]}" in found:
            raise ValueError(
                f"{where} has factor {_OTHER[letter]} of {name!r} and no factor {letter}: half an"
                " adapter was written; take the files from where they were made"
            )
    if missing:
        num_all = len(wanted) // 2
        raise ValueError(
            f"{where} lacks the factors of {len(missing) // 2} of {num_all} matrices, the first is"
            f" {missing[0][:-2]!r}: shards of it were dropped, or it has other targets"
        )
    for key in sorted(found):
        if key not in wanted:
            raise ValueError(
                f"{where} has factors of {key[:-2]!r}, which is not among the adapted matrices of"
                " this model: it has other targets, or belongs to another model"
            )
        _check_shape(found[key], wanted[key], key, where)


def _check_shape(shape: Shape, wanted: Shape, key: str, where: Path | str) -> None:
    if shape == wanted:
        return
    where_it_is = f"{where}: factor {key[-1]} of {key[:-2]!r} has shape {shape}, not {wanted}"
    if shape == wanted[::-1]:
        raise ValueError(f"{where_it_is}: it lies transposed; write it as PEFT does, [out, in]")
    rank_axis = 0 if key.endswith(".A") else 1
    other_axis = 1 - rank_axis
    same = len(shape) == 2 and shape[other_axis] == wanted[other_axis]
    if same and shape[rank_axis] % wanted[rank_axis] == 0:
        raise ValueError(
            f"{where_it_is}: it counts {shape[rank_axis] // wanted[rank_axis]} times, as if ranks"
            " had added up their copies, or it has another rank"
        )
    raise ValueError(f"{where_it_is}: it belongs to another model or has another rank")
