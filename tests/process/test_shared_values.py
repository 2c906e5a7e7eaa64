"""Values in a shared folder: there whole or not at all, and read by any process that sees it."""

from pathlib import Path

from mcore_rl.process.shared_values import SharedValues


def test_a_value_is_read_by_others_until_it_is_removed(tmp_path: Path) -> None:
    ours, theirs = SharedValues(tmp_path / "meeting"), SharedValues(tmp_path / "meeting")
    assert theirs.get("session") is None and theirs.list_names() == set()
    ours.put("session", {"id": 1})
    ours.put("session", {"id": 2})
    assert theirs.get("session") == {"id": 2}
    assert theirs.list_names() == {"session"}
    theirs.remove("session")
    theirs.remove("session")
    assert ours.get("session") is None


def test_what_is_no_value_counts_as_not_there(tmp_path: Path) -> None:
    values = SharedValues(tmp_path)
    (tmp_path / "half.json").write_text('{"id": ')
    (tmp_path / "stop").touch()
    assert values.get("half") is None
    assert values.list_names() == {"half"}
