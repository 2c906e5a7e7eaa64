"""Engines that guess with a layer report the experts of a plain pass, of accepted tokens, too."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.rollout.drafts import read_counts
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.request import RoutedExpertsShape
from mcore_rl.rollout.speculation import Speculation
from mcore_rl.weights.hf.config import ModelFacts
from tests.scenarios.train.test_draft_acceptance import PROMPT_LEN, train
from tests.support.distributed import run_ranks
from tests.support.tiny_mtp import write_mtp_model
from tests.support.tiny_training import VOCAB, make_actor

RESPONSE_LEN = 40
PROMPTS = [[(first + k) % VOCAB for k in range(PROMPT_LEN)] for first in range(0, VOCAB, 5)]


def learn_to_count(rank: int, world_size: int, port: int, begun: Path, trained: Path) -> None:
    optimizer = OptimizerConfig(lr=1e-2, clip_grad=1.0)
    model = ModelConfig(path=str(begun))
    actor = make_actor(rank, world_size, port, model, ParallelConfig(), optimizer, mtp_loss=0.3)
    train(actor, 0, 50)
    actor.export_hf(trained)


def ask(url: str, ids: list[list[int]], num_tokens: int) -> list[Any]:
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
        "return_routed_experts": True,
    }
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("deepseek_v3", {}), ("glm4_moe", {"first_k_dense_replace": 0}), ("qwen3_next", {})],
    ids=["dense_first", "experts_first", "delta_nets"],
)
def test_experts_of_accepted_tokens_are_those_of_a_plain_pass(
    tmp_path: Path, kind: str, changes: dict[str, int]
) -> None:
    folder = tmp_path / "trained"
    begun = write_mtp_model(kind, tmp_path / "begun", **changes)
    run_ranks(learn_to_count, 1, begun, folder, timeout_s=300)
    policy = ModelFacts.read(folder)
    shape = RoutedExpertsShape(policy.moe_layers, policy.experts_per_token, policy.num_experts)

    def experts_of(answer: Any, num_tokens: int) -> Tensor:
        told = shape.decode(answer["meta_info"]["routed_experts"], num_tokens, "a request")
        assert told is not None
        return told

    spec = EngineSpec(
        str(folder),
        str(tmp_path / "log"),
        routed_experts=True,
        speculation=Speculation("mtp", 2, when_faster=False),
    )
    with EngineProcess(spec) as engine:
        drawn = ask(engine.url, PROMPTS, RESPONSE_LEN)
        whole = [
            prompt + answer["output_ids"] for prompt, answer in zip(PROMPTS, drawn, strict=True)
        ]
        post_flush(engine.url)
        scored = ask(engine.url, whole, 1)
    counts = (read_counts(answer["meta_info"]).values() for answer in drawn)
    accepted = sum(count.accepted for each in counts for count in each)
    assert accepted > 0.2 * RESPONSE_LEN * len(PROMPTS)
    for ids, guessed, plain in zip(whole, drawn, scored, strict=True):
        num_run = len(ids) - 1  # the last drawn token has not been run
        assert torch.equal(experts_of(guessed, num_run), experts_of(plain, len(ids))[:num_run])


def post_flush(url: str) -> None:
    """Forget the cache, so that tokens are computed in one pass."""
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/flush_cache", b"", method="POST"), timeout=60
    ) as response:
        response.read()
