"""A store gives back what was put in or written, as arrays, until a group is dropped."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rl.batches.episodes import ROLLOUT_LOGPROBS, TOKEN_IDS
from mcore_rl.batches.kept_rows import (
    BFLOAT16,
    INDEXER_TOPK,
    ROUTED_EXPERTS,
    STALE,
    ReadRequest,
)
from mcore_rl.batches.sample_store import (
    LostSampleError,
    SampleStore,
    SpillFiles,
    UnknownSampleError,
)
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion
from tests.support.image_prompts import make_image
from tests.support.stored import make_stored
from tests.support.turn_trees import random_tree, sample_of


def make_sample(index: int, num_tokens: int = 2) -> Sample:
    prompt = Prompt(3, (1, 2), (), "unit", "7")
    spans = (VersionSpan(0, num_tokens, WeightVersion(4)),)
    ids = tuple(range(10, 10 + num_tokens))
    return Sample(prompt, index, ids, (-0.5,) * num_tokens, "stop", spans, "text")


def read(store: SampleStore, *names: str, version: int = 4) -> list[list[float]]:
    request = ReadRequest(np.array([9, 9]), np.array([1, 0]), names, version)
    return [store.read(request)[name].tolist() for name in names]


def test_samples_come_back_whole() -> None:
    stores, samples, rows = make_stored(seed=0)
    for sample, row in zip(samples, rows, strict=True):
        [found] = stores.stores[row.lease.store].samples([row.lease.group], [row.sample_index])
        assert np.allclose(found.logprobs, sample.logprobs)  # float32 here, float64 there
        assert replace(found, logprobs=sample.logprobs) == sample
        assert found.routed_experts is not None and sample.routed_experts is not None
        assert found.routed_experts.tolist() == sample.routed_experts.tolist()


def test_an_episode_comes_back_with_the_images_of_its_rows() -> None:
    one, two = make_image("one"), make_image("two")
    tree = random_tree(random.Random(0), 9)
    sample = sample_of(tree, Prompt(3, (1,), (), "unit", "7"), 0)
    assert sample.episode is not None
    rows = sample.episode.rows
    shown = [replace(row, images=(two, one)[number % 2 :]) for number, row in enumerate(rows)]
    episode = replace(sample.episode, rows=tuple(shown))
    store = SampleStore()
    store.put(0, [replace(sample, episode=episode)])
    [found] = store.samples([0], [0])
    wanted = {image.digest: image for row in shown for image in row.images}
    assert found.episode is not None and found.episode.images == tuple(wanted.values())
    assert len(rows) > 1 and wanted


def test_an_episode_comes_back_with_its_rows() -> None:
    sample = sample_of(random_tree(random.Random(1), 9), Prompt(3, (1,), (), "unit", "7"), 0)
    store = SampleStore()
    store.put(0, [sample])
    [found] = store.samples([0], [0])
    assert found.episode is not None and sample.episode is not None
    assert len(found.episode.rows) > 1
    for row, kept in zip(sample.episode.rows, found.episode.rows, strict=True):
        for name in ("token_ids", "is_trained", "logprobs", "turn_T"):
            assert getattr(kept, name).tolist() == getattr(row, name).tolist()
        assert kept.versions == row.versions


def test_columns_are_laid_end_to_end_in_the_order_of_the_request() -> None:
    store = SampleStore()
    store.put(9, [make_sample(0), make_sample(1, 3)])
    ids, stale = read(store, TOKEN_IDS, STALE)
    assert ids == [1, 2, 10, 11, 12, 1, 2, 10, 11]
    assert stale == [False] * 9
    assert read(store, STALE, version=5) == [[False] * 2 + [True] * 3 + [False] * 2 + [True] * 2]
    values = np.arange(9, dtype=np.float32)
    store.write(np.array([9, 9]), np.array([1, 0]), {"old_logprobs": values})
    assert read(store, "old_logprobs") == [values.tolist()]
    values[:] = 0  # the store has copies
    assert read(store, "old_logprobs") == [list(range(9))]


def test_experts_take_a_byte_each_and_only_the_wanted_layers_are_read() -> None:
    stores, _, rows = make_stored(seed=1, num_stores=1)
    row = next(row for row in rows if row.response_len)
    group_N, index_N = np.array([row.lease.group]), np.array([row.sample_index])
    whole = stores.stores[0].read(ReadRequest(group_N, index_N, (ROUTED_EXPERTS,)))
    request = ReadRequest(group_N, index_N, (ROUTED_EXPERTS,), layers=(2, 0))
    part = stores.stores[0].read(request)[ROUTED_EXPERTS]
    assert part.dtype == np.uint8
    assert part.tolist() == whole[ROUTED_EXPERTS][:, [2, 0]].tolist()


def test_chosen_keys_come_back_though_those_that_tokens_cannot_but_choose_are_not_kept() -> None:
    num_layers, top_k, num_tokens = 2, 3, 8
    generator = np.random.default_rng(0)
    samples, keys = [], []
    for index, length in enumerate((num_tokens, 4, 2)):  # the last two have no token that chooses
        rows_TLK = np.full((length - 1, num_layers, top_k), -1, np.int16)
        for token, layer in np.ndindex(length - 1, num_layers):
            chosen = np.sort(generator.permutation(token + 1)[:top_k])
            rows_TLK[token, layer, : len(chosen)] = chosen
        sample = make_sample(index, length - 2)
        samples.append(replace(sample, indexer_topk=torch.from_numpy(rows_TLK)))
        keys.append(rows_TLK)
    store = SampleStore()
    store.put(9, samples)
    plain = SampleStore()
    plain.put(9, [replace(sample, indexer_topk=None) for sample in samples])
    kept = (num_tokens - 1 - top_k) * num_layers * top_k * 2
    assert store.num_bytes() - plain.num_bytes() == kept
    for found, rows_TLK in zip(store.samples([9] * 3, [0, 1, 2]), keys, strict=True):
        assert found.indexer_topk is not None
        assert found.indexer_topk.tolist() == rows_TLK.tolist()
    group_N, index_N = np.array([9] * 3), np.array([1, 0, 2])
    request = ReadRequest(group_N, index_N, (INDEXER_TOPK,))
    whole = store.read(request)[INDEXER_TOPK]
    starts = {1: 0, 0: 4, 2: 12}
    for index, start in starts.items():
        assert whole[start : start + len(keys[index])].tolist() == keys[index].tolist()
    ranges = [(first, stop) for first in range(num_tokens) for stop in range(first, num_tokens)]
    experts_R3 = np.array([(1, first, stop) for first, stop in ranges])
    part = store.read(replace(request, layers=(1,), experts_R3=experts_R3))[INDEXER_TOPK]
    wanted = np.concatenate([keys[0][first:stop, [1]] for first, stop in ranges])
    assert part.tolist() == wanted.tolist()


def test_dropped_groups_are_gone_and_named() -> None:
    store = SampleStore()
    store.put(9, [make_sample(0), make_sample(1)])
    store.put(10, [make_sample(0)])
    store.drop([9, 77])
    assert store.num_groups == 1
    with pytest.raises(UnknownSampleError, match="sample 1 of group 9 is not in the store"):
        read(store, TOKEN_IDS)


def test_a_store_that_began_anew_knows_which_groups_are_lost() -> None:
    store = SampleStore(first_group=10)
    with pytest.raises(LostSampleError, match="sample 1 of group 9 is not in the store"):
        read(store, TOKEN_IDS)
    store.put(10, [make_sample(0)])
    assert store.num_groups == 1


def test_groups_beyond_the_bound_go_to_files_and_are_read_from_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = SampleStore()
    spill = SpillFiles(str(tmp_path))
    bounded = SampleStore(limit_bytes=100, spill=spill)
    for store in (memory, bounded):
        for group in (9, 10, 11):
            store.put(group, [make_sample(0), make_sample(1, 3)])
        store.write(np.array([9, 10]), np.array([0, 1]), {"values": np.arange(9, dtype=np.float32)})
    of_group = 9 * (4 + 4)
    assert memory.num_bytes() == 3 * of_group + 9 * 4
    assert bounded.num_bytes() == of_group + 9 * 4
    assert spill.num_bytes == 2 * of_group
    request = ReadRequest(np.array([11, 9, 10]), np.array([1, 0, 1]), (TOKEN_IDS, STALE), 4)
    for name, values in memory.read(request).items():
        assert values.tolist() == bounded.read(request)[name].tolist()
    assert bounded.samples([10], [1]) == memory.samples([10], [1])
    bounded.drop([9, 10])
    assert bounded.num_bytes() == 0
    bounded.put(12, [make_sample(0), make_sample(1, 3)])
    assert bounded.num_bytes() == of_group, "there is room again"
    assert caplog.text.count("samples take more than rollout.store_gib=") == 1


def test_bfloat16_halves_log_probs_and_nothing_else() -> None:
    store = SampleStore(logprob_dtype=BFLOAT16)
    logprobs = (-0.123456, -7.654321, -30.0)
    sample = replace(make_sample(0, 3), logprobs=logprobs)
    store.put(9, [sample, make_sample(1)])
    assert store.num_bytes() == 9 * (4 + 2)
    nearest = torch.tensor(logprobs).bfloat16().tolist()
    [found] = store.samples([9], [0])
    assert found.logprobs == tuple(nearest) != logprobs
    assert read(store, ROLLOUT_LOGPROBS)[0][-3:] == nearest
    old = np.array([-0.3, -0.7, *np.zeros(7)], np.float32)
    for name in ("old_logprobs", "values"):
        store.write(np.array([9, 9]), np.array([1, 0]), {name: old})
    assert read(store, "values") == [old.tolist()]
    assert read(store, "old_logprobs") == [torch.from_numpy(old).bfloat16().tolist()]
    assert store.num_bytes() == 9 * (4 + 2 + 2 + 4)
