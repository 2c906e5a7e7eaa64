"""Requests to a running command and its answers, through files in its folder."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from mcore_rl.process import run_requests
from mcore_rl.process.run_requests import FOLDER, RequestInbox, RunRequest, send_request


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[RequestInbox]:
    inbox = RequestInbox(tmp_path)
    with inbox.open():
        yield inbox


@pytest.fixture
def giving(tmp_path: Path) -> Iterator[Future[str]]:
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(send_request, tmp_path, {"do": "drain", "engine": 1}, 20.0)


def take_one(inbox: RequestInbox) -> RunRequest:
    while not (taken := inbox.take()):
        pass
    [request] = taken
    assert request.words == {"do": "drain", "engine": 1}
    return request


def test_a_request_is_taken_once_and_answered(
    inbox: RequestInbox, giving: Future[str], tmp_path: Path
) -> None:
    request = take_one(inbox)
    assert inbox.take() == [] and not giving.done()
    inbox.answer(request, "engine 1 has ended", is_done=True)
    assert giving.result(20) == "engine 1 has ended"
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["open"]


def test_a_refusal_is_told_as_wrong_input(inbox: RequestInbox, giving: Future[str]) -> None:
    inbox.answer(take_one(inbox), "there is no engine 1", is_done=False)
    with pytest.raises(ValueError, match=r"^there is no engine 1$"):
        giving.result(20)


def test_a_file_that_is_no_request_is_dropped(inbox: RequestInbox, tmp_path: Path) -> None:
    for text in ("", "{", "7"):
        (tmp_path / FOLDER / "x.request").write_text(text)
        assert inbox.take() == []
    (tmp_path / FOLDER / "y.request").write_text(json.dumps({"do": "list"}))
    assert inbox.take() == [RunRequest("y", {"do": "list"})]


def test_a_command_that_ended_or_was_killed_takes_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"no command that takes requests runs in .*"):
        send_request(tmp_path, {"do": "list"}, 1.0)
    monkeypatch.setattr(run_requests, "TAKEN_S", 0.5)
    inbox = RequestInbox(tmp_path)
    with inbox.open():
        with pytest.raises(RuntimeError, match=r"took no request for 0\.5 s: it was killed"):
            send_request(tmp_path, {"do": "list"}, 1.0)
        assert inbox.take() == [], "a request that nobody waits for is taken back"
    with pytest.raises(ValueError, match="no command"):
        send_request(tmp_path, {"do": "list"}, 1.0)


def test_a_command_that_never_answers_is_told(inbox: RequestInbox, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        giving = threads.submit(send_request, tmp_path, {"do": "drain", "engine": 1}, 0.3)
        take_one(inbox)
        with pytest.raises(RuntimeError, match=r"did not say how it ended for 0\.3 s: see .*log"):
            giving.result(20)


def test_a_command_that_ends_with_a_request_under_way_is_told(tmp_path: Path) -> None:
    inbox = RequestInbox(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        with inbox.open():
            giving = threads.submit(send_request, tmp_path, {"do": "drain", "engine": 1}, 20.0)
            take_one(inbox)
        with pytest.raises(RuntimeError, match=r"ended before the request was carried out"):
            giving.result(20)
