"""What the ranks report about one optimizer step, reduced over data- and context-parallel ranks."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor


def token_sums(
    loss: Tensor, metrics_T: Mapping[str, Tensor], mask_T: Tensor, num_tokens: int
) -> dict[str, Tensor]:
    """Scalars of one micro-batch that add up (those ending in "_max": whose maximum counts) over the step."""
    sums = {
        "loss": loss.detach().clone(),
        "num_masked": mask_T.sum(),
        "num_tokens": torch.tensor(num_tokens, device=loss.device),
    }
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
    """(loss, metrics averaged over the step's masked tokens) from the last stage's reports of
    `token_sums`.
    """
    group = ps.get_data_parallel_group(with_context_parallel=True)
    added = [name for name in reports[0] if not name.endswith("_max")]
    peaks = [name for name in reports[0] if name.endswith("_max")]
    sums = torch.stack([torch.stack([r[name].double() for r in reports]).sum() for name in added])
    dist.all_reduce(sums, group=group)
    total = dict(zip(added, sums.tolist(), strict=True))
    counted = total.pop("num_tokens")
    assert counted == num_tokens, (
        f"the step was scaled for {num_tokens} tokens, but its ranks had {counted:.0f}"
    )
    loss, count = total.pop("loss"), max(total.pop("num_masked"), 1.0)
    metrics = {name: value / count for name, value in total.items()}
    if peaks:
        maxima = torch.stack([torch.stack([r[name] for r in reports]).amax() for name in peaks])
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        metrics |= dict(zip(peaks, maxima.tolist(), strict=True))
    return loss, metrics
