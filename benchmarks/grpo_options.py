"""Options of `mcore-rl train` and of TRL's GRPOTrainer for the same steps of a workload.

A test holds that both mean the same: sizes, sampling, loss and optimizer.
"""

from pathlib import Path
from typing import Any

from grpo_workload import LEARNING_RATE, MAX_PROMPT_LEN, Workload

RECIPE = "tiny_moe_grpo"
CLIP = 0.2
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
CLIP_GRAD = 1.0
BALANCE = 1e-3
"""Weight of the balance loss of a mixture of experts."""
WAYS = {
    "padded_bfloat16": "padded sequences, weights in bfloat16 alone",
    "continuous": "continuous batching of paged sequences, weights in bfloat16 alone",
    "padded": "padded sequences, float32 weights, cast for each product but those of experts",
}
"""How TRL samples by itself, likely the fastest first; on a CPU all weights are in float32."""


def list_own(workload: Workload, folder: Path, run_dir: Path, num_steps: int) -> dict[str, Any]:
    """Return options of a run of RECIPE; it has a step more, the last, which saves."""
    longest = MAX_PROMPT_LEN + workload.max_len
    reward = Path(__file__).with_name("grpo_reward.py")
    return {
        "run.dir": run_dir,
        "run.steps": num_steps + 1,
        "run.resume": False,
        "model.path": folder / "model",
        "model.init": "hf",
        "model.dtype": "float32",
        "data.train": f"[{folder / 'train.parquet'}]",
        "data.max_prompt_len": MAX_PROMPT_LEN,
        "rollout.prompts_per_step": workload.num_prompts,
        "rollout.samples_per_prompt": workload.samples_per_prompt,
        "rollout.max_response_len": workload.max_len,
        "rollout.temperature": 1.0,
        "rollout.kv_cache_len": workload.num_samples * longest,
        "train.mini_batches": 1,
        "train.epochs": 1,
        "train.optimizer.lr": LEARNING_RATE,
        "train.optimizer.min_lr": 0.0,
        "train.optimizer.schedule": "constant",
        "train.optimizer.warmup_steps": 0,
        "train.optimizer.weight_decay": 0.0,
        "train.optimizer.beta1": BETA1,
        "train.optimizer.beta2": BETA2,
        "train.optimizer.eps": EPS,
        "train.optimizer.clip_grad": CLIP_GRAD,
        "train.router_aux_loss_coef": BALANCE if workload.has_experts else 0.0,
        "algorithm.kl.coef": 0.0,
        "algorithm.clip_low": CLIP,
        "algorithm.clip_high": CLIP,
        "reward.path": reward,
        "reward.name": "reward",
        "eval.data": "[]",
        "checkpoint.every_steps": 0,
        "checkpoint.export_hf": False,
        "log.tensorboard": False,
        "train.share_prefixes": True,  # faster in all workloads on a CPU
        "parallel.ep": 1,
        "parallel.dp": workload.processes,
        "rollout.engines": workload.processes,
    }


def list_own_on_gpu(workload: Workload, max_tokens: int) -> list[str]:
    """Return options besides those of `list_own` where trainer and engine take turns on one GPU.

    max_tokens  of a micro-batch
    """
    # Late: TRL's process reads this file, too, and has no mcore_rl.
    from mcore_rl.tools.doctor.run_checks import ON_GPU

    return [
        *ON_GPU,
        f"rollout.sglang.cuda_graph_max_bs_decode={workload.num_samples}",
        f"train.max_tokens_per_microbatch={max_tokens}",
        "train.share_prefixes=false",
        "run.recovery.partner=none",
    ]


def list_trl(
    workload: Workload,
    folder: Path,
    num_steps: int,
    micro_batch: int,
    *,
    processes: int = 1,
    on_gpu: bool = False,
    way: str = "padded",
) -> dict[str, Any]:
    """Return arguments of TRL's GRPOConfig.

    micro_batch  sequences of it, a divisor of those of each process
    way          one of WAYS
    """
    samples = workload.num_samples // processes
    assert samples % micro_batch == 0, f"{samples} / {micro_batch}"
    return {
        "output_dir": str(folder / "trl"),
        "max_steps": num_steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": samples // micro_batch,
        "generation_batch_size": workload.num_samples,
        "num_generations": workload.samples_per_prompt,
        "max_completion_length": workload.max_len,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta1": BETA1,
        "adam_beta2": BETA2,
        "adam_epsilon": EPS,
        "max_grad_norm": CLIP_GRAD,
        "epsilon": CLIP,
        "temperature": 1.0,
        "beta": 0.0,
        "router_aux_loss_coef": BALANCE if workload.has_experts else None,
        "use_transformers_continuous_batching": way == "continuous",
        "gradient_checkpointing": False,
        "use_cpu": not on_gpu,
        "ddp_backend": "gloo" if processes > 1 else None,
        "ddp_find_unused_parameters": True,  # experts that got no token
        "bf16": on_gpu,
        "dataloader_pin_memory": on_gpu,
        "report_to": [],
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
