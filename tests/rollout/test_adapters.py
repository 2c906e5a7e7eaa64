"""Requests choose adapters by name; an engine's command line makes room for them."""

import pytest

from mcore_rl.rollout.adapters import AdapterSlots, choose_adapter
from mcore_rl.rollout.engine_spec import ADAPTERS, EngineSpec
from mcore_rl.rollout.request_fields import FieldError, ModelBounds, check_request

SLOTS = AdapterSlots(("policy", "rival"), 16, ("q_proj", "o_proj"), "a.b", "policy")


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [(None, "policy"), ("", "policy"), ("policy", "policy"), ("rival", "rival"), ("base", None)],
)
def test_a_request_is_answered_by(asked: str | None, chosen: str | None) -> None:
    assert choose_adapter(SLOTS.default, asked) == chosen


@pytest.mark.parametrize("names", [("policy", "base"), ("policy", "policy")])
def test_names_that_say_nothing_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="give each a name of its own"):
        AdapterSlots(names, 1, ("q_proj",), "a.b")


def test_the_command_line_has_names_and_room() -> None:
    arguments = EngineSpec("model", "log", port=1, adapters=SLOTS).arguments()
    assert arguments[0] == ADAPTERS and AdapterSlots.decode(arguments[1]) == SLOTS
    line = " ".join(arguments)
    assert "--enable-lora --max-lora-rank 16 --max-loras-per-batch 3" in line
    assert "--lora-target-modules q_proj o_proj" in line
    assert "lora" not in " ".join(EngineSpec("model", "log", port=1).arguments())


def test_openais_model_names_what_is_served() -> None:
    path = "/v1/chat/completions"
    bounds = ModelBounds(98, 1024, SLOTS.names, "/models/m:1")
    for name in ("policy", "base", "/models/m:1:rival", "x:base", "/models/m:1", "default", ""):
        check_request(path, {"model": name}, bounds)
    check_request(path, {}, bounds)
    for name in ("polici", "policy:x", "gpt-4o"):
        with pytest.raises(FieldError, match=r"one of policy, rival, base, or /models/m:1"):
            check_request(path, {"model": name}, bounds)
    check_request(path, {"model": "gpt-4o"}, ModelBounds(98, 1024))


def test_a_request_may_name_an_adapter_that_is_served() -> None:
    bounds = ModelBounds(98, 1024, SLOTS.names)
    for name in (*SLOTS.names, "base", ["policy", "rival"]):
        check_request("/generate", {"lora_path": name}, bounds)
    with pytest.raises(FieldError, match="lora_path='other': one of policy, rival, base"):
        check_request("/generate", {"lora_path": "other"}, bounds)
    with pytest.raises(FieldError, match="the server has no adapters"):
        check_request("/generate", {"lora_path": "policy"}, ModelBounds(98, 1024))
