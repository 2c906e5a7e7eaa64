"""The JSON body of a request, and the Sample in its answer."""

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.rollout.indexer_topk import IndexerTopkShape
from mcore_rl.rollout.request import (
    EngineAffinity,
    Request,
    RoutedExpertsShape,
    Sampling,
    make_body,
    make_sample,
    sample_seed,
)
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion
from tests.support.fake_sglang import sampled_answer

REQUEST = Request(Prompt(7, (3, 4, 5), (), "unit", None), 2, EngineAffinity(4))
SAMPLING = Sampling(max_response_len=3, temperature=0.7, top_p=0.9, top_k=5)


def decode(token_ids: Any) -> str:
    return " ".join(map(str, token_ids))


def answer(**changes: Any) -> dict[str, Any]:
    return sampled_answer(make_body(REQUEST, SAMPLING, []), version=6, **changes)


def test_the_body_holds_prompt_and_sampling() -> None:
    body = make_body(REQUEST, SAMPLING, stop_token_ids=(1, 2))
    assert body == {
        "input_ids": (3, 4, 5),
        "sampling_params": {
            "max_new_tokens": 3,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "stop_token_ids": [1, 2],
        },
        "return_logprob": True,
        "return_routed_experts": False,
    }
    seeded = make_body(REQUEST, replace(SAMPLING, seed=11), [])
    assert seeded["sampling_params"]["sampling_seed"] == sample_seed(11, 7, 2)
    assert make_body(replace(REQUEST, adapter="base"), SAMPLING, ())["lora_path"] == "base"


def test_an_answer_becomes_a_sample() -> None:
    spans = [{"start": 0, "end": 1, "version": "6"}, {"start": 1, "end": 3, "version": "8"}]
    sample = make_sample(REQUEST, answer(weight_versions=spans), decode, None)
    assert (sample.prompt, sample.sample_index) == (REQUEST.prompt, 2)
    assert sample.response_ids == (10, 11, 12) and sample.text == "10 11 12"
    assert sample.logprobs == (-0.5, -1.5, -2.5)
    assert sample.finish_reason == "length"
    assert sample.versions == (
        VersionSpan(0, 1, WeightVersion(6)),
        VersionSpan(1, 3, WeightVersion(8)),
    )
    assert sample.routed_experts is None


def test_experts_are_of_all_tokens_that_the_engine_ran() -> None:
    """Three prompt tokens and two of three response tokens: the last was drawn but not run."""
    shape = RoutedExpertsShape((True,), top_k=1, num_experts=4)
    experts = np.array([0, 1, 2, 3, 0], dtype=np.int32)
    encoded = base64.b64encode(experts.tobytes()).decode()
    sample = make_sample(REQUEST, answer(routed_experts=encoded), decode, shape)
    assert sample.routed_experts is not None
    assert sample.routed_experts.flatten().tolist() == experts.tolist()
    with pytest.raises(ValueError, match="prompt 7 of 'unit', sample 2: the engine did not tell"):
        make_sample(REQUEST, answer(), decode, shape)


def test_chosen_keys_go_on_after_what_was_begun_elsewhere_and_where_a_turn_begins() -> None:
    """SGLang tells of all tokens but the last; what another engine told counts first."""
    shape = IndexerTopkShape(num_layers=1, top_k=1)
    told = base64.b64encode(np.array([0, 0, 1, 2, 3, 1, 0], dtype=np.int32).tobytes()).decode()
    body = make_body(REQUEST, replace(SAMPLING, indexer_topk=True), [])
    assert body["return_indexer_topk"] and "routed_experts_start_len" not in body
    span = VersionSpan(0, 2, WeightVersion(5))
    begun = Sample(
        *(REQUEST.prompt, 2, (8, 9), (-0.1, -0.2), "abort", (span,), ""),
        indexer_topk=torch.tensor([7, 7, 7], dtype=torch.int16).reshape(3, 1, 1),
        experts_start=1,
    )
    request = replace(REQUEST, begun=begun, rid="name", experts_start=1)
    sample = make_sample(request, answer(indexer_topk=told), decode, None, shape)
    assert sample.routed_experts is None and sample.indexer_topk is not None
    assert sample.indexer_topk.flatten().tolist() == [7, 7, 7, 3, 1, 0]
    with pytest.raises(ValueError, match="prompt 7 of 'unit', sample 2: the engine did not tell"):
        make_sample(request, answer(), decode, None, shape)


def test_a_response_goes_on_after_what_was_begun_elsewhere() -> None:
    shape = RoutedExpertsShape((True,), top_k=1, num_experts=4)
    experts = torch.tensor([3, 3, 3, 3], dtype=torch.int16).reshape(4, 1, 1)
    span = VersionSpan(0, 2, WeightVersion(5))
    begun = Sample(REQUEST.prompt, 2, (8, 9), (-0.1, -0.2), "abort", (span,), "", experts)
    request = replace(REQUEST, begun=begun, rid="name")
    body = make_body(request, replace(SAMPLING, max_response_len=5, routed_experts=True), [])
    assert body["input_ids"] == (3, 4, 5, 8, 9) and body["rid"] == "name"
    # The first engine had run its tokens but the last: nobody asks for those that it chose again.
    assert body["routed_experts_start_len"] == 4
    assert body["sampling_params"]["max_new_tokens"] == 3
    encoded = base64.b64encode(np.array([0, 1, 2], dtype=np.int32).tobytes()).decode()
    sample = make_sample(request, answer(routed_experts=encoded), decode, shape)
    assert sample.response_ids == (8, 9, 10, 11, 12) and sample.text == "8 9 10 11 12"
    assert sample.logprobs == (-0.1, -0.2, -0.5, -1.5, -2.5)
    assert sample.versions == (span, VersionSpan(2, 5, WeightVersion(6)))
    assert sample.routed_experts is not None
    assert sample.routed_experts.flatten().tolist() == [3, 3, 3, 3, 0, 1, 2]
    without = replace(request, begun=replace(begun, routed_experts=None))
    with pytest.raises(AssertionError, match="sample 2, was begun without its experts"):
        make_sample(without, answer(routed_experts=encoded), decode, shape)


def test_log_probs_of_other_tokens_are_refused() -> None:
    wrong = [[-0.5, 10, None], [-0.5, 11, None], [-0.5, 99, None]]
    with pytest.raises(AssertionError, match=r"prompt 7 .*log-probs are of \(10, 11, 99\)"):
        make_sample(REQUEST, answer(output_token_logprobs=wrong), decode, None)


def test_sample_seeds_differ() -> None:
    seeds = {sample_seed(s, p, i) for s in range(10) for p in range(100) for i in range(8)}
    assert len(seeds) == 8000
    assert all(0 <= seed < 2**63 for seed in seeds)
