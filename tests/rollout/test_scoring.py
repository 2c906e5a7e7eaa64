"""Log-probs of given tokens from an engine, and which failures may be tried again."""

import asyncio
from collections.abc import Iterator

import pytest

from mcore_rl.process.event_loop import EventLoop
from mcore_rl.process.network import find_free_port
from mcore_rl.rollout.scoring import UnreachableError, score_sequences
from mcore_rl.rollout.transport import RolloutError
from tests.support.fake_sglang import FakeSGLang
from tests.support.scoring_engines import ScoringEngine


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def test_every_token_but_the_first_is_scored(loop: EventLoop) -> None:
    engine = ScoringEngine(loop, weight=0.5)
    scored = loop.run(score_sequences(engine.url, [[2, 4, 6], [8, 10]], 5.0))
    assert scored == [[-2.0, -3.0], [-5.0]]
    assert loop.run(score_sequences(engine.url, [], 5.0)) == []


@pytest.mark.parametrize(("status", "kind"), [(503, UnreachableError), (400, RolloutError)])
def test_a_refusal_names_the_engine_and_its_answer(
    loop: EventLoop, status: int, kind: type[RolloutError]
) -> None:
    engine = FakeSGLang(loop)
    engine.answer = lambda body: (status, "out of order")
    with pytest.raises(
        RolloutError, match=f"{engine.url} scored nothing: HTTP {status}: out of order"
    ) as caught:
        loop.run(score_sequences(engine.url, [[1, 2]], 5.0))
    assert type(caught.value) is kind


def test_an_absent_engine_is_unreachable() -> None:
    url = f"http://127.0.0.1:{find_free_port('127.0.0.1')}"
    with pytest.raises(UnreachableError, match=f"{url} scored nothing"):
        asyncio.run(score_sequences(url, [[1, 2]], 5.0))


def test_too_few_log_probs_are_refused(loop: EventLoop) -> None:
    engine = FakeSGLang(loop)
    engine.answer = lambda body: (200, {"meta_info": {"input_token_logprobs": [[None, 1, None]]}})
    with pytest.raises(RolloutError, match="scored 1 tokens of a sequence of 2 from token 0 on"):
        loop.run(score_sequences(engine.url, [[1, 2]], 5.0))


def test_a_log_prob_that_is_no_number_is_refused(loop: EventLoop) -> None:
    """SGLang writes NaN as null."""
    engine = FakeSGLang(loop)
    entries = [[None, 1, None], [-0.5, 2, None], [None, 3, None]]
    engine.answer = lambda body: (200, {"meta_info": {"input_token_logprobs": entries}})
    message = rf"engine {engine.url} gives token 2 of a sequence of 3 the log-prob None"
    with pytest.raises(RolloutError, match=message) as caught:
        loop.run(score_sequences(engine.url, [[1, 2, 3]], 5.0))
    assert type(caught.value) is RolloutError, "another try gives the same"
