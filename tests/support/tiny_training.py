"""A tiny Qwen3-MoE model directory and packed batches of unequal lengths, for tests of train/."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import parallel_state as ps
from torch import Tensor

from mcore_rl.algo.sequences import SequenceSum
from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.train.actor import Actor
from mcore_rl.train.runtime import init_distributed
from mcore_rl.types import TrainBatch

VOCAB = 99
LENS = ((5, 9, 3), (20,), (7, 1, 7), (4, 4, 13))
NUM_TOKENS = sum(map(sum, LENS))


def write_hf_model(folder: Path, **overrides: object) -> Path:
    """Save a random model: 4 layers, the second dense, 8 experts, top 2, grouped queries."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "max_position_embeddings": 256,
        "initializer_range": 0.08,
    }
    make_config: Any = Qwen3MoeConfig
    Qwen3MoeForCausalLM(make_config(**sizes | overrides)).save_pretrained(folder)
    return folder


def make_batches() -> list[TrainBatch]:
    return [_make_batch(lens, seed) for seed, lens in enumerate(LENS)]


def _make_batch(lens_N: tuple[int, ...], seed: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lens_N)
    mask_T = torch.rand(num_tokens, generator=generator) > 0.2
    mask_T[torch.tensor((0, *lens_N[:-1])).cumsum(0)] = False
    return TrainBatch(
        token_ids_T=torch.randint(0, VOCAB, (num_tokens,), generator=generator),
        loss_mask_T=mask_T,
        lens_N=lens_N,
        loss_weights_T=mask_T / 40.0,
        advantages_T=torch.randn(num_tokens, generator=generator),
    )


def my_batches(batches: list[TrainBatch] | None = None) -> list[TrainBatch]:
    """Return this data-parallel rank's share of the micro-batches, default `make_batches()`."""
    return (batches or make_batches())[
        ps.get_data_parallel_rank() :: ps.get_data_parallel_world_size()
    ]


def token_loss(
    logprobs_T: Tensor, entropy_T: Tensor, batch: TrainBatch, sums: SequenceSum
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss that depends on each token and on the sum over its sequence, and metrics."""
    assert batch.advantages_T is not None
    sequence_logprob_T = sums(torch.where(batch.loss_mask_T, logprobs_T, 0.0))
    loss_T = (0.001 * sequence_logprob_T - batch.advantages_T) * logprobs_T - 0.01 * entropy_T
    return loss_T, {"entropy": entropy_T, "nll": -logprobs_T, "nll_max": -logprobs_T}


def make_actor(
    rank: int,
    world_size: int,
    port: int,
    model: ModelConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig | None = None,
    **train: Any,
) -> Actor:
    init_distributed(rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60)
    config = TrainConfig(**cast(Any, {"router_aux_loss_coef": 0.1} | train))
    return Actor(
        model, parallel, config, optimizer or OptimizerConfig(lr=1e-3, clip_grad=0.0), 6, seed=0
    )


def with_engine_records(
    batches: list[TrainBatch], hf_dir: Path
) -> tuple[list[TrainBatch], list[Tensor]]:
    """Return (batches as an engine might have sampled them, the router flips [T] put into them).

    The experts are transformers' choice, except that every third token has another one in layer 2,
    and every sixth in layer 3 as well. Layer 1 is dense. Every fourth token is stale.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    out, flips = [], []
    for batch in batches:
        experts_TLK = torch.zeros(len(batch.token_ids_T), 4, 2, dtype=torch.int16)
        flips_T, first = torch.zeros(len(batch.token_ids_T), dtype=torch.int32), 0
        for tokens in batch.token_ids_T.split(list(batch.lens_N)):
            rows = slice(first, first + len(tokens))
            with torch.no_grad():
                router_logits = model(tokens[None], output_router_logits=True).router_logits
            for layer, logits in zip((0, 2, 3), router_logits, strict=True):
                ranked_TE = logits.argsort(-1, descending=True)[:, :8].to(torch.int16)
                for period in {2: (3,), 3: (6,)}.get(layer, ()):
                    ranked_TE[::period, 1] = ranked_TE[::period, 5]
                    flips_T[rows][1:] += (torch.arange(len(tokens)) % period == 0).int()[:-1]
                experts_TLK[rows, layer] = ranked_TE[:, :2]
            experts_TLK[first + len(tokens) - 1] = -1
            first += len(tokens)
        index_T = torch.arange(first)
        records = {"routed_experts_TLK": experts_TLK, "stale_T": index_T % 4 == 0}
        out.append(replace(batch, rollout_logprobs_T=-1.0 - 0.01 * index_T, **records))
        flips.append(flips_T)
    return out, flips


def transformers_logprobs(
    hf_dir: Path, temperature: float = 1.0, batches: list[TrainBatch] | None = None
) -> list[torch.Tensor]:
    """Return token-aligned log-probs of each batch (default `make_batches()`), by sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    out = []
    for batch in batches or make_batches():
        parts = []
        for tokens in batch.token_ids_T.split(list(batch.lens_N)):
            with torch.no_grad():
                logits = model(tokens[None]).logits[0] / temperature
            parts.append(torch.zeros(1))
            parts.append(logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0])
        out.append(torch.cat(parts))
    return out
