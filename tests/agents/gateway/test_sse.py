"""Framing of server-sent events."""

from mcore_rl.agents.gateway import sse


def test_an_event_has_one_line_of_data():
    assert sse.event({"a": "x\n\ny"}) == b'data: {"a":"x\\n\\ny"}\n\n'
    assert sse.event(1, "ping") == b"event: ping\ndata: 1\n\n"
