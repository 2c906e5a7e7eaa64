"""Samples that lie in stores of this process, and the same samples held here."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from mcore_rl.batches.assembly import column_of, scatter
from mcore_rl.batches.kept_rows import ReadRequest
from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.batches.stored_batch import make_stored_batch
from mcore_rl.types import (
    Array,
    Prompt,
    Sample,
    StoredBatch,
    StoredColumn,
    StoredSample,
    TrainBatch,
    VersionSpan,
    WeightVersion,
)

NUM_EXPERTS = 8
LAYERS = 3


class Stores(LocalStores):
    """Stores that note what was read, and keep all samples."""

    def __init__(self, num_stores: int = 1) -> None:
        super().__init__(num_stores, NUM_EXPERTS)
        self.reads: list[Mapping[int, ReadRequest]] = []
        self._kept: list[StoredSample] = []

    def keep_group(self, samples: Sequence[Sample]) -> list[StoredSample]:
        rows = super().keep_group(samples)
        self._kept += rows
        return rows

    def read(self, requests: Mapping[int, ReadRequest]) -> dict[int, Mapping[str, Array]]:
        self.reads.append(requests)
        return super().read(requests)


def fetch_nothing(batch: StoredBatch) -> TrainBatch:
    """Stand for stores that nobody should read."""
    raise AssertionError("there are no stores")


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


def with_choices(sample: Sample, indexer_topk: int, experts: bool) -> Sample:
    """Return a sample whose tokens attend to the nearest `indexer_topk`; 0: to none."""
    num_run = len(sample.prompt.token_ids) + sample.response_len - 1
    keys_TK = torch.arange(num_run)[:, None] - torch.arange(indexer_topk)
    rising_TK = torch.where(keys_TK >= 0, keys_TK, num_run).sort(1).values
    rising_TK = torch.where(rising_TK < num_run, rising_TK, -1).to(torch.int16)
    keys = rising_TK[:, None].expand(-1, LAYERS, -1).contiguous()
    return replace(
        sample,
        routed_experts=sample.routed_experts if experts else None,
        indexer_topk=keys if indexer_topk else None,
    )


def make_stored(
    seed: int,
    num_groups: int = 5,
    num_samples: int = 3,
    num_stores: int = 2,
    *,
    indexer_topk: int = 0,
    experts: bool = True,
) -> tuple[Stores, list[Sample], list[StoredSample]]:
    """Return (stores, samples, the same as stored), both in the same random order.

    indexer_topk   keys that each token attends to; 0: they are not known
    experts        whether it is known where tokens were routed
    """
    generator = random.Random(seed)
    stores = Stores(num_stores)
    pairs: list[tuple[Sample, StoredSample]] = []
    for group in range(num_groups):
        ids = tuple(generator.randrange(100) for _ in range(generator.randint(1, 5)))
        prompt = Prompt(group, ids, (), "unit", "7")
        samples = [make_sample(generator, prompt, i) for i in range(num_samples)]
        samples = [with_choices(sample, indexer_topk, experts) for sample in samples]
        pairs += zip(samples, stores.keep_group(samples), strict=True)
    generator.shuffle(pairs)
    return stores, [sample for sample, _ in pairs], [row for _, row in pairs]


def put_in_stores(
    groups: Sequence[Sequence[Sample]], num_stores: int
) -> tuple[Stores, list[StoredSample]]:
    """Return (stores that hold the groups in turn, the samples as stored, in their order)."""
    stores = Stores(num_stores)
    return stores, [row for samples in groups for row in stores.keep_group(samples)]


def store_batch(batch: TrainBatch) -> tuple[LocalStores, StoredBatch]:
    """Return (stores that keep a batch, the batch without its tokens), field by field.

    The first token of a sequence counts as its prompt; the loss mask is a column.
    """
    stores = Stores()
    version = WeightVersion(0)
    samples = [
        Sample(
            Prompt(n, tuple(ids[:1]), (), "unit", None),
            0,
            tuple(ids[1:]),
            (0.0,) * (len(ids) - 1),
            "stop",
            (VersionSpan(0, len(ids) - 1, version),),
            "",
        )
        for n, ids in enumerate(part.tolist() for part in batch.token_ids_T.split([*batch.lens_N]))
    ]
    stored = make_stored_batch(stores.keep(samples))
    fields = {
        name: values for name, values in batch.token_fields().items() if name != "token_ids_T"
    }
    scatter(stored, {column_of(name): values for name, values in fields.items()}, stores.write)
    kept = {name for name in fields if name in StoredBatch.__dataclass_fields__}
    columns = {name: StoredColumn(column_of(name)) for name in kept}
    num_trained = [int(part.sum()) for part in batch.loss_mask_T.split([*batch.lens_N])]
    stored = replace(
        stored,
        sampled_lens_N=np.array(num_trained),
        sample_N=None if batch.sample_N is None else np.array(batch.sample_N),
        sums_from=batch.sums_from,
        **columns,
    )
    return stores, stored


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
        assert len(own.tokens_M) == len(own.choices_MLK) == 0
        return replace(part, own_experts=None)
    assert own.tokens_M.tolist() == list(range(len(part.token_ids_T)))
    return replace(part, own_experts=None, routed_experts_TLK=own.choices_MLK)
