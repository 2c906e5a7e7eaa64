"""Nodes tell one another by files how far they are."""

import stat
from pathlib import Path

import pytest

from mcore_rl.cluster.node_agent.job import FAILED, STARTED, Note, Rendezvous


def test_nothing_is_known_before_it_is_told(tmp_path: Path) -> None:
    mine, other = Rendezvous(tmp_path / "job" / "1"), Rendezvous(tmp_path / "job" / "1")
    mine.open()
    other.open()
    assert other.head_address() is None and other.status() is None and other.note_of(0) is None
    assert not other.is_asked_to_stop()
    mine.publish("10.0.0.1:6379")
    mine.note(0, Note(STARTED))
    mine.note(0, Note(FAILED, "why"))
    mine.finish(0)
    (tmp_path / "job" / "1" / "stop").touch()
    assert (other.head_address(), other.status()) == ("10.0.0.1:6379", 0)
    assert other.note_of(0) == Note(FAILED, "why")
    assert other.is_asked_to_stop()


def test_the_token_is_the_owners_alone_and_new_for_each_attempt(tmp_path: Path) -> None:
    tokens = []
    for attempt in ("0", "1"):
        rendezvous = Rendezvous(tmp_path / attempt)
        rendezvous.open()
        rendezvous.make_token()
        assert stat.S_IMODE(rendezvous.token.stat().st_mode) == 0o600
        tokens.append(rendezvous.token.read_text())
    assert len(set(tokens)) == 2 and min(map(len, tokens)) == 64


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="it must lie where every node can write"):
        Rendezvous(tmp_path / "file" / "job").open()
