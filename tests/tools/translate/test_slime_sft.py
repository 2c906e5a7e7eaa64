"""slime's fine-tuning on given answers becomes a recipe for `mcore-rl sft`."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.translate.slime import translate_slime
from mcore_rl.tools.translate.slime_sft import SFT_ROLLOUT
from mcore_rl.tools.translate.systems import complete, write_recipe
from mcore_rl.tools.translate.translation import ForeignOptions, Translation
from tests.tools.translate.accounts import decided, told, values
from tests.tools.translate.peer_options import SLIME, slime

SFT: dict[str, Any] = {
    "rollout_function_path": SFT_ROLLOUT,
    "loss_type": "sft_loss",
    "prompt_data": "/data/a.parquet",
    "input_key": "messages",
    "rollout_shuffle": True,
    "calculate_per_token_loss": True,
    "num_epoch": 3,
    "rollout_batch_size": 128,
    "global_batch_size": 32,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 9216,
    "context_parallel_size": 2,
    "lr": 1e-5,
    "lr_decay_style": "cosine",
    "debug_train_only": True,
}


def sft(**given: Any) -> Translation:
    return complete(slime("train_async.py", **{**SFT, **given}))


def test_the_recipe_has_the_groups_of_its_command(tmp_path: Path) -> None:
    translation = sft()
    file = tmp_path / "made.yaml"
    file.write_text(write_recipe(translation, "made"))
    config = load_recipe(str(file), [])
    assert translation.command == "sft"
    assert (config.sft.batch_size, config.sft.max_len) == (32, 18432)
    assert config.sft.data == ["/data/a.parquet"] and config.sft.optimizer.schedule == "cosine"
    assert config.sft.optimizer.lr == 1e-5 and config.train.max_tokens_per_microbatch == 18432
    groups = {line.key.partition(".")[0] for line in translation.lines}
    assert not groups & {"rollout", "algorithm", "reward", "eval", "data"}
    assert not any(line.key.startswith("train.optimizer") for line in translation.lines)


@pytest.mark.parametrize("given", [{"loss_type": None}, {"rollout_function_path": None}])
def test_the_loss_and_the_rollout_each_say_so(given: dict[str, Any]) -> None:
    assert sft(**given).command == "sft"
    assert slime().command == "train"


def test_steps_are_those_of_the_optimizer(tmp_path: Path) -> None:
    assert values(sft(num_epoch=None, num_rollout=10))["sft.steps"] == 40
    assert "--num-epoch" in decided(sft()) and "sft.steps" not in values(sft())
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"messages": list(range(100))}), path)
    assert values(sft(prompt_data=str(path)))["sft.steps"] == 9


def test_what_differs_is_told() -> None:
    assert {"--loss-mask-type", "--rollout-max-context-len"} <= decided(sft())
    advice = {d.source: d.advice for d in sft(lr_warmup_fraction=0.1).decisions}
    assert "set sft.optimizer.warmup_steps" in advice["--lr-warmup-fraction"]
    assert "sft.steps" in advice["--num-epoch"] and "`mcore-rl sft " in advice["kind of GPU"]
    for given in (
        {"input_key": "conversations"},
        {"rollout_shuffle": None},
        {"calculate_per_token_loss": False},
        {"tool_key": "functions"},
        {"multimodal_keys": {"image": "pictures"}},
    ):
        [name] = given
        assert f"--{name.replace('_', '-')}" in decided(sft(**given))
    assert values(sft(rollout_max_context_len=4096))["sft.max_len"] == 4096


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_a_change_of_any_option_is_accounted_for(part: int) -> None:
    base = {f"--{name.replace('_', '-')}": value for name, value in SFT.items()}
    unchanged = {"--loss-type", "--rollout-function-path"}
    options = {name: value for group in SLIME.values() for name, value in group.items()}
    lost = []
    unknown = []
    for name, value in list(options.items())[part::4]:
        if name in unchanged:
            continue
        translation = translate_slime(ForeignOptions({**base, name: value}, is_whole=False))
        if name not in told(translation) | {item.source for item in translation.unneeded}:
            lost.append(name)
        assert translation.command == "sft"
        unknown += [d.source for d in translation.decisions if "no counterpart" in d.advice]
    assert not lost and not unknown
