"""Reduces the sums of micro-batches to the loss and metrics of an optimizer step.

They are reduced over the data- and context-parallel ranks. `gather_tokens` brings the values of all
context-parallel ranks together, and `check_finite` refuses numbers of a forward pass that are not
finite, before anything is trained on them.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from mcore_rl.device import device, peak_bytes


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


def gather_tokens(
    locals_T: Sequence[Tensor],
    indices_T: Sequence[Tensor],
    nums_tokens: Sequence[int],
    twins_T: Sequence[Tensor | None],
) -> list[Tensor]:
    """Return the values of all context-parallel ranks in the order of each micro-batch.

    There is an entry per micro-batch; each result is [num_tokens, ...] on the CPU of every one of
    these ranks. Value i goes to token index_T[i], and is left out if that is -1; further axes may
    follow T. All micro-batches travel together, so the host waits for the device once. `twins_T`
    are SharedRows.twins_T of each micro-batch; None where each token has a value of its own.

        index_T   rank 0:  1 2 - -    rank 1:  3 4        "-" is -1
        result    0 a b c d           of values a b . .   and c d
    """
    assert len(locals_T) == len(indices_T) == len(nums_tokens), "values of some micro-batches"
    first_tokens = [0, *accumulate(nums_tokens)]
    index_T = torch.cat(
        [
            torch.where(index >= 0, index + first, -1)
            for index, first in zip(indices_T, first_tokens, strict=False)
        ]
    )
    has_index_T = index_T >= 0
    local_T = torch.cat([values.detach() for values in locals_T]).cpu()
    whole_T = torch.zeros(first_tokens[-1], *local_T.shape[1:], dtype=local_T.dtype)
    whole_T[index_T[has_index_T]] = local_T[has_index_T]
    group = ps.get_context_parallel_group()
    if group.size() > 1:
        on_gpu = whole_T.to(device())
        dist.all_reduce(on_gpu, group=group)
        whole_T = on_gpu.cpu()
    parts = zip(whole_T.split(list(nums_tokens)), twins_T, strict=True)
    return [values if twins is None else values[twins] for values, twins in parts]


def token_sums(
    loss: Tensor, metrics_T: Mapping[str, Tensor], mask_T: Tensor, num_tokens: int
) -> dict[str, Tensor]:
    """Return one micro-batch's scalars, to be added up over the step."""
    return {
        "loss": loss.detach().clone(),
        "num_masked": mask_T.sum(),
        "num_tokens": torch.full((), num_tokens, device=loss.device),
        **sum_masked(metrics_T, mask_T),
    }


def sum_masked(metrics_T: Mapping[str, Tensor], mask_T: Tensor) -> dict[str, Tensor]:
    """Sum the metrics over the tokens in `mask_T`.

    Those whose name ends in "_max" are maxima, and their maximum is taken over the step.
    """
    sums = {}
    for name, value_T in metrics_T.items():
        value_T = value_T.detach().float()
        if name.endswith("_max"):
            sums[name] = value_T.masked_fill(~mask_T, -torch.inf).amax()
        else:
            sums[name] = value_T.masked_fill(~mask_T, 0.0).sum()
    return sums


def reduce_sums(
    reports: Sequence[Mapping[str, Tensor]], num_tokens: int
) -> tuple[float, dict[str, float]]:
    """Return (loss, metrics) of the step from the last stage's `token_sums`; a collective.

    Metrics are means over the tokens of the loss mask, or maxima if named "*_max"; all are 0 if no
    token is on the mask, as where every response of a step was cut off. `num_tokens` is
    the number by which the loss was scaled; it must equal the tokens of all ranks.
    """
    group = ps.get_data_parallel_group(with_context_parallel=True)
    added = [name for name in reports[0] if not name.endswith("_max")]
    peaks = [name for name in reports[0] if name.endswith("_max")]
    sums = torch.stack([_column(reports, name).double().sum() for name in added])
    dist.all_reduce(sums, group=group)
    total = dict(zip(added, sums.tolist(), strict=True))
    counted = total.pop("num_tokens")
    assert counted == num_tokens, (
        f"the step was scaled for {num_tokens} tokens, but its ranks had {counted:.0f}"
    )
    loss = total.pop("loss")
    num_masked = total.pop("num_masked")
    count = max(num_masked, 1.0)
    metrics = {name: value / count for name, value in total.items()}
    if peaks:
        maxima = torch.stack([_column(reports, name).amax() for name in peaks])
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        # Without a token of the loss mask there is no maximum; a mean is 0 then, too.
        found = maxima.tolist() if num_masked else [0.0] * len(peaks)
        metrics |= dict(zip(peaks, found, strict=True))
    return loss, metrics


def _column(reports: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    """Return the scalars `name` of all micro-batches, [len(reports)]."""
    return torch.stack([report[name] for report in reports])


def peak_memory() -> dict[str, float]:
    """Return the most GPU memory of any rank since `forget_peak` as a metric; {} on a CPU."""
    num_bytes = peak_bytes()
    if not num_bytes:
        return {}
    most = torch.tensor(num_bytes / 2**30, device=device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return {"train/peak_memory_gib_max": float(most)}
