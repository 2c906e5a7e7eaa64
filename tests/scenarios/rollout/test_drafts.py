"""Engines that speculate draw tokens as others do: with the policy's probabilities, each with its
log-prob and the version of weights that drew it.
"""

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from mcore_rl.rollout.drafts import read_counts, sum_counts
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.speculation import Speculation
from mcore_rl.types import DraftCount, WeightVersion
from tests.scenarios.agents.test_versions import (
    changes_of,
    errors_of,
    play_while_weights_change,
    rows_of,
    swapped_engine,
)
from tests.support.chi_square import fit_of_draws

pytestmark = pytest.mark.e2e

VOCAB_SIZE = 24
AT_ONCE = 64
RESPONSE_LEN = 250
LEAST_P_VALUE = 1e-4


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A model that likes to repeat itself, and where it is saved."""
    folder = tmp_path_factory.mktemp("drafts")
    torch.manual_seed(0)
    config = Qwen3Config(
        **{"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8},
        **{"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"initializer_range": 0.3, "max_position_embeddings": 512, "eos_token_id": 1},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.lm_head.weight.data.mul_(0.5)
    model.save_pretrained(folder / "model")
    return folder / "model", model


def start_engine(model: Path, *, when_faster: bool) -> EngineProcess:
    log_path = model.parent / f"{when_faster}.log"
    speculation = Speculation("ngram", 6, when_faster)
    return EngineProcess(EngineSpec(str(model), str(log_path), speculation=speculation))


@pytest.fixture(scope="module")
def served(written: tuple[Path, PreTrainedModel]) -> Iterator[tuple[str, PreTrainedModel]]:
    """The address of an engine, and its model."""
    with start_engine(written[0], when_faster=False) as engine:
        yield engine.url, written[1]


@pytest.fixture(scope="module")
def choosing(written: tuple[Path, PreTrainedModel]) -> Iterator[tuple[str, PreTrainedModel]]:
    """The same with an engine that guesses where it measures that guessing is faster."""
    with start_engine(written[0], when_faster=True) as engine:
        yield engine.url, written[1]


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def draw(url: str, num_samples: int, **sampling: Any) -> list[dict[str, Any]]:
    """Return the engine's answers to prompts of one and of three tokens."""
    parameters = {"max_new_tokens": RESPONSE_LEN, "ignore_eos": True, "temperature": 1.0}
    body = {
        "input_ids": [[2], [3, 4, 5]] * (num_samples // 2),
        "sampling_params": {**parameters, **sampling},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return post(f"{url}/generate", body)


@torch.no_grad()
def score(model: PreTrainedModel, answers: list[dict[str, Any]]) -> tuple[torch.Tensor, ...]:
    """Return the log-probs of all tokens [T, V] at each response token, the tokens, and the
    engine's log-probs of them.
    """
    logprobs, tokens, told = [], [], []
    for i, answer in enumerate(answers):
        prompt = [[2], [3, 4, 5]][i % 2]
        drawn = answer["output_ids"]
        logits = model(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1]
        logprobs.append(torch.log_softmax(logits.double(), -1))
        tokens.append(torch.tensor(drawn))
        entries = answer["meta_info"]["output_token_logprobs"]
        assert [entry[1] for entry in entries] == drawn
        told.append(torch.tensor([entry[0] for entry in entries], dtype=torch.float64))
    return torch.cat(logprobs), torch.cat(tokens), torch.cat(told)


def check_draws(served: tuple[str, PreTrainedModel], num_tokens: int) -> DraftCount:
    """Assert that tokens pass a chi-square test, and that none is drawn too often; return what the
    engine's passes did.
    """
    url, model = served
    answers = []
    while len(answers) * RESPONSE_LEN < num_tokens:
        answers += draw(url, AT_ONCE)
    logprobs_TV, token_T, told_T = score(model, answers)
    own_T = logprobs_TV.gather(1, token_T[:, None])[:, 0]
    assert (own_T - told_T).abs().max() < 1e-5

    p_value = fit_of_draws(logprobs_TV, token_T)
    probs_TV = logprobs_TV.exp()
    excess_V = torch.bincount(token_T, minlength=VOCAB_SIZE) - probs_TV.sum(0)
    deviation_V = excess_V / (probs_TV * (1 - probs_TV)).sum(0).sqrt()
    counted = sum_counts(*(read_counts(answer["meta_info"]) for answer in answers))
    count = counted[WeightVersion(0)]
    print(f"{p_value=}, {deviation_V=}, {count}, {len(token_T)}")
    assert p_value > LEAST_P_VALUE
    assert deviation_V.abs().max() < 4.5
    # Each answer's first token comes with its prompt, and its last pass may draw too many.
    drawn = count.checked + count.plain + count.accepted + len(answers)
    assert 0 <= drawn - len(token_T) <= 6 * len(answers)
    return count


@pytest.mark.parametrize("num_tokens", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_tokens_are_drawn_with_the_policys_probabilities(
    served: tuple[str, PreTrainedModel], num_tokens: int
) -> None:
    count = check_draws(served, num_tokens)
    assert count.plain == 0 and count.accepted > 0.2 * count.checked


def test_an_engine_guesses_where_that_is_faster(choosing: tuple[str, PreTrainedModel]) -> None:
    """Tokens are right while passes with and without drafts take turns to be measured, and
    afterwards.
    """
    count = check_draws(choosing, 10_000)
    assert min(count.checked, count.plain) > 500 and count.accepted > 0 and count.rated > 1000


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.6}, {"temperature": 0.0}])
def test_cut_distributions_have_no_other_tokens(
    served: tuple[str, PreTrainedModel], cut: dict[str, Any]
) -> None:
    url, model = served
    logprobs_TV, token_T, told_T = score(model, draw(url, 8, **cut))
    own_T = logprobs_TV.gather(1, token_T[:, None])
    assert (own_T[:, 0] - told_T).abs().max() < 1e-5
    likelier_TV = logprobs_TV > own_T + 1e-6
    if "top_p" in cut:
        assert ((likelier_TV * logprobs_TV.exp()).sum(1) < cut["top_p"]).all()
    else:
        assert (likelier_TV.sum(1) < cut.get("top_k", 1)).all()


def test_each_version_counts_its_own_passes(served: tuple[str, PreTrainedModel]) -> None:
    """The engine's weights get another name while it draws."""
    url, _ = served
    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(draw, url, 4)
        time.sleep(0.5)
        post(f"{url}/update_weight_version", {"new_version": "7", "abort_all_requests": False})
        answers = drawing.result()
    post(f"{url}/update_weight_version", {"new_version": "0", "abort_all_requests": False})
    for answer in answers:
        meta = answer["meta_info"]
        counts = read_counts(meta)
        first, second = meta["weight_versions"]
        old, new = counts[WeightVersion(0)], counts[WeightVersion(7)]
        assert first["end"] - first["start"] == 1 + old.checked + old.accepted
        assert 0 <= new.checked + new.accepted - (second["end"] - second["start"]) <= 6


@pytest.mark.slow
def test_a_swap_of_weights_leaves_each_token_its_version(tmp_path: Path) -> None:
    """Weights change inside answers, whose rest is drawn by the new ones."""
    with swapped_engine(tmp_path, top_k=8, speculation=Speculation("ngram", 4)) as swapped:
        episodes = play_while_weights_change(swapped, 20, seed=1)
        rows = rows_of(episodes)
        changes, errors = changes_of(rows), errors_of(swapped, rows)
    print(f"{swapped.version} syncs, {changes}, {errors}")
    assert changes["inside"] > 5
    assert errors["named"] < 1e-4 < 0.01 < errors["other"]
