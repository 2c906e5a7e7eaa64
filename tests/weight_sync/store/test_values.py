"""The contents of a store, and who is called once keys are there."""

from threading import Thread

from mcore_rl.weight_sync.store.server import Values


def test_values_are_those_set_last() -> None:
    values = Values()
    assert values.get("a") is None and not values.check(["a"]) and values.check([])
    values.set("a", b"1")
    values.set("a", b"2")
    assert values.get("a") == b"2" and values.check(["a"]) and not values.check(["a", "b"])
    assert values.count() == 1
    assert values.delete("a") and not values.delete("a")
    assert values.count() == 0


def test_values_set_together_wake_whoever_waits_for_the_last_of_them() -> None:
    values = Values()
    taken: list[list[bytes]] = []
    values.when_present(["a", "b", "c"], lambda: taken.append(values.take_all(["c", "a", "b"])))
    values.set_all({"a": b"1", "b": b"2"})
    assert taken == []
    values.set_all({"c": b"3", "d": b"4"})
    assert taken == [[b"3", b"1", b"2"]]
    assert values.count() == 1


def test_compare_set_does_what_torchs_stores_do() -> None:
    values = Values()
    assert values.compare_set("a", b"other", b"new") == b"other"
    assert values.get("a") is None
    assert values.compare_set("a", b"", b"first") == b"first"
    assert values.compare_set("a", b"", b"second") == b"first"
    assert values.compare_set("a", b"first", b"second") == b"second"


def test_sums_of_many_threads_add_up() -> None:
    values = Values()

    def add() -> None:
        for _ in range(500):
            values.add("sum", 2)

    threads = [Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values.add("sum", 0) == 4000


def test_a_waiter_is_called_once_all_its_keys_are_there() -> None:
    values = Values()
    called: list[str] = []
    assert values.when_present(["a", "b"], lambda: called.append("both")) is not None
    forgotten = values.when_present(["a", "b"], lambda: called.append("forgotten"))
    assert forgotten is not None
    values.set("b", b"")
    assert called == []
    values.forget(forgotten)
    values.set("b", b"")
    values.add("a", 1)
    assert called == ["both"]
    values.set("a", b"")
    assert called == ["both"]
    assert values.when_present(["a", "b"], lambda: called.append("at once")) is None
    assert called == ["both", "at once"]
    assert not values._waiters
