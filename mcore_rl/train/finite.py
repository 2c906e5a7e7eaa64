"""Refuses numbers of a forward pass that are not finite, before anything is trained on them."""

from collections.abc import Sequence

from torch import Tensor


class NotFiniteError(RuntimeError):
    """A forward pass gave NaN or infinite numbers."""


def check_finite(what: str, parts: Sequence[Tensor]) -> None:
    """Raise NotFiniteError if a number in `parts`, one tensor [T] per micro-batch, is not finite.

    `what`: the numbers, as the message names them.
    """
    for index, values_T in enumerate(parts):
        if bool(values_T.isfinite().all()):
            continue
        bad = values_T.isfinite().logical_not().nonzero()
        first = int(bad[0, 0])
        raise NotFiniteError(
            f"{len(bad)} of {values_T.numel()} {what} of micro-batch {index} are not finite, the"
            f" first at token {first} ({float(values_T.flatten()[first])}): the weights hold NaN,"
            " or activations overflow (docs/debugging.md#weights)"
        )
