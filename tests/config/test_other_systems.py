"""A name of another system leads to the option of a recipe that the translation gives for it."""

import pytest

from mcore_rl.config.other_systems import LAST_PARTS, find_option
from mcore_rl.config.recipe import leaves, load_recipe
from mcore_rl.tools.translate.translation import ForeignOptions
from mcore_rl.tools.translate.verl import translate_verl
from tests.tools.translate.verl_options import defaults_of


def test_every_name_leads_to_an_option() -> None:
    assert set(LAST_PARTS.values()) <= set(leaves())
    assert find_option("--n-samples-per-prompt") == "rollout.samples_per_prompt"
    assert find_option("rollout.temperature") is None


def test_verls_names_lead_where_their_translation_does() -> None:
    defaults = defaults_of("ppo_megatron_trainer")
    differing = {}
    for part, ours in LAST_PARTS.items():
        names = [name for name in defaults if name.rpartition(".")[2] == part]
        lines = translate_verl(ForeignOptions({n: defaults[n] for n in names}, False)).lines
        given = {line.key for line in lines if set(line.sources) & set(names)}
        if given and ours not in given:
            differing[part] = (ours, given)
    # The trainer and the engines each have a tensor-parallel size.
    assert differing.keys() == {"tensor_model_parallel_size"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.n=8", "'rollout.n'. Did you mean 'rollout.samples_per_prompt', as other systems"),
        ("trainer.total_epochs=3", "'trainer.total_epochs'. Did you mean 'run.epochs'"),
        ("algorithm.use_kl_loss=true", "'algorithm.use_kl_loss'. Did you mean 'algorithm.kl.coef'"),
        ("algorithm=gspo", r"algorithm=<name> replaces a choice .* or add \+algorithm=<name>"),
    ],
)
def test_the_message_about_an_unknown_key_names_the_option(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("tiny_moe_grpo", [override])
