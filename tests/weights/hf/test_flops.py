"""Counted operations are those that torch counts while transformers runs the same model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.flops import ModelFlops
from tests.support.tiny_models import MODELS, write_model

NUM_TOKENS = 12
DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
MAMBA = ("nemotron3", "nemotron3_latent")


@pytest.mark.parametrize("kind", MODELS)
def test_a_forward_pass_has_the_operations_that_torch_counts(kind: str, tmp_path: Path) -> None:
    import transformers

    write_model(kind, tmp_path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    )
    model.set_experts_implementation("eager")
    facts = ModelFacts.read(tmp_path)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(NUM_TOKENS)[None] % facts.vocab_size)
    flops = ModelFlops.from_facts(facts)
    # Eager attention multiplies all pairs of tokens and masks them afterwards.
    pairs = (flops.per_pair + flops.per_window_pair) * NUM_TOKENS**2
    layers = range(facts.sizes["layers"])
    linear = [layer for layer in layers if "linear" in facts.family.list_kinds(facts.config, layer)]
    counted = counter.get_total_flops() - count_chunks(counter, linear)
    if kind in MAMBA:
        per_head = 3 * 8 * 16  # a state of 8 x 16 numbers: changed twice, read once
        convolution = 4 * (8 * 8 + 2 * 4 * 16)
        counted += len(linear) * 2 * (8 * per_head + convolution) * NUM_TOKENS
    if kind in DELTA_NETS:
        per_head = 3 * 8 * 12  # a state of 8 x 12 numbers: read twice, changed once
        convolution = 4 * (2 * 4 * 8 + 8 * 12)
        counted += 3 * 2 * (8 * per_head + convolution) * NUM_TOKENS
    per_token, per_pair = flops.indexer
    pairs += per_pair * NUM_TOKENS**2
    assert (flops.per_token + per_token) * NUM_TOKENS + pairs == counted


def count_chunks(counter: FlopCounterMode, layers: list[int]) -> int:
    """Return the operations of linear attention in these layers apart from projections.

    They depend on the kernel.
    """
    modules = tuple(f".{layer}.{name}" for layer in layers for name in ("linear_attn", "mixer"))
    operations = (torch.ops.aten.bmm, torch.ops.aten.convolution)
    return sum(
        counts.get(operation, 0)
        for module, counts in counter.get_flop_counts().items()
        if module.endswith(modules)
        for operation in operations
    )


def test_only_pairs_within_a_sequence_and_its_past_count() -> None:
    flops = ModelFlops.from_facts(ModelFacts.read("recipes/model/qwen3_30b_a3b"))
    seen = 3 * 4 / 2 + 5 * 6 / 2
    assert flops.count_forward((3, 5)) == flops.per_token * 8 + flops.per_pair * seen
    assert flops.count_training((3, 5)) == 3 * flops.count_forward((3, 5))
    assert flops.count_forward((8,)) > flops.count_forward((3, 5))


def test_half_of_gpt_oss_sees_a_window() -> None:
    flops = ModelFlops.from_facts(ModelFacts.read("recipes/model/gpt_oss_20b"))
    assert flops.window == 128 and flops.per_window_pair == flops.per_pair
    in_window = 128 * 129 / 2 + (1000 - 128) * 128
    wanted = flops.per_token * 1000 + flops.per_pair * (1000 * 1001 / 2 + in_window)
    assert flops.count_forward((1000,)) == wanted


def test_published_models_have_six_operations_per_active_parameter_and_token() -> None:
    """Six, as in Kaplan et al. 2020 (arXiv:2001.08361), where attention's pairs are few."""
    # 3.3e9 active parameters, 0.3e9 of them embeddings
    flops = ModelFlops.from_facts(ModelFacts.read("recipes/model/qwen3_30b_a3b"))
    assert flops.count_training((128,)) / 128 == pytest.approx(6 * 3.03e9, rel=0.02)


def test_sparse_attention_reads_few_keys_and_its_indexer_scores_all() -> None:
    dense = ModelFlops.from_facts(ModelFacts.read("recipes/model/deepseek_v3"))
    sparse = ModelFlops.from_facts(ModelFacts.read("recipes/model/deepseek_v32"))
    assert (sparse.per_token, sparse.per_pair) == (dense.per_token, 0.0)
    assert (sparse.per_window_pair, sparse.window) == (dense.per_pair, 2048)
    per_token = 2 * 61 * (1536 * 64 * 128 + 7168 * (128 + 64))
    per_pair = 2 * 61 * (64 * 128 + 64)
    assert sparse.indexer == (per_token, per_pair)
    num, whole = 4096, 4096 * 4097 / 2
    read = 2048 * 2049 / 2 + 2048 * 2048
    indexers = per_token * num + per_pair * whole
    trained = dense.per_token * num + dense.per_pair * read
    assert sparse.count_forward((num,)) == trained + indexers
    assert sparse.count_training((num,)) == 3 * trained + indexers, "indexers are frozen"
