"""How the engines of judge, reward model and teacher are started."""

from pathlib import Path

import pytest

from mcore_rl.cluster.served_engines import make_served_spec
from mcore_rl.config import ServedModelConfig
from tests.support.engine_keys import KEYS

CONFIG = ServedModelConfig(path="/model", tp=2, sglang={"schedule_policy": "lpm"})
LOG = Path("/logs/judge_0.log")


@pytest.mark.parametrize(
    ("role", "takes_text", "is_embedding"),
    [("judge", True, False), ("reward_model", False, True), ("teacher", False, False)],
)
def test_each_role_has_its_own_arguments(role: str, takes_text: bool, is_embedding: bool) -> None:
    spec = make_served_spec(role, CONFIG, LOG, KEYS, can_release_memory=False)
    assert (spec.model_path, spec.log_path, spec.tp) == ("/model", "/logs/judge_0.log", 2)
    assert spec.tokenizer == takes_text
    assert ("--is-embedding" in spec.extra_args) == is_embedding
    assert spec.extra_args[-2:] == ("--schedule-policy", "lpm")
    assert not spec.can_release_memory and "--enable-weights-cpu-backup" not in spec.extra_args


def test_an_engine_that_shares_gpus_keeps_its_weights_in_host_memory() -> None:
    spec = make_served_spec("teacher", CONFIG, LOG, KEYS, can_release_memory=True)
    assert spec.can_release_memory and "--enable-weights-cpu-backup" in spec.extra_args
