"""Which key finds which session."""

import pytest

from mcore_rl.agents.gateway.api import ApiError
from mcore_rl.agents.gateway.sessions import SessionTable, read_given_key
from tests.support.episode_chats import RecordingChat


def make_table():
    return SessionTable("run-key", 1.0)


def test_sessions_have_keys_of_their_own_that_are_not_shown():
    table = make_table()
    sessions = [table.open(RecordingChat(), "http://x") for _ in range(50)]
    secrets = {s.key for s in sessions} | {s.id for s in sessions}
    assert len(secrets) == 100
    assert min(map(len, secrets)) >= 43
    assert not [secret for secret in secrets if secret in repr(sessions)]


def test_a_removed_session_is_unknown_by_key_and_by_id():
    table = make_table()
    session = table.open(RecordingChat(), "http://x")
    headers = {"Authorization": f"Bearer {session.key}"}
    found = table.find(headers, None)
    assert found.session == session
    assert table.find({}, session.id) is found
    assert table.remove(session.key) is found
    assert table.remove(session.key) is None
    for path_id in (None, session.id):
        with pytest.raises(ApiError, match="no open session"):
            table.find(headers, path_id)
    assert len(table) == 0


def test_a_session_speaks_for_itself_only():
    table = make_table()
    one = table.open(RecordingChat(), "http://x")
    two = table.open(RecordingChat(), "http://x")
    with pytest.raises(ApiError, match="another session"):
        table.find({"x-api-key": one.key}, two.id)
    for headers in ({}, {"x-api-key": one.key}, {"x-api-key": two.id}):
        with pytest.raises(ApiError, match="no open session"):
            table.find_own(headers, two.id)
    assert table.find_own({"x-api-key": "run-key"}, two.id).session == two


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, ""),
        ({"Authorization": "Bearer a"}, "a"),
        ({"Authorization": "bearer a", "x-api-key": "b"}, "a"),
        ({"Authorization": "Basic a", "x-api-key": "b"}, "b"),
        ({"Authorization": "Bearer"}, ""),
    ],
)
def test_keys_are_read_as_both_apis_send_them(headers, key):
    assert read_given_key(headers) == key


def test_a_key_of_strange_bytes_is_unknown():
    for headers in ({"x-api-key": "\udcff"}, {"x-api-key": "run-key", "X-Session-ID": "\udcff"}):
        with pytest.raises(ApiError, match="no open session"):
            make_table().find(headers, None)
