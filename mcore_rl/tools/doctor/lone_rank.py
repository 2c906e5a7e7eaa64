"""The only rank of a trainer, which the checks of the stages "megatron" and "te" have train.

On a GPU its models have between one and three billion parameters, on a CPU they are tiny.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_rl.algo.sequences import SequenceSum
from mcore_rl.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.config.shipped import RECIPES_DIR
from mcore_rl.device import device, has_cuda, peak_bytes
from mcore_rl.process.network import find_free_port
from mcore_rl.tasks.tiny_models import qwen3_moe_config
from mcore_rl.tools.doctor.check import Figures, MissedTargetError, expect
from mcore_rl.types import StepStats, TrainBatch

LEARNING_RATE = 1e-3
_HELD = ("main_grad", "main_param")
"""Tensors that megatron-core hangs on a parameter."""
REPEATED_STEP = 0.1
"""Target on a GPU: how far a step that is taken again leads from the first, as a share of it."""
MEMORY_TOLERANCE = 0.10
"""Target: how far the measured peak may be from that of `mcore-rl plan`, as a share of the latter.
"""
_QWEN3: Mapping[bool, dict[str, int]] = {
    True: {
        "hidden_size": 2048,
        "num_hidden_layers": 8,
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "head_dim": 128,
    },
    False: {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
}
_DEEPSEEK: Mapping[bool, dict[str, int]] = {
    True: {
        "vocab_size": 32768,
        "hidden_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 768,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "n_routed_experts": 32,
        "first_k_dense_replace": 1,
    },
    False: {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
    },
}
"""Sizes by whether there is a GPU."""


def qwen3_moe() -> dict[str, Any]:
    """Return config.json of a mixture of experts with grouped queries."""
    sizes = _QWEN3[has_cuda()]
    hidden, head = sizes["hidden_size"], sizes["head_dim"]
    return qwen3_moe_config(
        32768 if has_cuda() else 128,
        num_attention_heads=hidden // head,
        num_key_value_heads=hidden // head // 4,
        intermediate_size=2 * hidden,
        moe_intermediate_size=3 * hidden // 8,
        max_position_embeddings=4096,
        **sizes,
    )


def deepseek_v3() -> dict[str, Any]:
    """Return config.json of a mixture of experts with latent attention and shared experts."""
    shipped = json.loads((RECIPES_DIR / "model" / "deepseek_v3" / "config.json").read_text())
    return shipped | _DEEPSEEK[has_cuda()] | {"num_nextn_predict_layers": 0}


class LoneRank:
    """The only rank of a trainer, its recipe, and one batch to train on."""

    def __init__(
        self,
        folder: Path,
        hf_config: Mapping[str, Any],
        dtype: Literal["float32", "bfloat16"] | None = None,
        train: TrainConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        weights: str | None = None,
    ) -> None:
        """Build a random model of `hf_config`; the default dtype is bfloat16 on a GPU.

        `weights` is a HuggingFace directory to take the weights from.
        """
        from mcore_rl.train.actor import Actor
        from mcore_rl.train.runtime import init_distributed

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(hf_config))
        dtype = dtype or ("bfloat16" if has_cuda() else "float32")
        num_tokens = 8192 if has_cuda() else 256
        recipe = self.recipe = Config(
            model=ModelConfig(
                path=weights or str(folder), init="hf" if weights else "random", dtype=dtype
            ),
            parallel=ParallelConfig(),
            train=replace(
                train or TrainConfig(),
                max_tokens_per_microbatch=num_tokens,
                optimizer=optimizer or OptimizerConfig(lr=LEARNING_RATE),
            ),
        )
        port = find_free_port("127.0.0.1")
        init_distributed(0, 1, "127.0.0.1", port, recipe.parallel, seed=0, timeout_s=60)
        self.actor = Actor(
            recipe.model, recipe.parallel, recipe.train, recipe.train.optimizer, 100, seed=0
        )
        self.batch = make_batch(num_tokens, hf_config["vocab_size"])

    def step(self, num_microbatches: int = 1) -> StepStats:
        """Take a step on the batch, so many times over."""
        num_tokens = num_microbatches * len(self.batch.token_ids_T)
        stats = self.actor.train_step(
            [self.batch] * num_microbatches, _likelihood, temperature=1.0, num_tokens=num_tokens
        )
        assert stats is not None, "the only rank owns the output"
        return stats

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the rank's parameters, by name."""
        _, tensors = self.actor.weight_layout()
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def state(self) -> dict[str, Tensor]:
        """Return a copy in host memory of all that training goes on from, by name."""
        from mcore_rl.train.optimizer import parts_of

        held = {f"weights.{name}": tensor.cpu() for name, tensor in self.weights().items()}
        for number, part in enumerate(parts_of(self.actor.optimizer)):
            for place, (main, state) in enumerate(part.optimizer.state.items()):
                for name, tensor in {"main": main, **state}.items():
                    held[f"optimizer.{number}.{place}.{name}"] = tensor.detach().cpu().clone()
        return held

    def free(self) -> None:
        """Give up the memory of the model, which can no longer be used.

        Deleting this object is not enough: megatron-core's hooks on gradients and the model hold
        each other where Python's collector does not see it.
        """
        for chunk in self.actor.chunks:
            for parameter in chunk.parameters():
                for tensor in (parameter, *(getattr(parameter, name, None) for name in _HELD)):
                    if tensor is not None:
                        tensor.untyped_storage().resize_(0)


def make_batch(num_tokens: int, vocab_size: int) -> TrainBatch:
    """Return random tokens in sequences of unequal length, four of them."""
    lens_N = (num_tokens // 2, num_tokens // 4, num_tokens // 8, num_tokens // 8)
    generator = torch.Generator().manual_seed(0)
    mask_T = torch.ones(num_tokens, dtype=torch.bool)
    mask_T[torch.tensor((0, *lens_N[:-1])).cumsum(0)] = False
    return TrainBatch(
        token_ids_T=torch.randint(0, vocab_size, (num_tokens,), generator=generator),
        loss_mask_T=mask_T,
        lens_N=lens_N,
        loss_weights_T=mask_T / mask_T.sum(),
    )


def _likelihood(
    logprobs_T: Tensor, entropy_T: Tensor, batch: TrainBatch, sums: SequenceSum
) -> tuple[Tensor, Mapping[str, Tensor]]:
    return -logprobs_T, {}


@dataclass(frozen=True)
class LogprobDifference:
    """How far log-probs are from those of transformers in float32, with the weights of an export.

    largest, mean   of a rank's log-probs
    rounding        the mean for transformers itself in the rank's dtype: what rounding does
    """

    largest: float
    mean: float
    rounding: float

    @property
    def figures(self) -> Figures:
        return asdict(self)


def difference_from_transformers(rank: LoneRank, folder: Path) -> LogprobDifference:
    """Compare the log-probs of the rank's batch with those of transformers, after an export to
    `folder`."""
    rank.actor.export_hf(folder)
    [scores] = rank.actor.compute_logprobs([rank.batch]) or [None]
    assert scores is not None, "the only rank owns the output"
    # In a process of its own: the patches for a CPU get in the way of transformers' loader.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        exact_T, rounded_T = (
            torch.tensor(pool.submit(_transformers_scores, folder, rank.batch, dtype).result())
            for dtype in ("float32", rank.recipe.model.dtype)
        )
    ours_T = (scores.logprobs_T.cpu() - exact_T)[rank.batch.loss_mask_T].abs()
    theirs_T = (rounded_T - exact_T)[rank.batch.loss_mask_T].abs()
    return LogprobDifference(float(ours_T.max()), float(ours_T.mean()), float(theirs_T.mean()))


@torch.no_grad()
def _transformers_scores(folder: Path, batch: TrainBatch, dtype: str) -> list[float]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model = model.to(device())
    parts = []
    for tokens in batch.token_ids_T.split(list(batch.lens_N)):
        logits = model(tokens[None].to(device())).logits[0].float()
        chosen = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None].to(device()))[:, 0]
        parts += [torch.zeros(1), chosen.cpu()]
    return torch.cat(parts).tolist()


def expect_same(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise AssertionError naming a parameter that is not bit for bit as expected."""
    differing = [name for name in expected if not torch.equal(weights[name], expected[name])]
    expect(not differing, f"{len(differing)} parameters differ, first {differing[:1]}")


def expect_same_step(
    weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> float:
    """Return how far a step led from the expected one, as a share of the step.

    Raises AssertionError if that is more than a repeated step may differ on this device: on a GPU
    attention adds up its gradients in any order.
    """
    errors = [(weights[name] - expected[name]).float().norm() for name in expected]
    steps = [(expected[name] - before[name]).float().norm() for name in expected]
    share = float(torch.stack(errors).norm() / torch.stack(steps).norm())
    limit = REPEATED_STEP if has_cuda() else 0.0
    expect(share <= limit, f"the step differs by {share:.4f} of its length, target {limit}")
    return share


def compare_with_plan(rank: LoneRank) -> Figures:
    """Compare the largest memory of the last step with that of `mcore-rl plan`.

    Raises MissedTargetError if it is more than MEMORY_TOLERANCE away.
    """
    from mcore_rl.planning.memory import predict_memory
    from mcore_rl.planning.peak_memory import KEPT
    from mcore_rl.planning.recipe_models import PlannedRun

    [planned] = predict_memory(PlannedRun.make(rank.recipe), "trainer")
    kept = sum(planned.uses.get(what, 0) for what in KEPT)  # no weights are sent
    expected = planned.num_bytes - kept
    figures: Figures = {
        "planned_gib": round(expected / 2**30, 3),
        "measured_gib": round(peak_bytes() / 2**30, 3),
        "ratio": round(peak_bytes() / expected, 3),
    }
    if abs(figures["ratio"] - 1) > MEMORY_TOLERANCE:
        raise MissedTargetError(f"{figures['ratio']} of the plan, target 1 +- 0.1", figures)
    return figures
