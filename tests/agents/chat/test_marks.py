"""Marks in answers."""

import json

from mcore_rl.agents.chat.chat_format import (
    drop_reasoning,
    find_unused_mark,
    mark_answer,
    mark_content,
)

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}


def test_each_part_gets_a_mark() -> None:
    message = {
        "role": "assistant",
        "content": "text",
        "reasoning_content": "why",
        "tool_calls": [CALL, CALL],
    }
    marked, marks = mark_answer(message, "M")
    assert len(set(marks)) == 4
    assert marked["reasoning_content"] == "why" + marks[0]
    assert marked["content"] == "text" + marks[1]
    arguments = [json.loads(call["function"]["arguments"]) for call in marked["tool_calls"]]
    assert [list(values.values()) for values in arguments] == [[marks[2]], [marks[3]]]
    assert message["tool_calls"] == [CALL, CALL]
    assert CALL["function"] == {"name": "look", "arguments": '{"x": 1}'}


def test_an_answer_of_calls_alone_gets_no_content() -> None:
    marked, marks = mark_answer({"role": "assistant", "content": "", "tool_calls": [CALL]}, "M")
    assert marked["content"] == ""
    assert len(marks) == 1


def test_an_empty_answer_gets_a_mark() -> None:
    marked, marks = mark_answer({"role": "assistant", "content": None}, "M")
    assert [marked["content"]] == marks


def test_reasoning_in_the_content_gets_a_mark() -> None:
    marked, marks = mark_answer({"role": "assistant", "content": "<think>why</think>Hi"}, "M")
    assert marked["content"] == f"<think>why{marks[0]}</think>Hi{marks[1]}"
    marked, marks = mark_answer({"role": "assistant", "content": "<think>\n</think>Hi"}, "M")
    assert marked["content"] == f"<think>\n</think>Hi{marks[0]}"


def test_a_mark_of_the_content_alone() -> None:
    message = {"role": "assistant", "content": "Hi", "tool_calls": [CALL]}
    assert mark_content(message, "M") == ({**message, "content": "HiM"}, ["M"])


def test_marks_occur_in_no_message() -> None:
    mark = find_unused_mark([{"role": "user", "content": "qX0mark"}])
    assert mark == "qX1mark"
    call = {**CALL, "function": {"name": "look", "arguments": mark}}
    assert find_unused_mark([{"content": "qX0mark"}, {"tool_calls": [call]}]) == "qX2mark"


def test_reasoning_is_left_out() -> None:
    answer = {"role": "assistant", "content": "Hi", "reasoning_content": "why"}
    assert drop_reasoning(answer) == {"role": "assistant", "content": "Hi"}
    answer = {"role": "assistant", "content": "<think>why</think>Hi"}
    assert drop_reasoning(answer)["content"] == "Hi"
    answer = {"role": "assistant", "content": "why", "tool_calls": [CALL]}
    assert drop_reasoning(answer) == answer
    assert drop_reasoning(answer, text_is_reasoning=True)["content"] == ""
    question = {"role": "user", "content": "a </think> b"}
    assert drop_reasoning(question) is question
