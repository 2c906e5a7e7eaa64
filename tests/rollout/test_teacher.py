"""A teacher that does not answer is named in time; test_client checks its numbers."""

import pytest

from mcore_rl.config import ServedModelConfig
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.process.network import find_free_port
from mcore_rl.rollout.engine_health import EngineHealth, EngineState
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.rollout.scoring import Teacher, check_same_vocabulary
from mcore_rl.rollout.served_models import ServedEndpoint
from mcore_rl.rollout.transport import RolloutError
from mcore_rl.tasks.arithmetic import make_tokenizer
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion
from tests.support.fake_sglang import FakeSGLang

SAMPLE = Sample(
    Prompt(3, (1, 2), (), "unit", ""),
    1,
    (4,),
    (-1.0,),
    "stop",
    (VersionSpan(0, 1, WeightVersion(0)),),
    "",
)
EMPTY = Sample(Prompt(3, (1, 2), (), "unit", ""), 0, (), (), "stop", (), "")


def make_teacher(health: EngineHealth, timeout_s: float) -> Teacher:
    config = ServedModelConfig(path="unused", request_timeout_s=timeout_s)
    engines = tuple(EngineAddress(state.url, "a.log") for state in health.states)
    return Teacher(ServedEndpoint("teacher", config, engines, health, "unused"), EventLoop().run)


def test_nobody_answers_in_time() -> None:
    url = f"http://127.0.0.1:{find_free_port('127.0.0.1')}"
    message = (
        r"the teacher did not score sample 1 of prompt 3 in 0.7 s \(teacher.request_timeout_s\)"
        rf".*{url}"
    )
    with pytest.raises(RolloutError, match=message):
        make_teacher(EngineHealth([url]), 0.7)([EMPTY, SAMPLE])


def test_an_engine_that_starts_again_is_waited_for() -> None:
    health = EngineHealth(["http://a"], weights_stay=True)
    health.note([EngineState("http://a", restarts=1, healthy=False)])
    with pytest.raises(RolloutError, match=r"in 0.6 s .* last: none of its engines serves"):
        make_teacher(health, 0.6)([SAMPLE])


def test_without_a_token_there_is_nothing_to_ask() -> None:
    assert make_teacher(EngineHealth(["http://a"]), 1.0)([EMPTY]) == [()]


def test_another_vocabulary_is_refused() -> None:
    ours, theirs = make_tokenizer(), make_tokenizer()
    check_same_vocabulary(ours, theirs, "a", "b")
    theirs.add_tokens(["zebra"])
    new = len(ours.get_vocab())
    message = r"teacher.path=b: 1 tokens .* model.path=a, such as 'zebra':"
    with pytest.raises(ValueError, match=rf"{message} {new} in place of none;"):
        check_same_vocabulary(ours, theirs, "a", "b")


def test_a_log_prob_that_is_no_number_is_refused() -> None:
    loop = EventLoop()
    engine = FakeSGLang(loop)
    entries = [[None, 2, None], [None, 4, None]]
    engine.answer = lambda body: (200, {"meta_info": {"input_token_logprobs": entries}})
    health = EngineHealth([engine.url], weights_stay=True)
    health.note([EngineState(engine.url)])
    message = rf"the teacher cannot score sample 1 of prompt 3: engine {engine.url} gives token 2"
    with pytest.raises(RolloutError, match=message):
        make_teacher(health, 20.0)([SAMPLE])
    engine.stop()
    loop.close()
