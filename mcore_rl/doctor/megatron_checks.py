"""Stage "megatron": a rank of Megatron-core in training, without Transformer Engine.

The model is a mixture of experts: on a GPU with 1.4 billion parameters in bfloat16, on a CPU a tiny
one. Torch modules stand in for Transformer Engine on both, so speed says nothing here.
"""

import json
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.algo.sequences import SequenceSum
from mcore_rl.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.data.tiny_model import qwen3_moe_config
from mcore_rl.device import device, has_cuda, peak_bytes, synchronize, use_torch_modules_on_cuda
from mcore_rl.doctor.check import Check, Figures, MissedTarget, Stage, expect
from mcore_rl.process.ports import find_free_port
from mcore_rl.types import StepStats, TrainBatch

NEEDED = ("megatron", "zlib_ng")
VOCAB = 32768
MEMORY_TOLERANCE = 0.10
"""Target: how far the measured peak may be from that of `mcore-rl plan`, as a share of the latter.
"""
SIZES: dict[bool, dict[str, int]] = {
    True: {"hidden_size": 2048, "num_hidden_layers": 8, "num_experts": 32, "head_dim": 128},
    False: {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 4, "head_dim": 16},
}
"""The sizes by whether there is a GPU."""
LEARNING_RATE = 1e-3


def model_config() -> dict[str, Any]:
    """Return the config.json of the model that this stage trains."""
    sizes = SIZES[has_cuda()]
    hidden, head = sizes["hidden_size"], sizes["head_dim"]
    return qwen3_moe_config(
        VOCAB if has_cuda() else 128,
        num_attention_heads=hidden // head,
        num_key_value_heads=hidden // head // 4,
        intermediate_size=2 * hidden,
        moe_intermediate_size=3 * hidden // 8,
        max_position_embeddings=4096,
        **sizes,
    )


class LoneRank:
    """The only rank of a trainer, its recipe, and one batch to train on."""

    def __init__(self, folder: Path, dtype: str | None = None) -> None:
        from mcore_rl.train.actor import Actor
        from mcore_rl.train.runtime import init_distributed

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model_config()))
        dtype = dtype or ("bfloat16" if has_cuda() else "float32")
        self.recipe = Config(
            model=ModelConfig(path=str(folder), init="random", dtype=dtype),
            parallel=ParallelConfig(),
            train=TrainConfig(max_tokens_per_microbatch=8192 if has_cuda() else 256),
        )
        use_torch_modules_on_cuda()
        port = find_free_port("127.0.0.1")
        init_distributed(0, 1, "127.0.0.1", port, self.recipe.parallel, seed=0, timeout_s=60)
        optimizer = OptimizerConfig(lr=LEARNING_RATE)
        recipe = self.recipe
        self.actor = Actor(recipe.model, recipe.parallel, recipe.train, optimizer, 100, seed=0)
        self.batch = _batch(recipe.train.max_tokens_per_microbatch, model_config()["vocab_size"])

    def step(self) -> StepStats:
        num_tokens = len(self.batch.token_ids_T)
        stats = self.actor.train_step(
            [self.batch], _likelihood, temperature=1.0, num_tokens=num_tokens
        )
        assert stats is not None, "the only rank owns the output"
        return stats

    def weights(self) -> dict[str, Tensor]:
        """A copy of the rank's parameters, by name."""
        _, tensors = self.actor.weight_layout()
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _batch(num_tokens: int, vocab_size: int) -> TrainBatch:
    """Random tokens in sequences of unequal length, four of them."""
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


def steps() -> Figures:
    """Ten steps on one batch: its negative log-likelihood falls, gradients are finite."""
    with tempfile.TemporaryDirectory() as folder:
        rank = LoneRank(Path(folder))
        first = rank.step()
        synchronize()
        began_s = time.monotonic()
        stats = [rank.step() for _ in range(9)]
        synchronize()
        seconds = (time.monotonic() - began_s) / len(stats)
    norms = [first.grad_norm, *(step.grad_norm for step in stats)]
    expect(all(0 < norm < float("inf") for norm in norms), f"gradient norms {norms}")
    expect(stats[-1].loss < first.loss - 0.1, f"loss from {first.loss} to {stats[-1].loss}")
    return {
        "loss_first": round(first.loss, 4),
        "loss_last": round(stats[-1].loss, 4),
        "tokens_per_s": round(len(rank.batch.token_ids_T) / seconds, 1),
        "peak_gib": round(peak_bytes() / 2**30, 3),
    }


def same_logprobs_as_transformers() -> Figures:
    """In float32, log-probs of an exported model are those of transformers."""
    with tempfile.TemporaryDirectory() as folder:
        rank = LoneRank(Path(folder, "model"), dtype="float32")
        exported = Path(folder, "hf")
        rank.actor.export_hf(exported)
        [scores] = rank.actor.compute_logprobs([rank.batch]) or [None]
        assert scores is not None, "the only rank owns the output"
        ours_T = scores.logprobs_T.cpu()
        # In a process of its own: the patches for a CPU get in the way of transformers' loader.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            theirs = pool.submit(_transformers_scores, exported, rank.batch).result()
    mask_T = rank.batch.loss_mask_T
    difference_T = (ours_T - torch.tensor(theirs))[mask_T].abs()
    expect(float(difference_T.max()) < 1e-2, f"log-probs differ by {float(difference_T.max())}")
    expect(float(difference_T.mean()) < 1e-4, f"in the mean by {float(difference_T.mean())}")
    return {"largest": float(difference_T.max()), "mean": float(difference_T.mean())}


@torch.no_grad()
def _transformers_scores(folder: Path, batch: TrainBatch) -> list[float]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(device())
    parts = []
    for tokens in batch.token_ids_T.split(list(batch.lens_N)):
        logits = model(tokens[None].to(device())).logits[0].float()
        chosen = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None].to(device()))[:, 0]
        parts += [torch.zeros(1), chosen.cpu()]
    return torch.cat(parts).tolist()


def checkpoint() -> Figures:
    """A step after a save and a load is the step that was taken before, bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        rank = LoneRank(Path(folder, "model"))
        rank.step()
        began_s = time.monotonic()
        rank.actor.save(Path(folder, "saved"), {})
        stopped_s = time.monotonic() - began_s
        rank.actor.finish_save()
        saved_s = time.monotonic() - began_s
        rank.step()
        expected = rank.weights()
        began_s = time.monotonic()
        rank.actor.load(Path(folder, "saved"))
        loaded_s = time.monotonic() - began_s
        rank.step()
        _expect_same(rank.weights(), expected)
        saved = sum(file.stat().st_size for file in Path(folder, "saved").rglob("*.distcp"))
    return {
        "gib": round(saved / 2**30, 3),
        "training_stopped_s": round(stopped_s, 2),
        "saved_s": round(saved_s, 2),
        "loaded_s": round(loaded_s, 2),
    }


def offload() -> Figures:
    """Everything moves to host memory and back; the next step is that of a rank that stayed."""
    with tempfile.TemporaryDirectory() as folder:
        rank = LoneRank(Path(folder))
        rank.step()
        before = rank.weights()
        rank.actor.hold(())
        rank.actor.hold(("weights", "training"))  # host memory is allocated the first time
        synchronize()
        began_s = time.monotonic()
        rank.actor.hold(())
        out_s = time.monotonic() - began_s
        began_s = time.monotonic()
        rank.actor.hold(("weights", "training"))
        in_s = time.monotonic() - began_s
        _expect_same(rank.weights(), before)
        rank.step()
        after = rank.weights()
    changed = any(not torch.equal(after[name], before[name]) for name in before)
    expect(changed, "a step after the return changed nothing")
    gigabytes = rank.actor.held_bytes / 1e9
    return {
        "gb": round(gigabytes, 3),
        "out_gb_per_s": round(gigabytes / out_s, 2),
        "in_gb_per_s": round(gigabytes / in_s, 2),
    }


def _expect_same(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    differing = [name for name in expected if not torch.equal(weights[name], expected[name])]
    expect(not differing, f"{len(differing)} parameters differ, first {differing[:1]}")


def planned_memory() -> Figures:
    """Compare the largest memory of a step with that of `mcore-rl plan`."""
    from mcore_rl.planning.memory import predict_memory
    from mcore_rl.planning.models import read_models

    with tempfile.TemporaryDirectory() as folder:
        rank = LoneRank(Path(folder))
        for _ in range(3):
            rank.step()
        [planned] = predict_memory(rank.recipe, read_models(rank.recipe), "trainer")
    sync_buffers = planned.uses.get("sync buffers", 0)  # this check sends no weights
    expected = planned.num_bytes - sync_buffers
    figures: Figures = {
        "planned_gib": round(expected / 2**30, 3),
        "measured_gib": round(peak_bytes() / 2**30, 3),
        "ratio": round(peak_bytes() / expected, 3),
    }
    if abs(figures["ratio"] - 1) > MEMORY_TOLERANCE:
        raise MissedTarget(f"{figures['ratio']} of the plan, target 1 +- 0.1", figures)
    return figures


MEGATRON = Stage(
    "megatron",
    "a training rank without Transformer Engine",
    (
        Check("steps", steps, deadline_s=240, modules=NEEDED),
        Check(
            "log-probs of transformers",
            same_logprobs_as_transformers,
            deadline_s=240,
            modules=(*NEEDED, "transformers"),
        ),
        Check("checkpoint", checkpoint, deadline_s=300, modules=NEEDED),
        Check("offload", offload, deadline_s=240, modules=NEEDED),
        Check("planned memory", planned_memory, deadline_s=240, gpu=True, modules=NEEDED),
    ),
)
