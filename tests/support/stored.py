"""Samples that lie in stores of this process, and the same samples held here."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mcore_rl.batches.assembly import apply_to_stored
from mcore_rl.batches.kept_rows import ReadRequest
from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.loops.roles import TokenWork
from mcore_rl.rollout.collector import collect_facts
from mcore_rl.types import (
    GroupLease,
    Prompt,
    Sample,
    StoredBatch,
    StoredSample,
    TrainBatch,
    VersionSpan,
    WeightVersion,
)

NUM_EXPERTS = 8
LAYERS = 3


@dataclass
class Stores:
    """Several stores, with the two verbs that assembly needs."""

    stores: list[SampleStore] = field(default_factory=list)
    reads: list[Mapping[int, ReadRequest]] = field(default_factory=list)

    def read(self, requests: Mapping[int, ReadRequest]) -> dict[int, Any]:
        self.reads.append(requests)
        return {k: self.stores[k].read(request) for k, request in requests.items()}

    def write(self, parts: Mapping[int, Any]) -> None:
        for k, part in parts.items():
            self.stores[k].write(*part)


def work_beside(
    stores: Stores, works: Sequence[tuple[TokenWork, StoredBatch]]
) -> list[tuple[StoredBatch, Any]]:
    """Play roles.OnTokens as collectors do, but in this process."""
    made = []
    for function, batch in works:
        columns, returned = apply_to_stored(function, batch, stores.read, stores.write)
        made.append((replace(batch, **columns), returned))
    return made


def make_sample(generator: random.Random, prompt: Prompt, index: int, most: int = 6) -> Sample:
    """Return a response of up to `most` tokens of versions 0 and 1, with its experts."""
    num_tokens = generator.randint(0, most)
    middle = num_tokens // 2
    spans = (
        VersionSpan(0, middle, WeightVersion(0)),
        VersionSpan(middle, num_tokens, WeightVersion(1)),
    )
    rows = len(prompt.token_ids) + num_tokens - 1
    experts = [generator.randrange(NUM_EXPERTS) for _ in range(rows * LAYERS * 2)]
    return Sample(
        prompt,
        index,
        tuple(generator.randrange(100) for _ in range(num_tokens)),
        tuple(-generator.random() for _ in range(num_tokens)),
        generator.choice(["stop", "length"]),
        spans,
        f"text {index}",
        torch.tensor(experts, dtype=torch.int16).view(rows, LAYERS, 2),
    )


def make_stored(
    seed: int, num_groups: int = 5, num_samples: int = 3, num_stores: int = 2
) -> tuple[Stores, list[Sample], list[StoredSample]]:
    """Return (stores, samples, the same as stored), both in the same random order."""
    generator = random.Random(seed)
    stores = Stores([SampleStore(NUM_EXPERTS) for _ in range(num_stores)])
    pairs: list[tuple[Sample, StoredSample]] = []
    for group in range(num_groups):
        ids = tuple(generator.randrange(100) for _ in range(generator.randint(1, 5)))
        prompt = Prompt(group, ids, (), "unit", "7")
        samples = [make_sample(generator, prompt, i) for i in range(num_samples)]
        lease = GroupLease(group % num_stores, group)
        stores.stores[lease.store].put(group, samples)
        pairs += [(sample, stored(sample, lease)) for sample in samples]
    generator.shuffle(pairs)
    return stores, [sample for sample, _ in pairs], [row for _, row in pairs]


def put_in_stores(
    groups: Sequence[Sequence[Sample]], num_stores: int
) -> tuple[Stores, list[StoredSample]]:
    """Return (stores that hold the groups in turn, the samples as stored, in their order)."""
    stores = Stores([SampleStore(NUM_EXPERTS) for _ in range(num_stores)])
    rows = []
    for group, samples in enumerate(groups):
        lease = GroupLease(group % num_stores, group)
        stores.stores[lease.store].put(group, samples)
        facts = collect_facts(group, samples)
        for i, sample in enumerate(samples):
            row = replace(stored(sample, lease), has_experts=facts.has_experts)
            if facts.episode_rows:
                row = replace(row, episode_rows=facts.episode_rows[i], metrics=facts.metrics[i])
            rows.append(row)
    return stores, rows


def stored(sample: Sample, lease: GroupLease) -> StoredSample:
    return StoredSample(
        sample.prompt,
        sample.sample_index,
        sample.response_len,
        sample.finish_reason,
        sample.versions,
        sample.routed_experts is not None,
        lease,
    )


def assert_same(made: TrainBatch, expected: TrainBatch) -> None:
    """Both have the same fields, of the same dtypes and values."""
    assert made.lens_N == expected.lens_N and made.is_filler == expected.is_filler
    fields = made.token_fields()
    assert fields.keys() == expected.token_fields().keys()
    for name, values in expected.token_fields().items():
        assert fields[name].dtype == values.dtype, name
        assert torch.equal(fields[name], values), name


def with_all_experts(part: TrainBatch) -> TrainBatch:
    """Return a micro-batch that was read with the experts of all tokens as one held here."""
    own = part.own_experts
    assert own is not None and part.routed_experts_TLK is None
    if part.is_filler:
        assert len(own.tokens_M) == len(own.experts_MLK) == 0
        return replace(part, own_experts=None)
    assert own.tokens_M.tolist() == list(range(len(part.token_ids_T)))
    return replace(part, own_experts=None, routed_experts_TLK=own.experts_MLK)
