"""Orders to a running command and its answers, through files in its folder."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from mcore_rl.process import orders
from mcore_rl.process.orders import FOLDER, Order, OrderDesk, give_order


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[OrderDesk]:
    desk = OrderDesk(tmp_path)
    with desk.open():
        yield desk


@pytest.fixture
def giving(tmp_path: Path) -> Iterator[Future[str]]:
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(give_order, tmp_path, {"do": "drain", "engine": 1}, 20.0)


def take_one(desk: OrderDesk) -> Order:
    while not (taken := desk.take()):
        pass
    [order] = taken
    assert order.words == {"do": "drain", "engine": 1}
    return order


def test_an_order_is_taken_once_and_answered(
    desk: OrderDesk, giving: Future[str], tmp_path: Path
) -> None:
    order = take_one(desk)
    assert desk.take() == [] and not giving.done()
    desk.answer(order, "engine 1 has ended", is_done=True)
    assert giving.result(20) == "engine 1 has ended"
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["open"]


def test_a_refusal_is_told_as_wrong_input(desk: OrderDesk, giving: Future[str]) -> None:
    desk.answer(take_one(desk), "there is no engine 1", is_done=False)
    with pytest.raises(ValueError, match=r"^there is no engine 1$"):
        giving.result(20)


def test_a_file_that_is_no_order_is_dropped(desk: OrderDesk, tmp_path: Path) -> None:
    for text in ("", "{", "7"):
        (tmp_path / FOLDER / "x.order").write_text(text)
        assert desk.take() == []
    (tmp_path / FOLDER / "y.order").write_text(json.dumps({"do": "list"}))
    assert desk.take() == [Order("y", {"do": "list"})]


def test_a_command_that_ended_or_was_killed_takes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"no command that takes orders runs in .*"):
        give_order(tmp_path, {"do": "list"}, 1.0)
    monkeypatch.setattr(orders, "TAKEN_S", 0.5)
    desk = OrderDesk(tmp_path)
    with desk.open():
        with pytest.raises(RuntimeError, match=r"took no order for 0\.5 s: it was killed"):
            give_order(tmp_path, {"do": "list"}, 1.0)
        assert desk.take() == [], "an order that nobody waits for is taken back"
    with pytest.raises(ValueError, match="no command"):
        give_order(tmp_path, {"do": "list"}, 1.0)


def test_a_command_that_never_answers_is_told(desk: OrderDesk, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        giving = threads.submit(give_order, tmp_path, {"do": "drain", "engine": 1}, 0.3)
        take_one(desk)
        with pytest.raises(RuntimeError, match=r"did not say how it ended for 0\.3 s: see .*log"):
            giving.result(20)


def test_a_command_that_ends_with_an_order_under_way_is_told(tmp_path: Path) -> None:
    desk = OrderDesk(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        with desk.open():
            giving = threads.submit(give_order, tmp_path, {"do": "drain", "engine": 1}, 20.0)
            take_one(desk)
        with pytest.raises(RuntimeError, match=r"ended before the order was carried out"):
            giving.result(20)
