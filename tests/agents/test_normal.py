"""Conversations that differ in form alone have the same fingerprint; others do not."""

from mcore_rl.agents.messages import Message, make_fingerprints


def call(arguments: object) -> Message:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}


def test_form_does_not_count() -> None:
    plain = {"role": "user", "content": "go"}
    parts = {"role": "user", "content": [{"type": "text", "text": "g"}, {"text": "o"}]}
    assert make_fingerprints([plain], ()) == make_fingerprints([parts], ())
    without = {"role": "assistant", "content": "x"}
    assert make_fingerprints([without], ()) == make_fingerprints(
        [{**without, "reasoning_content": "r"}], ()
    )
    empty = {**call("{}"), "content": ""}
    assert make_fingerprints([call("{}")], ()) == make_fingerprints([empty], ())


def test_everything_else_counts() -> None:
    conversations = [
        [call('{"x": 1}')],
        [call('{"x":1}')],
        [call('{"x": 1}'), {"role": "tool", "tool_call_id": "1", "content": ""}],
        [{"role": "user", "content": ""}],
        [{"role": "system", "content": ""}],
    ]
    hashes = [make_fingerprints(messages, ())[-1] for messages in conversations]
    hashes.append(make_fingerprints(conversations[0], [{"type": "function"}])[-1])
    assert len(set(hashes)) == len(hashes)


def test_there_is_one_for_each_beginning() -> None:
    messages = [{"role": "user", "content": str(i)} for i in range(4)]
    hashes = make_fingerprints(messages, ())
    assert [make_fingerprints(messages[:k], ())[-1] for k in range(5)] == hashes


def test_values_that_fast_json_refuses_have_fingerprints_too() -> None:
    values = [2**70, 2**70 + 1, "\ud800", "\ud801"]
    hashes = [make_fingerprints([], [{"function": {"default": value}}])[0] for value in values]
    assert len(set(hashes)) == len(values)
