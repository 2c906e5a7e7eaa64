"""A recipe is made of verl's configuration, and no option is lost on the way."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.translate.systems import write_recipe
from mcore_rl.tools.translate.translation import ForeignOptions
from mcore_rl.tools.translate.verl import translate_verl
from tests.agents.environments.foreign import needs_verl
from tests.tools.translate.accounts import changed, decided, told, values
from tests.tools.translate.verl_options import (
    KINDS,
    defaults_of,
    former_defaults_of,
    translate,
)


def check_all_accounted_for(defaults: Mapping[str, Any]) -> None:
    lost, unknown = [], []
    for name, default in defaults.items():
        try:
            translation = translate_verl(ForeignOptions({name: changed(default)}, is_whole=False))
        except ValueError as error:  # a text in the place of a number that is null
            assert default is None and str(error).startswith(f"{name}=")
            continue
        if name not in told(translation) and changed(default) is not False:
            lost.append(name)
        unknown += [d.source for d in translation.decisions if "no counterpart" in d.advice]
    assert not lost and not unknown


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_any_option_of_verl_is_accounted_for(kind: str, part: int) -> None:
    check_all_accounted_for(dict(list(defaults_of(kind).items())[part::4]))


@pytest.mark.parametrize("value", [False, None])
def test_options_that_are_off_or_null_are_named_too(value: bool | None) -> None:
    defaults = defaults_of("ppo_megatron_trainer")
    flags = [name for name, default in defaults.items() if isinstance(default, bool)]
    lost = []
    for name in flags:
        translation = translate_verl(ForeignOptions({name: value}, is_whole=False))
        if name not in told(translation) | {item.source for item in translation.unneeded}:
            lost.append(name)
    assert len(flags) > 100 and not lost


@needs_verl()
@pytest.mark.parametrize("kind", KINDS)
def test_options_that_verl_no_longer_has_are_accounted_for(kind: str) -> None:
    former = former_defaults_of(kind)
    assert former.keys() - defaults_of(kind).keys()
    check_all_accounted_for(former)


@pytest.mark.parametrize("kind", KINDS)
def test_verls_defaults_are_those_of_an_option_that_is_left_out(kind: str) -> None:
    whole = defaults_of(kind)
    megatron = {"actor_rollout_ref.actor.strategy": whole["actor_rollout_ref.actor.strategy"]}
    of_file = values(translate_verl(ForeignOptions(whole, is_whole=True)))
    of_nothing = values(translate_verl(ForeignOptions(megatron, is_whole=False)))
    for name in ("model.path", "data.train", "eval.data", "run.dir"):
        of_file.pop(name)
        of_nothing.pop(name)
    assert of_nothing == of_file


@given(data=st.data())
@settings(max_examples=30)
def test_any_changes_together_make_a_recipe_and_lose_nothing(data: st.DataObject) -> None:
    defaults = defaults_of("ppo_megatron_trainer")
    flags = sorted(name for name, value in defaults.items() if isinstance(value, bool))
    chosen = data.draw(st.lists(st.sampled_from(flags), unique=True, max_size=30))
    given_options = {name: changed(defaults[name]) for name in chosen}
    translation = translate_verl(ForeignOptions(given_options, is_whole=False))
    assert {name for name, value in given_options.items() if value} <= told(translation)


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_is_one_that_can_be_loaded(tmp_path: Path, kind: str) -> None:
    options = ForeignOptions(defaults_of(kind), is_whole=True)
    file = tmp_path / "made.yaml"
    file.write_text(write_recipe(translate_verl(options), "made"))
    config = load_recipe(str(file), [])
    assert config.algorithm.advantage == "gae" and config.critic.value_clip == 0.5
    assert config.rollout.engines == 4 and config.cluster.colocated


def test_what_nobody_knows_is_left_to_the_user() -> None:
    translation = translate(trainer__nonsense=3)
    assert "trainer.nonsense" in decided(translation)


def test_fields_of_megatron_that_a_recipe_refuses_are_told_with_the_reason() -> None:
    config = "actor_rollout_ref.actor.megatron.override_transformer_config"
    options = {f"{config}.moe_grouped_gemm": True, f"{config}.apply_rope_fusion": True}
    translation = translate_verl(ForeignOptions(options, is_whole=False))
    assert values(translation)["train.megatron.apply_rope_fusion"] is True
    assert "train.megatron.moe_grouped_gemm" not in values(translation)
    [advice] = [d.advice for d in translation.decisions if d.source.endswith("moe_grouped_gemm")]
    assert "grouped GEMM, which is always on" in advice
