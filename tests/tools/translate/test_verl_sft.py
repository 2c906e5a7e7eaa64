"""verl's fine-tuning on answers becomes a recipe for `mcore-rl sft`."""

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.translate.hydra import SFT_CONFIG, read_options
from mcore_rl.tools.translate.systems import complete, write_recipe
from mcore_rl.tools.translate.translation import ForeignOptions, Translation
from mcore_rl.tools.translate.verl import translate_verl
from tests.tools.translate.accounts import changed, decided, told, values

LINE = [
    *("torchrun", "--nnodes=2", "--nproc-per-node", "8", "-m", "verl.trainer.sft_trainer"),
    *("data.train_files=/data/a.parquet", "data.train_batch_size=96", "data.max_length=2048"),
    *("data.max_token_len_per_gpu=4096", "engine=megatron", "optim=megatron", "model.path=/m"),
    *("optim.lr=2e-5", "optim.betas='[0.9,0.95]'", "optim.lr_decay_style=cosine"),
    *("engine.tensor_model_parallel_size=4", "engine.context_parallel_size=2"),
    "+engine.override_transformer_config.recompute_granularity=full",
    *("trainer.total_training_steps=50", "trainer.default_local_dir=/runs/a"),
]
DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_token_len_per_gpu": 8192,
    "data.use_dynamic_bsz": True,
    "data.train_files": "a.parquet",
    "data.val_files": None,
    "data.train_max_samples": -1,
    "data.val_max_samples": -1,
    "data.messages_key": "messages",
    "data.tools_key": "tools",
    "data.enable_thinking_key": "enable_thinking",
    "data.enable_thinking_default": "none",
    "data.pad_mode": "no_padding",
    "data.max_length": 1024,
    "data.truncation": "error",
    "data.balance_dp_token": False,
    "data.custom_cls.path": None,
    "data.custom_cls.name": None,
    "data.use_shm": False,
    "data.apply_chat_template_kwargs": {},
    "data.num_workers": 8,
    "data.ignore_input_ids_mismatch": False,
    "checkpoint.save_contents": ["model"],
    "checkpoint.load_contents": ["model"],
    "trainer.default_local_dir": "a",
    "trainer.default_hdfs_dir": None,
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "trainer.total_epochs": 4,
    "trainer.total_training_steps": 10,
    "trainer.logger": ["console", "wandb"],
    "trainer.seed": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_ckpt_to_keep": None,
    "trainer.balance_batch": True,
    "trainer.resume_mode": "auto",
    "trainer.resume_from_path": None,
    "trainer.device": "cuda",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.profile_interval": [-1, -1],
    "engine.model_dtype": "fp32",
    "engine.strategy": "fsdp",
    "engine.ulysses_sequence_parallel_size": 1,
    "engine.param_offload": False,
    "optim.lr": 1e-3,
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_scheduler_type": "constant",
    "optim.min_lr_ratio": 0.0,
    "optim.weight_decay": 0.01,
    "optim.clip_grad": 1.0,
    "optim.num_cycles": 0.5,
    "model.path": "m",
    "model.use_liger": False,
    "model.lora_rank": 0,
    "model.enable_gradient_checkpointing": True,
    "model.trust_remote_code": False,
}
"""Options of sft_trainer_engine.yaml of verl 0.9.1, with FSDP."""


def translate(*words: str) -> Translation:
    return complete(translate_verl(read_options([*LINE, *words])))


def test_the_recipe_has_the_groups_of_its_command(tmp_path: Path) -> None:
    translation = translate()
    file = tmp_path / "made.yaml"
    file.write_text(write_recipe(translation, "made"))
    config = load_recipe(str(file), [])
    assert translation.command == "sft" and config.run.dir == "/runs/a"
    assert (config.sft.steps, config.sft.batch_size, config.sft.max_len) == (50, 96, 2048)
    assert (config.parallel.tp, config.parallel.cp, config.parallel.dp) == (4, 2, 2)
    assert config.train.max_tokens_per_microbatch == 8192 and config.train.recompute == "full"
    optimizer = config.sft.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.schedule) == (2e-5, 0.9, "cosine")
    assert not any(line.key.startswith("train.optimizer") for line in translation.lines)
    assert {"data.truncation", "answers before the last one"} <= decided(translation)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["engine=fsdp", "engine.ulysses_sequence_parallel_size=2"], (1, 2, 8, 1)),
        (["engine=automodel", "engine.tp_size=2", "engine.ep_size=4"], (2, 1, 8, 4)),
    ],
)
def test_other_engines_give_their_sizes(words: list[str], sizes: tuple[int, ...]) -> None:
    line = [word for word in LINE if not word.lstrip("+").startswith(("engine", "optim"))]
    translation = complete(translate_verl(read_options([*line, *words])))
    found = values(translation)
    assert tuple(found.get(f"parallel.{name}", 1) for name in ("tp", "cp", "dp", "ep")) == sizes
    assert "engine" in decided(translation)


def test_passes_and_saves_without_a_number_are_left_to_the_user() -> None:
    words = [word for word in LINE if "total_training_steps" not in word]
    translation = complete(translate_verl(read_options([*words, "trainer.save_freq=after_epoch"])))
    assert {"trainer.total_epochs", "trainer.save_freq"} <= decided(translation)
    assert "sft.steps" not in values(translation)


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_change_of_any_option_is_accounted_for(name: str) -> None:
    given = {"engine": "fsdp", name: changed(DEFAULTS[name])}
    translation = translate_verl(ForeignOptions(given, False, SFT_CONFIG))
    unneeded = {item.source for item in translation.unneeded}
    assert name in told(translation) | unneeded and translation.command == "sft"
    assert not [d for d in translation.decisions if "no counterpart" in d.advice]


def test_options_alone_say_that_answers_are_given() -> None:
    assert translate_verl(ForeignOptions({"optim.lr": 1e-5}, False)).command == "sft"
    assert translate_verl(ForeignOptions({"data.max_length": 3}, False)).command == "train"
