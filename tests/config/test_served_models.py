"""Models served beside the policy: engines or a running server, and what goes with which."""

from typing import Any

import pytest

from mcore_rl.config.rollout import ServedModelConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"path": "/a", "url": "http://b"},
            "judge.path=/a with judge.url=http://b: .* leave one empty",
        ),
        ({"path": "/a", "tp": 3, "ep": 2}, "judge.ep=2 does not divide judge.tp=3"),
        ({"path": "/a", "api_key_env": "KEY"}, "judge.api_key_env=KEY: .* belongs to judge.url"),
        ({"path": "/a", "url_model": "m"}, "judge.url_model=m: .* belongs to judge.url"),
        (
            {"path": "/a", "colocated": True},
            "judge.colocated=true with .* judge.restarts=3: .* set judge.path and judge.restarts=0",
        ),
        (
            {"url": "http://b", "colocated": True, "restarts": 0},
            "judge.colocated=true with judge.url='http://b'",
        ),
    ],
)
def test_options_that_contradict_one_another_are_refused_by_their_group(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ServedModelConfig(**options).check("judge")


@pytest.mark.parametrize(
    ("options", "is_used", "is_colocated"),
    [
        ({}, False, False),
        ({"path": "/a", "tp": 4, "ep": 2}, True, False),
        ({"url": "http://b", "url_model": "m", "api_key_env": "KEY"}, True, False),
        ({"path": "/a", "colocated": True, "restarts": 0}, True, True),
        ({"colocated": True, "restarts": 0}, False, False),
    ],
)
def test_a_model_with_a_path_or_a_url_is_used(
    options: dict[str, Any], is_used: bool, is_colocated: bool
) -> None:
    model = ServedModelConfig(**options)
    model.check("judge")
    assert (model.is_used, model.is_colocated) == (is_used, is_colocated)


def test_an_engine_has_a_gpu_for_each_of_its_ranks() -> None:
    assert ServedModelConfig(engines=5, tp=4, ep=2, pp=3).engine_ranks == 12
