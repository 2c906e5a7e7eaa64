"""The parts of a recipe that collectors are built of."""

import pickle
from typing import Any

import pytest

from mcore_rl.config import Config, ModelConfig, RewardConfig
from mcore_rl.process import redaction
from mcore_rl.run.rollouts import collector_spec
from mcore_rl.tasks.arithmetic import make_tokenizer
from mcore_rl.weights.hf.config import ModelFacts
from tests.support.samples import make_sample

POLICY = ModelFacts.read("recipes/model/qwen3_30b_a3b")
CONFIG = Config(
    model=ModelConfig(path="somewhere"),
    reward=RewardConfig(path="recipes/rewards/arithmetic.py"),
)


def test_a_collector_gets_what_it_needs_to_decode_score_and_stay_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redaction, "_known", {"planted-secret"})
    tokenizer = make_tokenizer()
    spec = pickle.loads(pickle.dumps(collector_spec(CONFIG, POLICY, tokenizer)))
    assert spec.stop_token_ids == (tokenizer.eos_token_id,)
    ids = tokenizer("Jon has 18 books")["input_ids"]
    assert spec.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
    assert spec.make_scorer()([make_sample(1, "2")]).rewards_N == [1.0]
    assert spec.experts_shape.num_experts == POLICY.num_experts
    assert spec.secrets == ("planted-secret",) and "planted" not in repr(spec)


def test_a_tokenizer_without_an_end_is_refused() -> None:
    tokenizer: Any = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="somewhere has no eos_token: responses would never stop"):
        collector_spec(CONFIG, POLICY, tokenizer)
