"""Where the turn of an answer ends."""

import pytest

from mcore_rl.agents.chat.chat_format import TurnEnd
from tests.support.chat_templates import make_tokenizer, stop_ids


def tail(family: str, alone: str, now: str, last: str | None) -> str | None:
    tokenizer = make_tokenizer(family)
    ids = (70,) if last is None else (70, tokenizer.convert_tokens_to_ids(last))
    return TurnEnd(tokenizer, stop_ids(family)).find_tail(alone, now, ids)


IM_END, USER = "<|im_end|>\n", "<|im_start|>user\nhi"


@pytest.mark.parametrize(
    ("family", "alone", "now", "last", "expected"),
    [
        ("qwen3", IM_END, IM_END + USER, "<|im_end|>", "\n" + USER),
        ("qwen3", IM_END, IM_END + USER, "<|endoftext|>", "\n" + USER),
        ("qwen3", IM_END, IM_END + USER, None, IM_END + USER),
        ("qwen3", '"}' + IM_END, '"}' + IM_END + USER, None, IM_END + USER),
        ("qwen3", '"}' + IM_END, IM_END + USER, None, None),
        ("qwen3", IM_END, USER, None, "<|im_start|>user\nhi"),
        ("qwen3", IM_END, "hi", None, None),
        ("gptoss", "<|return|>", "<|end|><|start|>", "<|return|>", "<|start|>"),
        ("gptoss", "<|call|>", "<|call|><|start|>", "<|call|>", "<|start|>"),
        ("glm4moe", "", "<|user|>\nhi", "<|user|>", "\nhi"),
        ("glm4moe", "", "<|user|>\nhi", "<|observation|>", "<|user|>\nhi"),
        ("glm4moe", "", "<|user|>\nhi", None, "<|user|>\nhi"),
        ("glm4moe", "</tool_call>", "</tool_call><|observation|>", "<|observation|>", ""),
        ("glm4moe", "</tool_call>", "<|observation|>", "<|observation|>", None),
    ],
)
def test_the_text_after_the_answer(
    family: str, alone: str, now: str, last: str | None, expected: str | None
) -> None:
    assert tail(family, alone, now, last) == expected


def test_a_special_token_that_no_setting_names_closes_a_turn() -> None:
    tokenizer = make_tokenizer("qwen3")
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    turn_end = TurnEnd(tokenizer, [end_of_text])
    assert turn_end.find_tail(IM_END, IM_END + USER, (70, end_of_text)) == "\n" + USER
    assert turn_end.find_tail(IM_END, IM_END + USER, (70,)) == IM_END + USER


def test_sampled_stop() -> None:
    turn_end = TurnEnd(make_tokenizer("qwen3"), stop_ids("qwen3"))
    assert turn_end.find_sampled_stop((70, stop_ids("qwen3")[0])) == "<|im_end|>"
    assert turn_end.find_sampled_stop((70,)) is None
    assert turn_end.find_sampled_stop(()) is None
