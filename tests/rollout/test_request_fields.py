"""Bounds of every field of a request; tests/scenarios/rollout/test_bad_fields.py asks an engine."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.rollout.request_fields import (
    REFUSED,
    SAMPLING_FIELDS,
    FieldError,
    ModelBounds,
    check_request,
    list_bounded_names,
)

MODEL = ModelBounds(vocab_size=98, context_len=1024)
BIG = 1 << 70
OUTSIDE = {
    "temperature": [-0.1, 101, 1e300, "1", True, [0.5]],
    "top_p": [0, 1.1, -1, 1e-300, "a"],
    "top_k": [0, -2, 1 << 40, BIG, 1.5, True],
    "min_p": [-0.1, 1.5, "0"],
    "frequency_penalty": [-2.1, 2.1, True],
    "presence_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, 1e-300, 2.1],
    "n": [0, -1, 129, 100000, True],
    "best_of": [0, 129],
    "seed": [BIG, 1.5, "1"],
    "sampling_seed": [-BIG, True],
    "max_tokens": [-1, 1025, BIG, 2.5],
    "max_completion_tokens": [1025],
    "max_output_tokens": [1025],
    "max_new_tokens": [-1, 1025],
    "min_tokens": [-1, 1025],
    "min_new_tokens": [-1, 1025],
    "top_logprobs": [-1, 99, 1000, True],
    "top_logprobs_num": [-5, 99],
    "stop": ["", [""], ["a", 1], "x" * 1025, ["a"] * 33, 7],
    "stop_token_ids": [[98], [-1], [BIG], ["a"], [True], 98],
    "token_ids_logprob": [[98], [[98]]],
    "input_ids": [[-1], [98], [[1], [98]], [1.5], [True]],
    "prompt": [[98], [[1], [-1]]],
    "tokens": [[98]],
    "label_token_ids": [[98]],
    "logit_bias": [{"98": 1}, {"-1": 1}, {"a": 1}, {"3": 101}, {"3": 1e300}, {"3": True}, [3]],
    "logprob_start_len": [-2, 1025],
    "routed_experts_start_len": [-1, 1025],
    "ignore_eos": ["x", 1, 0],
    "regex": ["a" * 65537, 3],
    "rid": ["a" * 1025, 3],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_value_outside_its_bound_is_refused_by_name(name: str) -> None:
    for value in OUTSIDE[name]:
        for path, body in bodies(name, value):
            with pytest.raises(FieldError, match=rf"^{name}\b.*\d|^{name}\b.*(true|text|object)"):
                check_request(path, body, MODEL)


def bodies(name: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the requests in which the field stands, in both of SGLang's forms."""
    found = [("/v1/chat/completions", {name: value})]
    if name in SAMPLING_FIELDS:
        found.append(("/generate", {"sampling_params": {name: value}}))
        found.append(("/generate", {"sampling_params": [{}, {name: value}]}))
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 98, "seed": -3, "n": 128}),
        ("/v1/chat/completions", {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0}),
        ("/v1/chat/completions", {"stop": ["a"], "logit_bias": {"97": -100}, "max_tokens": None}),
        ("/v1/chat/completions", {"user": "a", "metadata": {"b": 1}, "lora_path": None}),
        ("/v1/completions", {"prompt": "text", "logprobs": 5, "echo": True, "best_of": 1}),
        ("/v1/completions", {"prompt": [[0, 97], [3]], "return_hidden_states": False}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/classify", {"model": "m", "input_ids": [1, 2]}),
        ("/generate", {"text": ["a", "b"], "top_logprobs_num": [1, 2], "rid": ["x", "y"]}),
        (
            "/generate",
            {
                "input_ids": [0, 97],
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0, "top_k": -1},
                "return_logprob": True,
                "logprob_start_len": 0,
                "routed_experts_start_len": 2,
            },
        ),
    ],
)
def test_values_at_their_bounds_are_admitted(path: str, body: dict[str, Any]) -> None:
    check_request(path, body, MODEL)


def test_log_probs_are_a_flag_of_chats_and_a_number_of_completions() -> None:
    with pytest.raises(FieldError, match=r"^logprobs=1000: 0 to 98, a whole number$"):
        check_request("/v1/completions", {"logprobs": 1000}, MODEL)
    with pytest.raises(FieldError, match=r"^logprobs=5: true or false$"):
        check_request("/v1/chat/completions", {"logprobs": 5}, MODEL)


def test_a_large_vocabulary_bounds_log_probs_by_a_number_of_its_own() -> None:
    with pytest.raises(FieldError, match=r"^top_logprobs=129: 0 to 128, a whole number$"):
        check_request("/v1/chat/completions", {"top_logprobs": 129}, ModelBounds(150000, 1024))


def test_a_batch_is_checked_entry_by_entry() -> None:
    with pytest.raises(FieldError, match=r"^top_logprobs_num=99: 0 to 98"):
        check_request("/generate", {"text": ["a", "b"], "top_logprobs_num": [1, 99]}, MODEL)


def test_fields_of_one_request_fit_each_other() -> None:
    body: dict[str, Any] = {"sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}}
    with pytest.raises(FieldError, match=r"^min_new_tokens=5: at most max_new_tokens=4$"):
        check_request("/generate", body, MODEL)
    body = {"input_ids": [1, 2], "routed_experts_start_len": 3}
    with pytest.raises(FieldError, match=r"^routed_experts_start_len=3: at most 2"):
        check_request("/generate", body, MODEL)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_reaches_into_the_engine_is_refused_with_its_remedy(name: str) -> None:
    for value in (0, 1, True, "a", ["a"]):
        with pytest.raises(FieldError, match=rf"^{name}=.* is not allowed: \w"):
            check_request("/v1/chat/completions", {name: value}, MODEL)


def test_an_unknown_sampling_parameter_is_named() -> None:
    with pytest.raises(FieldError, match=r"^sampling_params\.is_normalized=True: there is no such"):
        check_request("/generate", {"sampling_params": {"is_normalized": True}}, MODEL)
    with pytest.raises(FieldError, match=r"^sampling_params=3: send an object"):
        check_request("/generate", {"sampling_params": 3}, MODEL)


@pytest.mark.parametrize("body", [[], 3, "a", None, True])
def test_a_body_is_an_object(body: Any) -> None:
    with pytest.raises(FieldError, match=r"^the body is \w+: send an object of JSON$"):
        check_request("/generate", body, MODEL)


INTERNAL = {
    *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"),
    "ebnf_full_assistant",
}
"""Fields of SamplingParams that SGLang sets itself: unknown here, and so refused."""
HARMLESS = {
    # texts and objects that SGLang's server reads and no scheduler computes with
    *("model", "user", "messages", "tools", "tool_choice", "response_format", "metadata"),
    *("stream_options", "suffix", "text", "instructions", "include", "reasoning", "truncation"),
    *("service_tier", "store", "background", "previous_response_id", "modalities", "no_logs"),
    *("chat_template_kwargs", "thinking", "reasoning_effort", "parallel_tool_calls"),
    *("separate_reasoning", "stream_reasoning", "continue_final_message", "custom_labels"),
    *("encoding_format", "apply_softmax", "item_first", "score_extraction_token"),
    *("log_metrics", "use_audio_in_video", "image_data", "video_data", "audio_data"),
    # what an answer tells besides
    *("return_cached_tokens_details", "return_spec_tokens_details", "return_token_ids"),
    *("return_prompt_token_ids", "return_meta_info", "return_input_ids_in_sglext"),
    *("return_output_ids_in_sglext", "return_flat_raw_top_logprobs_b64", "return_token_logprobs"),
    "sampling_params",
}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("sampling/sampling_params.py", "SamplingParams"),
        ("managers/io_struct.py", "GenerateReqInput"),
        ("managers/io_struct.py", "EmbeddingReqInput"),
        ("entrypoints/openai/protocol.py", "PDRoutingFields"),
        ("entrypoints/openai/protocol.py", "CompletionRequest"),
        ("entrypoints/openai/protocol.py", "ChatCompletionRequest"),
        ("entrypoints/openai/protocol.py", "ResponsesRequest"),
        ("entrypoints/openai/protocol.py", "EmbeddingRequest"),
        ("entrypoints/openai/protocol.py", "ScoringRequest"),
    ],
)
def test_each_field_of_sglang_is_bounded_refused_or_harmless(file: str, name: str) -> None:
    known = list_bounded_names() | REFUSED.keys() | HARMLESS
    unbounded = fields_of(file, name) - known - (INTERNAL if name == "SamplingParams" else set())
    assert not unbounded, f"{name} has fields that nothing bounds"


def fields_of(file: str, name: str) -> set[str]:
    """Return the public fields of a class in SGLang's source, which is not imported."""
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "srt", file).read_text()
    (found,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    targets = [node.target for node in found.body if isinstance(node, ast.AnnAssign)]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    assert names, f"{name} has no fields"
    return {each for each in names if not each.startswith("_")}
