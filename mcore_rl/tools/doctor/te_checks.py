"""Stage "te": a rank in training with Transformer Engine's kernels, as runs on GPUs have it.

On a CPU the same checks run with the torch modules that take its place there.
"""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mcore_rl.config import OptimizerConfig, TrainConfig
from mcore_rl.device import (
    empty_cache,
    forget_peak,
    has_cuda,
    has_transformer_engine,
    peak_bytes,
    peak_flops,
    synchronize,
)
from mcore_rl.run.roles.trainer import TrainSpeed
from mcore_rl.tools.doctor.check import (
    Check,
    Figures,
    MissedTargetError,
    SkipCheckError,
    Stage,
    expect,
    find_own_folder,
)
from mcore_rl.tools.doctor.lone_rank import (
    LEARNING_RATE,
    LoneRank,
    compare_with_plan,
    deepseek_v3,
    difference_from_transformers,
    expect_same,
    expect_same_step,
    qwen3_moe,
)
from mcore_rl.types import TrainBatch
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.flops import ModelFlops

NEEDED = ("megatron", "zlib_ng")
LEAST_MFU = 0.35
"""Target on a GPU whose peak is known."""
MOST_ROUNDING = 1.25
"""Target on a GPU, in bfloat16: the distance of log-probs from exact ones, as a multiple of that of
transformers in bfloat16. Routers with random weights turn small errors into other experts."""
MICROBATCHES = 4
RECOMPUTE = ("none", "selective", "layernorm+moe", "full")
LATENT = "layernorm+mlp+moe+mla_up_proj"
BFLOAT16_MOMENTS = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
}


@contextmanager
def _rank(hf_config: Mapping[str, Any], **options: Any) -> Iterator[LoneRank]:
    if has_cuda() and not has_transformer_engine():
        raise SkipCheckError("Transformer Engine is not installed")
    rank = LoneRank(find_own_folder() / "model", hf_config, **options)
    try:
        yield rank
    finally:
        rank.free()


def _check_logprobs(hf_config: Mapping[str, Any]) -> Figures:
    with _rank(hf_config) as rank:
        difference = difference_from_transformers(rank, find_own_folder() / "hf")
    limit = MOST_ROUNDING * difference.rounding if has_cuda() else 1e-4
    why = f"log-probs differ by {difference.mean} in the mean, target {limit}"
    expect(difference.mean < limit, why)
    return difference.figures


def check_qwen3_logprobs() -> Figures:
    """Log-probs of a Qwen3-MoE are those of transformers."""
    return _check_logprobs(qwen3_moe())


def check_deepseek_logprobs() -> Figures:
    """Log-probs of a model with latent attention and shared experts are those of transformers."""
    return _check_logprobs(deepseek_v3())


def check_speed() -> Figures:
    """Tokens and operations per second of a step over four micro-batches."""
    with _rank(qwen3_moe(), train=TrainConfig(recompute="selective")) as rank:
        rank.step(MICROBATCHES)
        seconds = _seconds(rank, num_steps=5)
        flops = ModelFlops.from_facts(ModelFacts.read(rank.recipe.model.path))
    measured = TrainSpeed(flops, 1, peak_flops()).metrics(rank.batch.lens_N * MICROBATCHES, seconds)
    figures: Figures = {
        "tokens_per_s": round(measured["train/tokens_per_second_per_gpu"], 1),
        "tflops": round(measured["train/tflops_per_gpu"], 3),
        "peak_gib": round(peak_bytes() / 2**30, 3),
    }
    if "train/mfu" in measured:
        figures["mfu"] = round(measured["train/mfu"], 4)
        if figures["mfu"] < LEAST_MFU:
            raise MissedTargetError(f"MFU {figures['mfu']}, target {LEAST_MFU}", figures)
    return figures


def _seconds(rank: LoneRank, num_steps: int) -> float:
    synchronize()
    began_s = time.monotonic()
    for _ in range(num_steps):
        rank.step(MICROBATCHES)
    synchronize()
    return (time.monotonic() - began_s) / num_steps


def check_recompute() -> Figures:
    """The same step, whatever is computed again; on a GPU its memory is near the plan's."""
    figures: Figures = {}
    missed = []
    for hf_config, kinds in ((qwen3_moe(), RECOMPUTE), (deepseek_v3(), ("none", LATENT, "full"))):
        losses = []
        for kind in kinds:
            name = f"{hf_config['model_type']}_{kind}"
            with _rank(hf_config, train=TrainConfig(recompute=kind)) as rank:
                rank.step()
                losses.append(rank.step().loss)
                figures[f"{name}_s"] = round(_seconds(rank, num_steps=2), 3)
                if has_cuda():
                    missed += _memory(rank, name, figures)
            del rank
            gc.collect()
            empty_cache()
        spread = max(losses) - min(losses)
        expect(spread < (0.02 if has_cuda() else 1e-4), f"losses {losses} by {', '.join(kinds)}")
    if missed:
        raise MissedTargetError("; ".join(missed), figures)
    return figures


def _memory(rank: LoneRank, name: str, figures: Figures) -> list[str]:
    """Add the memory of the last step to `figures`; return in what it misses its target."""
    try:
        measured = compare_with_plan(rank)
    except MissedTargetError as missed:
        figures |= {f"{name}_{key}": value for key, value in missed.figures.items()}
        return [f"{name}: {missed}"]
    figures |= {f"{name}_{key}": value for key, value in measured.items()}
    return []


def check_bfloat16_moments() -> Figures:
    """Moments in bfloat16 train, move to host memory and come back from a checkpoint."""
    optimizer = OptimizerConfig(lr=LEARNING_RATE, megatron=BFLOAT16_MOMENTS)
    saved = find_own_folder() / "saved"
    with _rank(qwen3_moe(), optimizer=optimizer) as rank:
        first = rank.step().loss
        state, before = rank.state(), rank.weights()
        rank.actor.hold(())
        rank.actor.save(saved, {})
        rank.actor.finish_save()
        rank.actor.hold(("weights", "training"))
        rank.step()
        expected = rank.weights()
        rank.actor.load(saved)
        expect_same(rank.state(), state)
        forget_peak()
        rank.step()
        step_gib = peak_bytes() / 2**30
        share = expect_same_step(rank.weights(), expected, before)
        last = [rank.step().loss for _ in range(6)][-1]
    expect(last < first - 0.1, f"loss from {first} to {last}")
    held = rank.actor.held_bytes
    return {
        "loss_first": round(first, 4),
        "loss_last": round(last, 4),
        "held_gb": held / 1e9,
        "step_peak_gib": round(step_gib, 3),
        "step_differs_by": share,
    }


def check_shared_prefixes() -> Figures:
    """Responses to a prompt that is computed once have the log-probs of separate ones."""
    logprobs, seconds, losses = [], [], []
    for share in (False, True):
        with _rank(qwen3_moe(), train=TrainConfig(share_prefixes=share)) as rank:
            rank.batch = _responses(rank.batch)
            [scores] = rank.actor.compute_logprobs([rank.batch]) or [None]
            assert scores is not None, "the only rank owns the output"
            logprobs.append(scores.logprobs_T.float().cpu())
            losses.append(rank.step().loss)
            seconds.append(_seconds(rank, num_steps=5))
    difference_T = (logprobs[0] - logprobs[1]).abs()
    limit = 0.05 if has_cuda() else 1e-4
    expect(float(difference_T.mean()) < limit, f"log-probs differ by {difference_T.mean()}")
    expect(abs(losses[0] - losses[1]) < limit, f"losses {losses}")
    return {
        "largest": float(difference_T.max()),
        "mean": float(difference_T.mean()),
        "speedup": round(seconds[0] / seconds[1], 3),
    }


def _responses(batch: TrainBatch) -> TrainBatch:
    """Return eight sequences that begin with the same seven eighths of their tokens."""
    length = len(batch.token_ids_T) // 8
    rows_NL = batch.token_ids_T.view(8, length).clone()
    rows_NL[:, : 7 * length // 8] = rows_NL[0, : 7 * length // 8]
    mask_NL = (torch.arange(length) >= 7 * length // 8).expand(8, length)
    mask_T = mask_NL.flatten()
    return TrainBatch(
        rows_NL.flatten(), mask_T, (length,) * 8, loss_weights_T=mask_T / mask_T.sum()
    )


def check_fp8_training() -> Figures:
    """Matrix products in FP8 by blocks: the loss falls as it does in bfloat16, and how fast."""
    train = TrainConfig(megatron={"fp8": "e4m3", "fp8_recipe": "blockwise"})
    with _rank(qwen3_moe(), train=train) as rank:
        first = rank.step(MICROBATCHES).loss
        seconds = _seconds(rank, num_steps=5)
        last = rank.step(MICROBATCHES).loss
    expect(last < first - 0.1, f"loss from {first} to {last}")
    tokens = len(rank.batch.token_ids_T) * MICROBATCHES
    return {
        "tokens_per_s": round(tokens / seconds, 1),
        "loss_first": round(first, 4),
        "loss_last": round(last, 4),
    }


WITH_TRANSFORMERS = (*NEEDED, "transformers")
TE = Stage(
    "te",
    "a training rank with Transformer Engine",
    (
        Check("Qwen3 as transformers", check_qwen3_logprobs, 240, modules=WITH_TRANSFORMERS),
        Check("DeepSeek as transformers", check_deepseek_logprobs, 240, modules=WITH_TRANSFORMERS),
        Check("speed", check_speed, 240, modules=NEEDED),
        Check("recompute", check_recompute, 400, modules=NEEDED),
        Check("shared prefixes", check_shared_prefixes, 240, modules=NEEDED),
        Check("moments in bfloat16", check_bfloat16_moments, 240, modules=NEEDED),
        Check("FP8 training", check_fp8_training, 240, gpu=True, modules=NEEDED),
    ),
)
