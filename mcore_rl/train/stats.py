"""Turns the sums of each micro-batch into the loss and metrics of the optimizer step.

They are reduced over the data- and context-parallel ranks.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from mcore_rl.device import device, peak_bytes


def token_sums(
    loss: Tensor, metrics_T: Mapping[str, Tensor], mask_T: Tensor, num_tokens: int
) -> dict[str, Tensor]:
    """Return one micro-batch's scalars, to be added up over the step."""
    return {
        "loss": loss.detach().clone(),
        "num_masked": mask_T.sum(),
        "num_tokens": torch.tensor(num_tokens, device=loss.device),
        **masked_sums(metrics_T, mask_T),
    }


def masked_sums(metrics_T: Mapping[str, Tensor], mask_T: Tensor) -> dict[str, Tensor]:
    """Return the metrics summed over the tokens in `mask_T`.

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
