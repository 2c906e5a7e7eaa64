"""Measures the controller's work on a batch of 16,384 sequences, beside plain Python.

Packing is compared with first fit that looks at every bin, joining samples of a store with a list
of all their numbers, and cutting a batch with a slice per sequence. Results are checked to be
equal. Ends with a line of JSON: seconds, and how many times as fast.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mcore_rl.batches.batch import select_each
from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.batches.packing import _first_fit, plan_microbatches
from mcore_rl.batches.stored_batch import make_stored_batch
from mcore_rl.types import Prompt, Sample, TrainBatch, VersionSpan, WeightVersion

NUM_SEQUENCES = 16384
MAX_TOKENS = 8192
DP_SIZE = 16


def main() -> None:
    samples = make_samples()
    lens = [len(sample.prompt.token_ids) + len(sample.response_ids) for sample in samples]
    stores = LocalStores()
    rows = stores.keep(samples)
    batch, join_s = timed(lambda: stores.assemble(make_stored_batch(rows, WeightVersion(1))))
    ids, plain_join_s = timed(lambda: plain_join(samples))
    assert torch.equal(batch.token_ids_T, ids)
    plan, plan_s = timed(lambda: plan_microbatches(lens, DP_SIZE, MAX_TOKENS))
    num_bins, fit_s = timed(lambda: _first_fit(lens, MAX_TOKENS))
    plain_bins, plain_fit_s = timed(lambda: plain_first_fit(lens, MAX_TOKENS))
    assert num_bins == plain_bins
    parts = [indices for rank in plan for indices in rank]
    cut, cut_s = timed(lambda: select_each(batch, parts))
    plain_cut, plain_cut_s = timed(lambda: [plain_select(batch, indices) for indices in parts])
    for one, other in zip(cut, plain_cut, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.token_fields().items())
    figures = {
        "sequences": len(lens),
        "tokens": sum(lens),
        "microbatches": len(parts),
        "plan_s": plan_s,
        "first_fit_s": fit_s,
        "join_s": join_s,
        "cut_s": cut_s,
        "first_fit_times_as_fast": plain_fit_s / fit_s,
        "join_times_as_fast": plain_join_s / join_s,
        "cut_times_as_fast": plain_cut_s / cut_s,
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


def make_samples() -> list[Sample]:
    """Return samples of 16 to 512 response tokens, two weight versions in each."""
    draw = random.Random(0)
    samples = []
    for index in range(NUM_SEQUENCES):
        prompt = Prompt(index, tuple(range(draw.randint(8, 64))), (), "none", "")
        num_tokens = draw.randint(16, 512)
        half = num_tokens // 2
        spans = (
            VersionSpan(0, half, WeightVersion(0)),
            VersionSpan(half, num_tokens, WeightVersion(1)),
        )
        response = tuple(range(num_tokens))
        samples.append(Sample(prompt, 0, response, (-0.5,) * num_tokens, "stop", spans, ""))
    return samples


def plain_join(samples: Sequence[Sample]) -> Tensor:
    """Join token ids, masks, log-probs and stale marks number by number; return the ids."""
    ids = [t for s in samples for t in s.prompt.token_ids + s.response_ids]
    lens = [(len(s.prompt.token_ids), len(s.response_ids)) for s in samples]
    torch.tensor([flag for p, r in lens for flag in [False] * p + [True] * r])
    torch.tensor([x for s in samples for x in [0.0] * len(s.prompt.token_ids) + list(s.logprobs)])
    stale: list[bool] = []
    for sample in samples:
        stale += [False] * len(sample.prompt.token_ids)
        for span in sample.versions:
            stale += [span.version != 1] * (span.stop - span.start)
    torch.tensor(stale)
    return torch.tensor(ids)


def plain_first_fit(lens: Sequence[int], max_tokens: int) -> int:
    bins: list[int] = []
    for num_tokens in sorted(lens, reverse=True):
        for k, used in enumerate(bins):
            if used + num_tokens <= max_tokens:
                bins[k] += num_tokens
                break
        else:
            bins.append(num_tokens)
    return len(bins)


def plain_select(batch: TrainBatch, indices: Sequence[int]) -> dict[str, Tensor]:
    stops = list(accumulate(batch.lens_N))
    rows = [slice(stops[i] - batch.lens_N[i], stops[i]) for i in indices]
    return {
        name: torch.cat([value[r] for r in rows]) for name, value in batch.token_fields().items()
    }


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return (result, seconds)."""
    began_s = time.perf_counter()
    result = function()
    return result, time.perf_counter() - began_s


if __name__ == "__main__":
    main()
