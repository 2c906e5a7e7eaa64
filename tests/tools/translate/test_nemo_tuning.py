"""NeMo-RL's fine-tuning on answers and on pairs becomes recipes for `mcore-rl sft` and `dpo`."""

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.translate.nemo_rl import translate_nemo_rl
from mcore_rl.tools.translate.systems import complete, write_recipe
from mcore_rl.tools.translate.translation import ForeignOptions, Translation
from tests.tools.translate.accounts import changed, decided, told, values
from tests.tools.translate.peer_options import NEMO

OF_LOOP: dict[str, dict[str, Any]] = {
    "sft": {
        "max_num_epochs": 1,
        "max_num_steps": 60,
        "val_period": 10,
        "val_batches": 8,
        "val_global_batch_size": 32,
        "val_micro_batch_size": 1,
        "val_at_start": True,
        "val_at_end": False,
        "seed": 42,
        "only_unmask_final": False,
    },
    "dpo": {
        "max_num_epochs": 1,
        "max_num_steps": 150,
        "val_period": 25,
        "val_batches": 8,
        "val_global_batch_size": 8,
        "val_micro_batch_size": 1,
        "val_at_start": True,
        "val_at_end": False,
        "seed": 42,
        "reference_policy_kl_penalty": 0.05,
        "preference_average_log_probs": False,
        "sft_average_log_probs": False,
        "preference_loss": "dpo",
        "gt_reward_scale": 1.0,
        "preference_loss_weight": 1,
        "sft_loss_weight": 0,
    },
}
"""The options of each loop and their values in NeMo-RL's own configurations."""
SHARED = {
    name: value
    for name, value in NEMO["grpo"].items()
    if name.partition(".")[0] in ("policy", "data", "checkpointing", "logger", "cluster")
}
FILES = {"data.train.data_path": "/data/a.jsonl", "data.validation.data_path": "/data/b.jsonl"}


def whole(loop: str) -> dict[str, Any]:
    return {**SHARED, **{f"{loop}.{name}": value for name, value in OF_LOOP[loop].items()}}


def translate_loop(loop: str, **given: Any) -> Translation:
    options = {name.replace("__", "."): value for name, value in given.items()}
    options = {**whole(loop), **options}
    return complete(translate_nemo_rl(ForeignOptions(options, is_whole=True)))


def load(folder: Path, translation: Translation) -> Config:
    file = folder / "made.yaml"
    file.write_text(write_recipe(translation, "made"))
    return load_recipe(str(file), [])


def test_answers_make_a_recipe_for_sft(tmp_path: Path) -> None:
    size = {"policy__train_global_batch_size": 48, "policy__max_total_sequence_length": 2048}
    translation = translate_loop("sft", **size, data__train__data_path="/data/a.jsonl")
    config = load(tmp_path, translation)
    assert translation.command == "sft" and config.sft.data == ["/data/a.jsonl"]
    assert (config.sft.steps, config.sft.batch_size, config.sft.max_len) == (60, 48, 2048)
    assert config.sft.optimizer.lr == SHARED["policy.optimizer.kwargs.lr"]
    groups = {line.key.partition(".")[0] for line in translation.lines}
    assert not groups & {"rollout", "algorithm", "reward", "eval"}
    assert {"sft.only_unmask_final", "sft.max_num_epochs"} <= decided(translation)
    assert "sft.only_unmask_final" not in decided(
        translate_loop("sft", sft__only_unmask_final=True)
    )


def test_pairs_make_a_recipe_for_dpo(tmp_path: Path) -> None:
    given = {"dpo__preference_loss": "ipo", "dpo__sft_loss_weight": 0.5, "dpo__val_period": 5}
    paths = {name.replace(".", "__"): path for name, path in FILES.items()}
    config = load(tmp_path, translate_loop("dpo", **given, **paths))
    preference = config.algorithm.preference
    assert (preference.loss, preference.beta, preference.nll_coef) == ("ipo", 0.05, 0.5)
    assert config.dpo.data == ["/data/a.jsonl"] and config.dpo.held_out == ["/data/b.jsonl"]
    assert config.dpo.steps == 150 and config.eval.every_steps == 5
    assert "dpo.sft_average_log_probs" in decided(translate_loop("dpo", **given))
    assert "dpo.preference_loss" in decided(translate_loop("dpo", dpo__preference_loss="rpo_sq"))
    assert "dpo.preference_loss_weight" in decided(
        translate_loop("dpo", dpo__preference_loss_weight=2)
    )
    assert values(translate_loop("dpo"))["dpo.data"] == [], "a set that has a name is no file"


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
@pytest.mark.parametrize("loop", OF_LOOP)
def test_a_change_of_any_option_is_accounted_for(loop: str, part: int) -> None:
    lost = []
    unknown = []
    base = {f"{loop}.max_num_steps": 7}
    for name, default in list(whole(loop).items())[part::4]:
        given = {**base, name: changed(default)}
        translation = translate_nemo_rl(ForeignOptions(given, is_whole=False))
        unneeded = {item.source for item in translation.unneeded}
        if name not in told(translation) | unneeded and given[name] is not False:
            lost.append(name)
        assert translation.command == loop
        unknown += [d.source for d in translation.decisions if "no counterpart" in d.advice]
    assert not lost and not unknown
