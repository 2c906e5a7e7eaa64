"""A recipe is made of slime's options, and none is lost on the way."""

from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config.recipe import load_recipe
from mcore_rl.config.upstream.fields import SERVER, read_fields
from mcore_rl.tools.translate.slime import translate_slime
from mcore_rl.tools.translate.slime_script import read_slime
from mcore_rl.tools.translate.slime_unneeded import reason_of
from mcore_rl.tools.translate.systems import complete, write_recipe
from mcore_rl.tools.translate.translation import ForeignOptions, RecipeLine, says, translate_flags
from tests.tools.translate.accounts import decided, told, values
from tests.tools.translate.peer_options import SCRIPTS, SLIME, by_lane, slime


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
@pytest.mark.parametrize("group", SLIME)
def test_a_change_of_any_option_is_accounted_for(group: str, part: int) -> None:
    lost = []
    unknown = []
    for name, value in list(SLIME[group].items())[part::4]:
        translation = translate_slime(ForeignOptions({name: value}, is_whole=False))
        if name not in told(translation):
            lost.append(name)
        unknown += [d.source for d in translation.decisions if "no counterpart" in d.advice]
    assert not lost and not unknown


def test_every_option_of_sglang_is_handed_on_or_has_a_reason() -> None:
    names = [f"--sglang-{name.replace('_', '-')}" for name in read_fields(SERVER)]
    options = ForeignOptions(dict.fromkeys(names, 3), is_whole=False)
    lines = [item for item in translate_flags(options, reason_of) if isinstance(item, RecipeLine)]
    passed = {name for line in lines for name in line.sources}
    assert len(passed) > 300
    assert all(reason_of(name) is not None for name in set(names) - passed)


@pytest.mark.parametrize("name", by_lane(SCRIPTS))
def test_scripts_of_slime_make_recipes_that_can_be_loaded(tmp_path: Path, name: str) -> None:
    options = read_slime(SCRIPTS[name])
    translation = translate_slime(options)
    given = {name for name, value in options.given.items() if says(value)}
    assert given <= told(translation) | {item.source for item in translation.unneeded}
    assert not [d for d in translation.decisions if "no counterpart" in d.advice]
    file = tmp_path / "made.yaml"
    file.write_text(write_recipe(complete(translation), "made"))
    config = load_recipe(str(file), [])
    if translation.command == "sft":
        assert config.sft.batch_size == options.given["--global-batch-size"]
        assert config.sft.optimizer.lr == options.given["--lr"]
    else:
        assert config.rollout.prompts_per_step == options.given["--rollout-batch-size"]
    assert config.parallel.tp == options.given["--tensor-model-parallel-size"]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("run-moonlight-16B-A3B", "moonlight_16b_a3b"),
        pytest.param("run-deepseek-r1", "deepseek_v3", marks=pytest.mark.slow),
    ],
)
def test_the_plan_takes_the_recipe(tmp_path: Path, name: str, model: str) -> None:
    file = tmp_path / "made.yaml"
    file.write_text(write_recipe(translate_slime(read_slime(SCRIPTS[name])), "made"))
    # 1: it does not fit the GPUs, as slime's script, which moves the optimizer to the host.
    assert main(["plan", f"recipe={file}", f"model.path=recipes/model/{model}"]) in (0, 1)


def test_what_nobody_knows_is_left_to_the_user() -> None:
    assert "--nonsense" in decided(slime(nonsense=3))


def test_options_that_the_script_computes_are_named() -> None:
    computed = {"--lr": "$(cat lr)", "--moe-layer-freq": "$FREQ"}
    translation = translate_slime(ForeignOptions({}, False, "train.py", computed))
    assert "--lr" in decided(translation) and "--moe-layer-freq" not in decided(translation)
    [decision] = [d for d in translation.decisions if d.source == "--lr"]
    assert decision.value == "$(cat lr)" and "computes it" in decision.advice


def test_variables_that_nobody_set_are_named() -> None:
    folder = {"--hf-checkpoint": "${BASE_FOLDER}/models/$MODEL_NAME"}
    translation = translate_slime(ForeignOptions({}, False, "train.py", folder))
    [decision] = [d for d in translation.decisions if "--hf-checkpoint" in d.source]
    assert decision.advice.startswith("set BASE_FOLDER and MODEL_NAME where this is run")


def test_fields_of_megatron_that_a_recipe_refuses_are_told_with_the_reason() -> None:
    translation = slime(optimizer_cpu_offload=True, use_precision_aware_optimizer=True)
    assert values(translation)["train.optimizer.megatron.use_precision_aware_optimizer"] is True
    [advice] = [d.advice for d in translation.decisions if d.source == "--optimizer-cpu-offload"]
    assert "copies that it keeps on the host" in advice
