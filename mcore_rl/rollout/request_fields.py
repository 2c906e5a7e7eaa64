"""Bounds every field of a request that SGLang samples, scores or tokenizes by.

SGLang checks some fields in its server, and trusts others: a value that it trusts fails in the
scheduler, which ends, and the engine with it. So what is out of bounds is refused before SGLang
sees it.

Checks of one field of a request each: numbers, flags, texts, token ids, biases.

Finds the fields of a request that only an engine with a grammar can honor.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.rollout.adapters import BASE
from mcore_rl.types.samples import MOST_STOP_LEN, MOST_STOPS

UNNAMED = "default"
"""The model of SGLang's OpenAI API where a request names none."""
_SHOWN = 64


class FieldError(ValueError):
    """A field of a request is out of bounds; the message names field, value and bound."""


Check = Callable[[str, Any], None]
"""Takes a field's name and its value, which is not None; raises FieldError."""


def limit_number(least: float, most: float, *, also: tuple[float, ...] = ()) -> Check:
    def check(name: str, value: Any) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (value in also or (math.isfinite(value) and least <= value <= most)):
            return
        raise FieldError(f"{name}={show(value)}: {_range(least, most, also)}, a number")

    return check


def limit_whole(least: int, most: int, *, also: tuple[int, ...] = ()) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is int and (value in also or least <= value <= most):
            return
        raise FieldError(f"{name}={show(value)}: {_range(least, most, also)}, a whole number")

    return check


def _range(least: float, most: float, also: tuple[float, ...]) -> str:
    return "".join(f"{each} or " for each in also) + f"{least} to {most}"


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise FieldError(f"{name}={show(value)}: true or false")


def limit_text(most_len: int) -> Check:
    def check(name: str, value: Any) -> None:
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str) and len(each) <= most_len for each in values):
            raise FieldError(f"{name}={show(value)}: a text of at most {most_len} characters")

    return check


def limit_names(known: tuple[str, ...]) -> Check:
    def check(name: str, value: Any) -> None:
        if value not in known:
            raise FieldError(f"{name}={show(value)}: one of {', '.join(known)}")

    return check


def check_stops(name: str, value: Any) -> None:
    texts = value if isinstance(value, list) else [value]
    if len(texts) > MOST_STOPS:
        raise FieldError(f"{name}: {len(texts)} texts, at most {MOST_STOPS}")
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text) <= MOST_STOP_LEN:
            raise FieldError(f"{name}={show(value)}: texts of 1 to {MOST_STOP_LEN} characters each")


def limit_ids(vocab_size: int) -> Check:
    """Return a check of token ids, in a list or in lists of a list, or of one id alone."""

    def check(name: str, value: Any) -> None:
        ids = value if isinstance(value, list) else [value]
        if ids and isinstance(ids[0], list):
            for number, each in enumerate(ids):
                check(f"{name}[{number}]", each if isinstance(each, list) else [each])
            return
        if not set(map(type, ids)) <= {int}:
            bad = next(each for each in ids if type(each) is not int)
            raise FieldError(f"{name}={show(bad)}: token ids are 0 to {vocab_size - 1}")
        for bad in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= bad < vocab_size:
                raise FieldError(f"{name}={bad}: token ids are 0 to {vocab_size - 1}")

    return check


def limit_ids_or_texts(vocab_size: int) -> Check:
    check_ids = limit_ids(vocab_size)

    def check(name: str, value: Any) -> None:
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int | float | list):
            check_ids(name, value)

    return check


def limit_biases(vocab_size: int) -> Check:
    """Return a check of OpenAI's logit_bias: numbers by token id, which comes as text."""
    check_bias = limit_number(-100, 100)

    def check(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise FieldError(f"{name}={show(value)}: an object of biases by token id")
        for token, bias in value.items():
            if not (token.isascii() and token.isdigit() and len(token) < 20):
                raise FieldError(f"{name}[{show(token)}]: token ids are 0 to {vocab_size - 1}")
            if int(token) >= vocab_size:
                raise FieldError(f"{name}[{token}]: token ids are 0 to {vocab_size - 1}")
            check_bias(f"{name}[{token}]", bias)

    return check


def show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_FREE_CHOICES = ("auto", "none")


def refuse_grammars(body: Mapping[str, Any]) -> None:
    """Raise FieldError if a body of any API constrains what the model may write."""
    for name, value in _constraints(body):
        raise FieldError(
            f"{name}={show(value)} constrains the answer by a grammar, and this server samples"
            " without one: start it by `mcore-rl serve --grammar-backend xgrammar`, or ask for the"
            " format in the prompt"
        )


def _constraints(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each field that needs a grammar."""
    if _is_format(body.get("response_format")):
        yield "response_format", body["response_format"]
    for name in ("text", "output_config"):  # OpenAI's Responses, Anthropic's Messages
        nested = body.get(name)
        if isinstance(nested, dict) and _is_format(nested.get("format")):
            yield f"{name}.format", nested["format"]
    if _is_forced(body.get("tool_choice")):
        yield "tool_choice", body["tool_choice"]
    tools = body.get("tools")
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and _is_strict(tool):
            yield f"tools[{number}].strict", True
    given = body.get("sampling_params")
    for fields in (body, *(given if isinstance(given, list) else [given])):
        for name in GRAMMARS:
            if isinstance(fields, dict) and fields.get(name):
                yield name, fields[name]


def _is_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") not in (None, "text")


def _is_forced(choice: Any) -> bool:
    """Return whether a tool must be called: "required", a tool's name, or "any" of Anthropic's."""
    if isinstance(choice, dict):
        return choice.get("type") not in _FREE_CHOICES
    return isinstance(choice, str) and choice not in _FREE_CHOICES


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return tool.get("strict") is True or (
        isinstance(function, dict) and function.get("strict") is True
    )


MOST_TOP_LOGPROBS = 128
MOST_CHOICES = 128
"""Samples of one prompt in a request."""
MOST_GRAMMAR_LEN = 1 << 16
MOST_NAME_LEN = 1024
"""Characters, both."""
_SEEDS = 1 << 63


@dataclass(frozen=True)
class ModelBounds:
    """Bounds that the served model sets.

    vocab_size    token ids lie in [0, vocab_size)
    context_len   tokens of prompt and response together
    adapters      names of the adapters that the server serves beside the model's weights
    name          of the weights themselves
    """

    vocab_size: int
    context_len: int
    adapters: tuple[str, ...] = ()
    name: str = ""


NATIVE_PATHS = frozenset({"/generate", "/encode", "/classify"})
"""Their sampling fields lie in `sampling_params`, and a batch has a list for each field."""

_FLAGS = (
    *("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
    *("return_logprob", "return_routed_experts", "return_indexer_topk", "stream", "echo"),
    "return_text_in_logprobs",
)
_TEXTS = ("rid", "request_id", "extra_key", "cache_salt", "session_id", "routing_key")
_NAMED = (*_TEXTS, "conversation_id")

REFUSED = {
    **dict.fromkeys(
        ("custom_logit_processor", "custom_params"),
        "the server runs no code of a request",
    ),
    "stop_regex": "a pattern can take forever to match; use stop",
    "beam_width": "the server samples; use n",
    "watermark": "leave it out",
    **dict.fromkeys(("input_embeds", "positional_embed_overrides"), "send token ids or text"),
    **dict.fromkeys(
        ("embed_overrides", "query_embed_overrides", "item_embed_overrides"),
        "send token ids or text",
    ),
    "embed_override_token_id": "send token ids or text",
    **dict.fromkeys(("lora_path", "lora_id"), "the server has no adapters"),
    "session_params": "send the whole prompt; its prefix is cached",
    **dict.fromkeys(
        (
            *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
            *("decode_tp_size", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"),
            *("http_worker_ipc", "kv_hints", "need_wait_for_mm_inputs", "num_items_assigned"),
            *("encoder_urls", "external_trace_header", "received_time", "priority"),
        ),
        "only SGLang's own routers set it",
    ),
    **dict.fromkeys(
        (
            *("multi_item_delimiter_indices", "token_indices_to_pool", "decision_layout"),
            *("return_sampling_mask", "sampling_logprobs_mode"),
            *("return_hidden_states", "return_pooled_hidden_states", "return_bytes"),
            *("return_entropy", "return_flat_raw_top_logprobs", "max_thinking_tokens"),
            *("return_flat_raw_output_top_logprobs", "mm_hashes", "mm_content_hashes"),
            *("require_reasoning", "is_cross_encoder_request", "task"),
        ),
        "the server does not offer it",
    ),
    **dict.fromkeys(
        (
            *("max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch"),
            *("video_max_dynamic_patch", "images_config", "video_config", "mm_processor_kwargs"),
        ),
        "images are cut as the model's processor does",
    ),
}
"""Fields of SGLang that no request may set, with the remedy."""


def check_request(path: str, body: Any, model: ModelBounds) -> None:
    """Raise FieldError if SGLang's `path` must not get this body of JSON."""
    if not isinstance(body, dict):
        raise FieldError(f"the body is {type(body).__name__}: send an object of JSON")
    is_native = path in NATIVE_PATHS
    checks = _checks(model)
    checks["logprobs"] = checks["top_logprobs"] if path == "/v1/completions" else check_flag
    for name, value in body.items():
        _check_field(checks, name, value, is_native)
    if not is_native:
        _check_model(body.get("model"), model)
        return
    given = body.get("sampling_params")
    for parameters in given if isinstance(given, list) else [given]:
        _check_sampling(checks, parameters)
    _check_experts_start(body)


def _check_model(name: Any, model: ModelBounds) -> None:
    """Raise FieldError if a server with adapters has nothing of a name, "<model>:<adapter>" too."""
    if not model.adapters or not isinstance(name, str) or name in ("", UNNAMED, model.name):
        return
    served = (*model.adapters, BASE)
    if name.rpartition(":")[2] not in served:
        raise FieldError(f"model={show(name)}: one of {', '.join(served)}, or {model.name}")


def _check_field(checks: Mapping[str, Check], name: str, value: Any, may_be_batch: bool) -> None:
    """Raise FieldError for a field that is refused or out of bounds."""
    if value is None:
        return
    check = checks.get(name)
    remedy = REFUSED.get(name) if check is None else None
    if remedy is not None and not _is_off(value):
        raise FieldError(f"{name}={show(value)} is not allowed: {remedy}")
    if check is None:
        return
    is_batch = may_be_batch and isinstance(value, list) and name not in _ID_FIELDS
    for each in value if is_batch else [value]:
        if each is not None:
            check(name, each)


def _is_off(value: Any) -> bool:
    """Return whether a value asks for nothing; 0 asks for something."""
    return value is False or value in ([], {}, "")


def _check_sampling(checks: Mapping[str, Check], parameters: Any) -> None:
    """Raise FieldError for /generate's `sampling_params`, of which every name must be known."""
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise FieldError(f"sampling_params={show(parameters)}: send an object")
    for name, value in parameters.items():
        if name not in SAMPLING_FIELDS and name not in REFUSED:
            raise FieldError(
                f"sampling_params.{name[:64]}={show(value)}: there is no such parameter; give"
                f" {', '.join(sorted(SAMPLING_FIELDS))}"
            )
        _check_field(checks, name, value, may_be_batch=False)
    least = parameters.get("min_new_tokens") or 0
    most = parameters.get("max_new_tokens")
    if most is not None and least > most:
        raise FieldError(f"min_new_tokens={least}: at most max_new_tokens={most}")


def _check_experts_start(body: Mapping[str, Any]) -> None:
    """Raise FieldError if the experts are asked for from behind the prompt's end."""
    start = body.get("routed_experts_start_len")
    ids = body.get("input_ids")
    is_single = isinstance(ids, list) and bool(ids) and isinstance(ids[0], int)
    if isinstance(start, int) and isinstance(ids, list) and is_single and start > len(ids):
        raise FieldError(f"routed_experts_start_len={start}: at most {len(ids)}, as the prompt")


_ID_FIELDS = frozenset({"input_ids", "token_ids_logprob", "stop_token_ids", "label_token_ids"})
SAMPLING_FIELDS = frozenset(
    {
        *("max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "temperature", "top_p"),
        *("top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n"),
        *("logit_bias", "sampling_seed", "stream_interval", "ignore_eos", "skip_special_tokens"),
        *("spaces_between_special_tokens", "no_stop_trim", *GRAMMARS),
    }
)
"""Fields that `sampling_params` of /generate may have."""


def list_bounded_names() -> set[str]:
    """Return the names of all fields that have a bound."""
    return {*_checks(ModelBounds(1, 1)), "logprobs"}


def _checks(model: ModelBounds) -> dict[str, Check]:
    """Return the check of each bounded field."""
    vocab, context = model.vocab_size, model.context_len
    ids = limit_ids(vocab)
    top_logprobs = limit_whole(0, min(MOST_TOP_LOGPROBS, vocab))
    return {
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), limit_whole(0, context)),
        **dict.fromkeys(("max_new_tokens", "max_output_tokens"), limit_whole(0, context)),
        **dict.fromkeys(("min_tokens", "min_new_tokens"), limit_whole(0, context)),
        **dict.fromkeys(("n", "best_of"), limit_whole(1, MOST_CHOICES)),
        **dict.fromkeys(("top_logprobs", "top_logprobs_num"), top_logprobs),
        **dict.fromkeys(("seed", "sampling_seed"), limit_whole(-_SEEDS, _SEEDS - 1)),
        **dict.fromkeys(("stop", "stop_sequences"), check_stops),
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), limit_number(-2, 2)),
        # A smaller one divides logits until they are infinite, and probabilities become NaN.
        "repetition_penalty": limit_number(0.01, 2),
        "temperature": limit_number(0, 100),
        "top_p": limit_number(1e-6, 1),
        "min_p": limit_number(0, 1),
        "top_k": limit_whole(1, 1 << 30, also=(-1,)),
        "logit_bias": limit_biases(vocab),
        **dict.fromkeys(_ID_FIELDS, ids),
        "tokens": ids,
        **dict.fromkeys(("prompt", "input", "query", "items"), limit_ids_or_texts(vocab)),
        "logprob_start_len": limit_whole(0, context, also=(-1,)),
        "routed_experts_start_len": limit_whole(0, context),
        "stream_interval": limit_whole(1, context),
        "dimensions": limit_whole(1, 1 << 20),
        "max_tool_calls": limit_whole(1, 1 << 20),
        **dict.fromkeys(_FLAGS, check_flag),
        **dict.fromkeys(_NAMED, limit_text(MOST_NAME_LEN)),
        **dict.fromkeys(GRAMMARS, limit_text(MOST_GRAMMAR_LEN)),
        **({"lora_path": limit_names((*model.adapters, BASE))} if model.adapters else {}),
    }
