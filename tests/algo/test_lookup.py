"""The functions that a recipe chooses, and what they need from a run together."""

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.algo import advantages as built_in_advantages
from mcore_rl.algo import lookup
from mcore_rl.algo.lookup import UserFile, advantage_of, loss_of, needs_of, user_file_of
from mcore_rl.algo.preferences import PAIR_LOSSES
from mcore_rl.algo.registry import Registry, advantages, losses
from mcore_rl.config import AlgorithmConfig, CorrectionConfig, KLConfig, PreferenceConfig
from tests.support.outcomes import outcomes_of

OWN_ADVANTAGE = """
from mcore_rl.algo.preferences import PAIR_LOSSES
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
    lookup._files.clear()
    lookup.register_user_file.cache_clear()


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
from mcore_rl.algo.preferences import PAIR_LOSSES
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
        (AlgorithmConfig(), {"others"}),
        (AlgorithmConfig(advantage="gae"), {"critic"}),
        (AlgorithmConfig(advantage="remax"), {"greedy_baseline"}),
        (AlgorithmConfig(advantage="gdpo"), {"parts", "others"}),
        (AlgorithmConfig(advantage="optimal_token_baseline"), {"sum_squares", "old_logprobs"}),
        (AlgorithmConfig(advantage="distillation"), {"teacher", "old_logprobs"}),
        (AlgorithmConfig(advantage="dpo"), {"pairs", "others", "old_logprobs", "reference"}),
        (
            AlgorithmConfig(advantage="dpo", preference=PreferenceConfig(loss="simpo")),
            {"pairs", "others", "old_logprobs"},
        ),
        (AlgorithmConfig(loss="kl_cov"), {"held_back", "others", "old_logprobs"}),
        (
            AlgorithmConfig(loss="clip_cov", advantage="gae"),
            {"held_back", "old_logprobs", "critic"},
        ),
        (AlgorithmConfig(kl=KLConfig(coef=0.1)), {"reference", "others"}),
        (
            AlgorithmConfig(kl=KLConfig(coef=0.1, in_reward=True)),
            {"reference", "others", "old_logprobs"},
        ),
        (AlgorithmConfig(kl=KLConfig(in_reward=True)), {"others"}),
        (AlgorithmConfig(correction=CorrectionConfig(weight="token")), {"others"}),
    ],
)
def test_needs_join_those_of_advantage_loss_and_kl(
    config: AlgorithmConfig, expected: set[str]
) -> None:
    assert needed(config) == expected


class Recording:
    """Options that note which of them are read."""

    def __init__(self, options: object, group: str, read: set[str]) -> None:
        self._options = options
        self._group = group
        self._read = read

    def __getattr__(self, name: str) -> Any:
        value, dotted = getattr(self._options, name), f"{self._group}.{name}"
        if is_dataclass(value):
            return Recording(value, dotted, self._read)
        self._read.add(dotted)
        return value


def read_by_loss(name: str) -> set[str]:
    read: set[str] = set()
    config: Any = Recording(AlgorithmConfig(), "algorithm", read)
    losses[name](config)
    pick = losses.needs(name).held_back
    if pick is not None:
        pick(torch.linspace(-1, 6, 10), config.covariance, 0)
    return read


def read_by_advantage(name: str) -> set[str]:
    read: set[str] = set()
    tokens_R = torch.linspace(-2, -1, 6)
    outcomes = replace(
        outcomes_of([(1.0, 0, 3), (0.0, 0, 3)]),
        parts=((1.0, torch.tensor([1.0, 0.0])),),
        greedy_N=torch.zeros(2),
        energy_R=tokens_R.abs(),
        values_R=tokens_R,
        logprobs_R=tokens_R,
        ref_logprobs_R=tokens_R,
        teacher_logprobs_R=tokens_R,
    )
    config: Any = Recording(AlgorithmConfig(), "algorithm", read)
    advantages[name](outcomes, config)
    return read


def read_by_pair_loss(name: str) -> set[str]:
    read: set[str] = set()
    config: Any = Recording(PreferenceConfig(), "algorithm.preference", read)
    PAIR_LOSSES[name](torch.ones(3), config)
    return read


READ_BEFORE = {"gae": {"algorithm.bootstrap_truncated"}}
"""Options of a function that decide what it is given, so it does not read them itself."""


@pytest.mark.parametrize(
    ("registry", "read_by"),
    [
        (losses, read_by_loss),
        (advantages, read_by_advantage),
        (PAIR_LOSSES, read_by_pair_loss),
    ],
)
def test_built_in_functions_declare_the_options_they_read(
    registry: Registry, read_by: Callable[[str], set[str]]
) -> None:
    special = {option for name in registry.names for option in registry.unread_by(name)}
    assert special
    for name in registry.names:
        read = read_by(name) | READ_BEFORE.get(name, set())
        assert read & special == special - set(registry.unread_by(name)), name
