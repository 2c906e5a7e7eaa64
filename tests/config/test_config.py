"""The whole tree: its parts are checked under their names, and found by role or group."""

from typing import get_type_hints

import pytest

from mcore_rl import config as package
from mcore_rl.config import (
    ClusterConfig,
    Config,
    CriticConfig,
    DriftConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    RolloutConfig,
    ServedModelConfig,
    TrainConfig,
)
from mcore_rl.config.bounds import Options, is_group
from mcore_rl.config.tree import value_of


def groups_of(cls: type, wanted: type, prefix: str = "") -> set[str]:
    """Return the dotted names of all groups of the class `wanted` under `cls`."""
    names = set()
    for name, kind in get_type_hints(cls).items():
        if kind is wanted:
            names.add(prefix + name)
        elif is_group(kind):
            names |= groups_of(kind, wanted, f"{prefix}{name}.")
    return names


def test_every_configuration_class_can_be_imported_from_the_package() -> None:
    classes = {
        name
        for name, value in vars(package).items()
        if isinstance(value, type) and issubclass(value, Options) and value is not Options
    }
    assert classes == set(package.__all__)


def test_all_optimizers_are_listed_by_the_names_of_their_groups() -> None:
    config = Config()
    assert config.optimizers.keys() == groups_of(Config, OptimizerConfig)
    for name, optimizer in config.optimizers.items():
        assert optimizer is value_of(config, name)


def test_served_models_are_those_that_the_recipe_uses() -> None:
    config = Config(teacher=ServedModelConfig(path="/t"))
    assert config.served_groups.keys() == groups_of(Config, ServedModelConfig)
    assert config.served_models == {"teacher": config.teacher}
    assert Config().served_models == {}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"parallel": ParallelConfig(vpp=2)}, "^parallel.vpp=2"),
        ({"critic": CriticConfig(parallel=ParallelConfig(vpp=2))}, "^critic.parallel.vpp=2"),
        ({"teacher": ServedModelConfig(path="/t", url="u")}, "^teacher.path=/t with teacher.url=u"),
        ({"rollout": RolloutConfig(quantization="fp8")}, "^rollout.quantization=fp8 with"),
        (
            {
                "train": TrainConfig(router_replay="engine"),
                "drift": DriftConfig(routed_experts=False),
            },
            "^train.router_replay=engine with",
        ),
        (
            {"judge": ServedModelConfig(path="/j", colocated=True, restarts=0, tp=2)},
            "^judge.colocated=true with",
        ),
        ({"profile": ProfileConfig(steps=[3, 0])}, r"^profile.steps=\[3, 0\]: steps are counted"),
        (
            {"profile": ProfileConfig(steps=[3], ranks=[0, 1])},
            r"^profile.ranks=\[0, 1\]: there are 1 trainer ranks, counted from 0; 1 is none",
        ),
        ({"train": TrainConfig(mini_batches=7)}, "not divisible by train.mini_batches=7"),
        ({"cluster": ClusterConfig(colocated=True)}, "^cluster.colocated=true with rollout.stage"),
        ({"rollout": RolloutConfig(max_rounds=9)}, "^rollout.max_rounds=9 with .* no use for it"),
    ],
)
def test_the_tree_is_checked_as_a_whole(groups: dict[str, Options], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**groups)  # type: ignore[arg-type]


def test_what_one_group_forbids_another_may_allow() -> None:
    fp8 = RolloutConfig(quantization="fp8")
    assert Config(rollout=fp8, model=ModelConfig(dtype="bfloat16")).rollout is fp8
