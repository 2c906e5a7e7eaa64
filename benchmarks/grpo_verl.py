"""Trains with verl's GRPO; prints a JSON line with the seconds and tokens of each step.

verl has no device but GPUs for its workers, so a hook (grpo_verl_hook.py) takes their place in each
process. Samples come from `generate` of transformers, its one way of rollout without a GPU. Runs in
an environment of its own, which knows nothing of this system.
"""

# pyright: reportMissingImports=false

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import ray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

HERE = Path(__file__).resolve().parent
MAX_PROMPT_LEN = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True, help="of a step")
    parser.add_argument("--samples-per-prompt", type=int, required=True)
    parser.add_argument("--max-len", type=int, required=True, help="tokens of a response")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    args = parser.parse_args()
    metrics = tempfile.mkdtemp(dir=args.folder)
    variables = {
        "OMP_NUM_THREADS": str(args.threads),
        "PYTHONPATH": str(HERE),
        "TENSORBOARD_DIR": metrics,
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
    }
    os.environ.update(variables)
    ray.init(
        num_cpus=16,
        num_gpus=1,  # as verl asks for one; the machine has none
        object_store_memory=200 * 2**20,
        include_dashboard=False,
        runtime_env={
            "env_vars": variables,
            "worker_process_setup_hook": "grpo_verl_hook.run_on_cpu",
        },
    )
    sys.argv[1:] = overrides(args, readable_by_older(args.folder / "model", args.folder))
    from verl.trainer.main_ppo import main as train

    train()
    ray.shutdown()  # no line of a worker comes after ours
    events = EventAccumulator(metrics)
    events.Reload()
    num_samples = args.prompts * args.samples_per_prompt
    seconds = [event.value for event in events.Scalars("timing_s/step")]
    tokens = [event.value * num_samples for event in events.Scalars("response_length/mean")]
    assert len(seconds) == args.steps, f"{len(seconds)} of {args.steps} steps"
    print(json.dumps({"seconds": seconds[1:], "tokens": tokens[1:]}))


def overrides(args: argparse.Namespace, model: Path) -> list[str]:
    """Return options of verl for the workload, without reference model, critic and validation."""
    data = args.folder / "train.parquet"
    values = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": MAX_PROMPT_LEN,
        "data.max_response_length": args.max_len,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size": args.prompts,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": args.micro_batch,
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.optim.lr": args.lr,
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": args.samples_per_prompt,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.top_k": 0,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": args.micro_batch,
        "custom_reward_function.path": HERE / "grpo_reward.py",
        "custom_reward_function.name": "reward",
        "critic.strategy": "fsdp2",
        "hydra.run.dir": args.folder / "hydra",
        "trainer.logger": "[tensorboard]",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.total_training_steps": args.steps,
        "trainer.total_epochs": args.steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
    }
    return [f"{name}={value}" for name, value in values.items()]


def readable_by_older(model: Path, folder: Path) -> Path:
    """Return a folder with the model as transformers before version 5 reads it."""
    older = folder / "model_for_verl"
    older.mkdir(exist_ok=True)
    renamed = ("config.json", "tokenizer_config.json")
    for path in model.iterdir():
        if path.name not in renamed and not (older / path.name).exists():
            (older / path.name).symlink_to(path.resolve())
    config, tokenizer = (json.loads((model / name).read_text()) for name in renamed)
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    special = tokenizer.pop("extra_special_tokens", None)
    if isinstance(special, list):
        tokenizer["additional_special_tokens"] = special
    for name, values in zip(renamed, (config, tokenizer), strict=True):
        (older / name).write_text(json.dumps(values))
    return older


if __name__ == "__main__":
    main()
