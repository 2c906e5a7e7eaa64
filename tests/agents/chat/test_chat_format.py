"""Token ids of conversations over the chat templates of model families."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mcore_rl.agents.chat.chat_format import ChatFormat
from mcore_rl.agents.messages import Message
from tests.support.chat_templates import FAMILIES, FAMILIES_BY_LANE, make_tokenizer, stop_ids
from tests.support.conversations import TOOLS, Conversation, Turn, conversations

LIMITS: dict[str, dict[str, Any]] = {
    "mixtral": {"calls": False, "system": False},
    # The templates end tool results with a token, which they take back before further calls.
    "deepseekv3": {"call_rounds": 1},
    "deepseek_r1_distill": {"call_rounds": 1},
}
OPENING = ("glm4moe",)
"""Families whose answers end with the token that opens the next message."""
few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=FAMILIES_BY_LANE)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def make_format(family: str, reasoning: Literal["template", "keep"], **options: Any) -> ChatFormat:
    tokenizer = make_tokenizer(family)
    return ChatFormat(tokenizer, stop_ids(family), reasoning=reasoning, template_options=options)


def draw_conversation(data: st.DataObject, family: str, **changes: Any) -> Conversation:
    return data.draw(conversations(**{**LIMITS.get(family, {}), **changes}))


def sampled(family: str, turn: Turn) -> tuple[int, ...]:
    """Any ids as the answer of a turn, ended by a stop token or cut off."""
    stops = stop_ids(family)
    return (70, 71) if turn.ending is None else (70, 71, stops[turn.ending % len(stops)])


def text_of(family: str, ids: Sequence[int]) -> str:
    return make_tokenizer(family).decode(list(ids), skip_special_tokens=False)


def words_of(messages: Sequence[Message]) -> list[str]:
    return [str(m["content"]).partition("]")[0] + "]" for m in messages if m["content"]]


@few
@given(data=st.data())
def test_a_row_forks_exactly_if_the_template_drops_what_it_shows(
    family: str, data: st.DataObject
) -> None:
    chat = make_format(family, "template")
    conversation = draw_conversation(data, family)
    history = list(conversation.start)
    shown: set[str] = set()
    for turn in conversation.turns:
        history.append(turn.answer)
        shown |= set(turn.words)
        ids = chat.render_appended(history, sampled(family, turn), turn.new, TOOLS)
        history += turn.new
        text = text_of(family, chat.render_whole(history, TOOLS))
        stays = {word for word in shown if word in text}
        assert (ids is None) == (stays != shown), (history, shown - stays)
        shown = stays


@few
@given(data=st.data())
def test_with_reasoning_kept_every_row_goes_on(family: str, data: st.DataObject) -> None:
    chat = make_format(family, "keep")
    conversation = draw_conversation(data, family)
    history = list(conversation.start)
    for turn in conversation.turns:
        history.append(turn.answer)
        ids = chat.render_appended(history, sampled(family, turn), turn.new, TOOLS)
        assert ids is not None
        text = text_of(family, ids)
        assert all(word in text for word in words_of(turn.new))
        assert not any(word in text for word in [*turn.words, *words_of(history)])
        history += turn.new


@few
@given(data=st.data())
def test_appended_ids_end_the_tokens_of_the_whole_conversation(
    family: str, data: st.DataObject
) -> None:
    chat = make_format(family, "template")
    conversation = draw_conversation(data, family, reasoning=False, max_turns=2)
    history = list(conversation.start)
    for turn in conversation.turns:
        history.append(turn.answer)
        cut_off = chat.render_appended(history, (70,), turn.new, TOOLS)
        history += turn.new
        if cut_off is None:
            continue
        whole = chat.render_whole(history, TOOLS)
        assert whole[-len(cut_off) :] == cut_off
        head = text_of(family, whole[: -len(cut_off)])
        assert all(word in head for word in turn.words)
        assert not any(word in head for word in words_of(turn.new))
        assert turn.words[-1] in head
        rest = head.rpartition(turn.words[-1])[2]
        turn_tokens = (*FAMILIES[family].stops, *FAMILIES[family].special)
        assert not any(token in rest for token in turn_tokens), rest


@few
@given(data=st.data())
def test_an_answer_as_the_template_writes_it_gives_the_whole_conversation(
    family: str, data: st.DataObject
) -> None:
    chat = make_format(family, "template")
    conversation = draw_conversation(data, family, max_turns=2)
    history = list(conversation.start)
    for turn in conversation.turns:
        prompt = chat.render_whole(history, TOOLS)
        history.append(turn.answer)
        cut_off = chat.render_appended(history, (70,), turn.new, TOOLS)
        whole = chat.render_whole([*history, *turn.new], TOOLS)
        if cut_off is not None and whole[: len(prompt)] == prompt:
            answer = whole[len(prompt) : len(whole) - len(cut_off)]
            assert prompt + answer + cut_off == whole
            if cut_off[0] in stop_ids(family):
                answer = (*answer, cut_off[0])
                ended = chat.render_appended(history, answer, turn.new, TOOLS)
                assert ended is not None
                assert prompt + answer + ended == whole
        history += turn.new


@few
@given(data=st.data())
def test_any_stop_token_ends_the_turn(family: str, data: st.DataObject) -> None:
    chat = make_format(family, "keep")
    turn = draw_conversation(data, family, max_turns=1).turns[0]
    history = [{"role": "user", "content": "hi"}, turn.answer]
    cut_off = chat.render_appended(history, (70,), turn.new, TOOLS)
    assert cut_off is not None
    for stop in stop_ids(family):
        ended = chat.render_appended(history, (70, stop), turn.new, TOOLS)
        opens = family in OPENING and stop != cut_off[0]
        assert ended == (cut_off if opens else cut_off[1:])


def test_appended_ids_begin_at_a_token_of_their_own(family: str) -> None:
    """Text before and after such a token is tokenized apart, so the boundary is clean."""
    chat = make_format(family, "keep")
    tokenizer = make_tokenizer(family)
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    cut_off = chat.render_appended(history, (70,), history[:1], TOOLS)
    assert cut_off is not None
    assert cut_off[0] in tokenizer.added_tokens_decoder


def test_reasoning_that_was_left_in_the_content_is_followed_too() -> None:
    """Without a reasoning parser, Qwen3's template itself splits the content at </think>."""
    question = {"role": "user", "content": "hi"}
    call = conversation_call()
    thoughtful = {
        "role": "assistant",
        "content": "<think>\nwhy\n</think>\n\n",
        "tool_calls": [call],
    }
    result = {"role": "tool", "tool_call_id": call["id"], "content": "there"}
    chat = make_format("qwen3", "template")
    assert chat.render_appended([question, thoughtful], (70,), [result], TOOLS) is not None
    assert chat.render_appended([question, thoughtful], (70,), [result, question], TOOLS) is None
    kept = make_format("qwen3", "keep")
    assert (
        kept.render_appended([question, thoughtful], (70,), [result, question], TOOLS) is not None
    )


def conversation_call() -> dict[str, Any]:
    return {"id": "call0", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def test_a_message_that_the_template_moves_to_the_front_starts_a_new_row() -> None:
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    new = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    for reasoning in ("template", "keep"):
        chat = make_format("deepseekv3", reasoning)
        assert chat.render_appended(history, (70,), new, ()) is None


def test_an_empty_generation_prompt_of_reasoning_stays_in_the_row() -> None:
    """Qwen3's template leaves it out of earlier turns; that takes nothing back that was said."""
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    chat = make_format("qwen3", "template", enable_thinking=False)
    ids = chat.render_appended(history, (70,), history[:1], ())
    assert ids is not None
    assert text_of("qwen3", ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_words_of_the_marks_may_occur_in_messages() -> None:
    question = {"role": "user", "content": "qX0markcontentz qX1mark"}
    answer = {"role": "assistant", "content": "qX0mark"}
    chat = make_format("qwen3", "template")
    ids = chat.render_appended([question, answer], (70,), [question], ())
    assert ids is not None
    plain = "<|im_end|>\n<|im_start|>user\nqX0markcontentz qX1mark<|im_end|>\n"
    assert text_of("qwen3", ids) == plain + "<|im_start|>assistant\n"


def test_blanks_after_a_stop_token_are_as_in_the_whole_conversation() -> None:
    """Llama 2's tokenizer begins a text with a blank, but not the text after a special token."""
    tokenizer = make_blank_tokenizer()
    chat = ChatFormat(tokenizer, [1], reasoning="template", template_options={})
    question = {"role": "user", "content": "a"}
    answer = {"role": "assistant", "content": "a"}
    whole = chat.render_whole([question, answer, question], ())
    ids = chat.render_appended([question, answer], (3, 1), [question], ())
    assert ids is not None
    assert whole[-len(ids) - 1 :] == (1, *ids)


def make_blank_tokenizer() -> Any:
    """A tokenizer whose texts begin with a blank, and a template with turns that end with </s>."""
    model = models.BPE({"<unk>": 0, "</s>": 1, "\u2581": 2, "a": 3, "U": 4, "A": 5}, [])
    tokenizer = Tokenizer(model)
    blank = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first")
    tokenizer.pre_tokenizer = blank  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}"
        "{{ '</s>' if m.role != 'user' }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    )
    return fast


def test_wrong_arguments_are_refused() -> None:
    tokenizer: Any = make_tokenizer("qwen3")
    wrong: Any = "drop"
    with pytest.raises(ValueError, match=r"agents\.reasoning=drop: must be template or keep"):
        ChatFormat(tokenizer, [1], reasoning=wrong, template_options={})
    with pytest.raises(ValueError, match=r"no answer .* its roles are \['user'\]"):
        make_format("qwen3", "keep").render_appended([{"role": "user", "content": ""}], (), [], ())
