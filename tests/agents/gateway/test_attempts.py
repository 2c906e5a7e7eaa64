"""Which request is a retry of which attempt."""

import asyncio

import pytest

from mcore_rl.agents.gateway.api import BadRequestError
from mcore_rl.agents.gateway.sessions import Attempt, Attempts, Mark, Rendered, read_mark
from mcore_rl.process.clock import now_s, replace_clock

SAME = Mark(b"same")
MARKED = Mark(b"same", is_retry=True)


def here():
    return True


def gone():
    return False


def attempt_of(state, is_connected=here, mark=SAME):
    """An attempt that is done, failed, or runs for an hour."""

    async def work():
        if state == "runs":
            await asyncio.sleep(3600)
        if state == "failed":
            raise RuntimeError
        return Rendered(0, b"x")

    return Attempt(mark, asyncio.create_task(work()), is_connected)


def claimed(kept, mark, window_s=10.0, later_s=0.0):
    """The position in `kept` of the attempt that a request with this mark takes; None: a new one.

    kept   (state, is_connected, is_delivered) of the attempts
    """

    async def run():
        attempts = Attempts(window_s)
        made = [attempt_of(state, is_connected) for state, is_connected, _ in kept]
        for attempt in made:
            attempts.add(attempt)
        await asyncio.sleep(0.01)
        for attempt, (_, _, is_delivered) in zip(made, kept, strict=True):
            attempt.is_delivered = is_delivered
        started_s = now_s()
        with replace_clock(lambda: started_s + later_s):
            found = attempts.claim(mark, here)
        for task in attempts.cancel():
            await asyncio.wait([task])
        assert len(attempts) == 0
        return None if found is None else made.index(found)

    return asyncio.run(run())


@pytest.mark.parametrize("state", ["runs", "done"])
def test_a_lost_answer_is_taken_by_the_same_request_marked_or_not(state):
    kept = [(state, here, state == "done"), (state, gone, False)]
    assert claimed(kept, SAME) == 1
    assert claimed(kept, MARKED) == 1
    assert claimed(kept, Mark(b"other", is_retry=True)) is None


@pytest.mark.parametrize(
    "kept",
    [("runs", here, False), ("done", here, True), ("done", gone, True), ("failed", gone, False)],
)
def test_the_same_request_is_a_new_sample_while_no_answer_is_lost(kept):
    assert claimed([kept], SAME) is None


def test_a_marked_retry_repeats_what_failed_before_it_joins_what_runs():
    assert claimed([("runs", here, False)], MARKED) == 0
    assert claimed([("runs", here, False), ("failed", gone, False)], MARKED) is None
    assert claimed([("done", gone, True), ("runs", here, False)], MARKED) == 1
    assert claimed([("done", gone, True), ("done", gone, True)], MARKED) == 1


def refuse(attempts, mark=SAME):
    with pytest.raises(RuntimeError), attempts.keep_arrival(mark, here):
        raise RuntimeError("the gateway is full")


@pytest.mark.parametrize("state", ["runs", "done"])
def test_a_marked_retry_of_a_refused_request_is_a_generation_of_its_own(state):
    async def run():
        attempts = Attempts(10.0)
        other = attempt_of(state)
        attempts.add(other)
        refuse(attempts)
        refuse(attempts, MARKED)
        await asyncio.sleep(0)
        assert attempts.claim(SAME, here) is None
        assert attempts.claim(MARKED, here) is None
        assert attempts.claim(MARKED, here) is None
        assert attempts.claim(MARKED, here) is other
        attempts.cancel()
        assert len(attempts) == 0

    asyncio.run(run())


def test_a_refusal_is_of_its_request_and_forgotten_after_the_window():
    async def run():
        attempts = Attempts(10.0)
        other = attempt_of("runs")
        attempts.add(other)
        refuse(attempts, Mark(b"else"))
        refuse(attempts, Mark(b"same", "key"))
        assert attempts.claim(MARKED, here) is other
        assert attempts.claim(Mark(b"same", "key"), here) is None
        refuse(attempts)
        late_s = now_s() + 11
        with replace_clock(lambda: late_s):
            assert attempts.claim(MARKED, here) is other
        assert len(attempts) == 1
        attempts.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(("is_connected", "is_new"), [(here, False), (gone, True)])
def test_a_marked_retry_takes_the_place_of_one_that_waits_if_its_client_left(is_connected, is_new):
    async def run():
        attempts = Attempts(10.0)
        other = attempt_of("runs")
        attempts.add(other)
        with attempts.keep_arrival(SAME, is_connected):
            assert attempts.claim(MARKED, here) is (None if is_new else other)
            assert attempts.claim(MARKED, here) is other
        assert attempts.claim(MARKED, here) is other
        assert len(attempts) == 1
        attempts.cancel()

    asyncio.run(run())


def test_what_ended_long_ago_is_forgotten_but_not_what_runs():
    assert claimed([("done", gone, False)], SAME, later_s=11) is None
    assert claimed([("runs", gone, False)], SAME, later_s=11) == 0


def test_a_claimed_answer_is_not_given_twice():
    async def run():
        attempts = Attempts(10.0)
        attempts.add(attempt_of("done", gone))
        await asyncio.sleep(0.01)
        assert attempts.claim(SAME, here) is not None
        assert attempts.claim(SAME, here) is None

    asyncio.run(run())


def test_a_key_finds_its_attempt_and_no_other_request_may_use_it():
    async def run():
        attempts = Attempts(10.0)
        attempts.add(attempt_of("done", here, Mark(b"same", "key")))
        await asyncio.sleep(0.01)
        assert attempts.claim(Mark(b"same", "key"), here) is not None
        assert attempts.claim(Mark(b"same", "new"), here) is None
        with pytest.raises(BadRequestError, match="Idempotency-Key"):
            attempts.claim(Mark(b"other", "key"), here)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "mark"),
    [
        ({}, Mark(b"x")),
        ({"x-stainless-retry-count": "0"}, Mark(b"x")),
        ({"x-stainless-retry-count": "2"}, Mark(b"x", "", True)),
        ({"x-stainless-retry-count": "-1"}, Mark(b"x")),
        ({"Idempotency-Key": "k"}, Mark(b"x", "k")),
    ],
)
def test_marks_are_read_off_headers(headers, mark):
    assert read_mark(headers, b"x") == mark


def test_a_long_idempotency_key_is_refused():
    with pytest.raises(BadRequestError, match="257 characters"):
        read_mark({"Idempotency-Key": "k" * 257}, b"x")
