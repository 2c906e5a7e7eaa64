"""Framing of server-sent events."""

from mcore_rl.agents.gateway import api


def test_an_event_has_one_line_of_data():
    assert api.make_event({"a": "x\n\ny"}) == b'data: {"a":"x\\n\\ny"}\n\n'
    assert api.make_event(1, "ping") == b"event: ping\ndata: 1\n\n"
