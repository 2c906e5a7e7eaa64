"""A recipe is made of NeMo-RL's configurations, and no option is lost on the way."""

from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.translate.nemo_rl import OTHER_LOOPS, translate_nemo_rl
from mcore_rl.tools.translate.systems import write_recipe
from mcore_rl.tools.translate.translation import ForeignOptions
from tests.tools.translate.accounts import changed, decided, told, values
from tests.tools.translate.peer_options import CONFIGS, NEMO, by_lane, nemo, whole_nemo

NUMBERS = {"ppo.adv_estimator.gae_lambda_value": 0.5}
"""Values of options that are null by default, and take numbers alone."""


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
@pytest.mark.parametrize("kind", NEMO)
def test_a_change_of_any_option_is_accounted_for(kind: str, part: int) -> None:
    lost = []
    unknown = []
    for name, default in list(NEMO[kind].items())[part::4]:
        value = NUMBERS.get(name, changed(default))
        translation = translate_nemo_rl(ForeignOptions({name: value}, is_whole=False))
        if name not in told(translation) and value is not False:
            lost.append(name)
        unknown += [d.source for d in translation.decisions if "no counterpart" in d.advice]
    assert not lost and not unknown


def test_the_defaults_are_those_of_an_option_that_is_left_out() -> None:
    of_file = values(translate_nemo_rl(ForeignOptions(NEMO["grpo"], is_whole=True)))
    of_nothing = values(nemo())
    for name in ("model.path", "run.dir"):
        of_file.pop(name)
        of_nothing.pop(name)
    same = {name: of_file.get(name) for name in of_nothing}
    assert of_nothing == same
    # These are given as they are, where a recipe's own default holds otherwise.
    further = {"rollout.temperature", "rollout.top_p", "data.shuffle", "eval.max_prompts"}
    assert set(of_file) - set(of_nothing) <= further


@pytest.mark.parametrize("name", by_lane(CONFIGS))
def test_examples_make_recipes_that_can_be_loaded(tmp_path: Path, name: str) -> None:
    options = whole_nemo(name)
    translation = translate_nemo_rl(options)
    assert not [d for d in translation.decisions if "no counterpart" in d.advice]
    file = tmp_path / "made.yaml"
    file.write_text(write_recipe(translation, "made"))
    config = load_recipe(str(file), [])
    assert config.rollout.samples_per_prompt == options.given["grpo.num_generations_per_prompt"]
    longest = config.data.max_prompt_len + config.rollout.max_response_len
    assert longest <= options.given["policy.max_total_sequence_length"]


@pytest.mark.parametrize(
    ("name", "model"),
    [("grpo-qwen3-30ba3b-8n8g-megatron-cp2-r3", "qwen3_30b_a3b")],
)
def test_the_plan_takes_the_recipe(tmp_path: Path, name: str, model: str) -> None:
    file = tmp_path / "made.yaml"
    file.write_text(write_recipe(translate_nemo_rl(whole_nemo(name)), "made"))
    assert main(["plan", f"recipe={file}", f"model.path=recipes/model/{model}"]) == 0


@pytest.mark.parametrize("loop", OTHER_LOOPS)
def test_other_loops_are_refused_with_what_there_is_instead(loop: str) -> None:
    with pytest.raises(ValueError, match=f"have a group `{loop}`: configurations with `grpo`"):
        translate_nemo_rl(ForeignOptions({f"{loop}.max_num_steps": 3}, is_whole=False))


def test_what_nobody_knows_is_left_to_the_user() -> None:
    assert "grpo.nonsense" in decided(nemo(grpo__nonsense=3))


def test_ppo_has_a_critic() -> None:
    given = {"ppo.ppo_epochs": 2, "value.megatron_cfg.optimizer.lr": 2e-6}
    found = values(translate_nemo_rl(ForeignOptions(given, is_whole=False)))
    assert found["algorithm.advantage"] == "gae" and found["critic.optimizer.lr"] == 2e-6
    assert found["train.epochs"] == found["critic.epochs"] == 2
    assert "critic.optimizer.lr" not in values(nemo())
