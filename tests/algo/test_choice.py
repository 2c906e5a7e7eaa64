"""The functions that a recipe chooses, and what they need from a run together."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.algo import advantages as built_in_advantages
from mcore_rl.algo import choice, user_file
from mcore_rl.algo.choice import advantage_of, loss_of, needs_of, user_file_of
from mcore_rl.algo.registry import advantages, losses
from mcore_rl.algo.user_file import UserFile
from mcore_rl.config import AlgorithmConfig, CorrectionConfig, KLConfig, PreferenceConfig

OWN_ADVANTAGE = """
from mcore_rl.algo.registry import Needs, advantages
@advantages.register("of_the_file", Needs(critic=True))
def own(outcomes, config): ...
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Iterator[Path]:
    """A user's file; what it registers is forgotten after the test."""
    path = tmp_path / "mine.py"
    path.write_text(OWN_ADVANTAGE)
    before = [(registry, registry.names) for registry in (advantages, losses)]
    yield path
    for registry, names in before:
        registry.keep_only(names)
    choice._read_once.cache_clear()
    user_file.register_user_file.cache_clear()


def test_functions_are_found_by_the_names_in_the_recipe() -> None:
    config = AlgorithmConfig(advantage="gae", loss="sapo")
    assert user_file_of(config) is None
    assert advantage_of(config) is advantages["gae"]
    assert advantage_of(config).__module__ == built_in_advantages.__name__
    assert loss_of(config, None) is losses["sapo"]


def test_an_unknown_name_is_refused_with_its_option() -> None:
    with pytest.raises(ValueError, match=r"^algorithm.advantage='gea' \(did you mean 'gae'\?\)"):
        advantage_of(AlgorithmConfig(advantage="gea"))
    with pytest.raises(ValueError, match=r"^algorithm.loss='sapp' \(did you mean 'sapo'\?\)"):
        loss_of(AlgorithmConfig(loss="sapp"), None)


def test_a_users_file_adds_choices_and_is_read_once(own_file: Path) -> None:
    config = AlgorithmConfig(path=str(own_file), advantage="of_the_file", kl=KLConfig(coef=0.1))
    assert needed(config) == {"critic", "reference"}
    assert advantage_of(config).__name__ == "own"
    own_file.write_text("edited during the run")
    assert user_file_of(config) == UserFile(str(own_file), OWN_ADVANTAGE)


def test_a_rank_uses_the_file_that_the_controller_read(own_file: Path) -> None:
    source = """
from mcore_rl.algo.registry import losses
@losses.register("of_the_controller")
def own(config): ...
"""
    config = AlgorithmConfig(path="/only/there.py", loss="of_the_controller")
    assert loss_of(config, UserFile("/only/there.py", source)).__name__ == "own"


def needed(config: AlgorithmConfig) -> set[str]:
    return {name for name, value in vars(needs_of(config)).items() if value}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AlgorithmConfig(), set()),
        (AlgorithmConfig(advantage="gae"), {"critic"}),
        (AlgorithmConfig(advantage="remax"), {"greedy_baseline"}),
        (AlgorithmConfig(advantage="gdpo"), {"parts"}),
        (AlgorithmConfig(advantage="optimal_token_baseline"), {"sum_squares", "old_logprobs"}),
        (AlgorithmConfig(advantage="distillation"), {"teacher", "old_logprobs"}),
        (AlgorithmConfig(advantage="dpo"), {"pairs", "old_logprobs", "reference"}),
        (
            AlgorithmConfig(advantage="dpo", preference=PreferenceConfig(loss="simpo")),
            {"pairs", "old_logprobs"},
        ),
        (AlgorithmConfig(loss="kl_cov"), {"held_back", "old_logprobs"}),
        (
            AlgorithmConfig(loss="clip_cov", advantage="gae"),
            {"held_back", "old_logprobs", "critic"},
        ),
        (AlgorithmConfig(kl=KLConfig(coef=0.1)), {"reference"}),
        (AlgorithmConfig(kl=KLConfig(coef=0.1, in_reward=True)), {"reference", "old_logprobs"}),
        (AlgorithmConfig(kl=KLConfig(in_reward=True)), set()),
        (AlgorithmConfig(correction=CorrectionConfig(weight="token")), set()),
    ],
)
def test_needs_join_those_of_advantage_loss_and_kl(
    config: AlgorithmConfig, expected: set[str]
) -> None:
    assert needed(config) == expected
