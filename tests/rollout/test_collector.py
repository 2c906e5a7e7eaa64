"""A collector on fake engines: groups are sampled, kept, canceled, held back and closed."""

import random
from collections.abc import Iterator, Sequence

import pytest

from mcore_rl.agents.turn_tree import at_turns
from mcore_rl.batches.group_facts import describe_group
from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.config import RolloutConfig
from mcore_rl.process.event_loop import EventLoop
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.collector import Collector, CollectorCommands, CollectorEvents, GroupRequest
from mcore_rl.rollout.engine_health import EngineHealth, Rotation
from mcore_rl.rollout.request import Sampling
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.types import Prompt
from tests.support.fake_sglang import FakeSGLang, sampled_answer
from tests.support.turn_trees import random_tree, sample_of

CONFIG = RolloutConfig(max_response_len=3, retries=0)
SAMPLING = Sampling(3)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


class Scene:
    """A collector with one engine, in session 0."""

    def __init__(self, loop: EventLoop) -> None:
        self.run = loop.run
        self.engine = FakeSGLang(loop)
        self.store = SampleStore()
        health = EngineHealth([self.engine.url])
        transport = HttpOptions.make(CONFIG, [9], str).open
        client = RolloutClient([self.engine.address], CONFIG, transport, health)
        self.collector = Collector(client, health, self.store)
        self.run(self.collector.submit(CollectorCommands(sessions={0: 8})))

    def begin(self, *groups: int, num_samples: int = 2, cancel: Sequence[int] = ()) -> None:
        requests = [
            GroupRequest(0, group, Prompt(group, (1, 2), (), "unit", ""), num_samples, SAMPLING)
            for group in groups
        ]
        self.run(self.collector.submit(CollectorCommands(begin=requests, cancel=list(cancel))))

    def poll_events(self, num_groups: int = 1) -> CollectorEvents:
        """Gather events until that many groups have ended."""
        all_events = CollectorEvents()
        while len(all_events.finished) + len(all_events.failed) < num_groups:
            events = self.run(self.collector.poll_events(5.0))
            all_events.finished += events.finished
            all_events.failed += events.failed
            for number, num in events.num_done.items():
                all_events.num_done[number] = all_events.num_done.get(number, 0) + num
        return all_events


def test_groups_are_kept_and_only_facts_of_them_go_out(loop: EventLoop) -> None:
    scene = Scene(loop)
    scene.begin(5, 6)
    events = scene.poll_events(2)
    assert {facts.group for facts in events.finished} == {5, 6} and events.num_done == {0: 4}
    facts = events.finished[0]
    assert facts.response_lens == (3, 3) and facts.finish_reasons == ("length", "length")
    assert not facts.has_experts
    samples = scene.store.samples([facts.group] * 2, [0, 1])
    assert describe_group(facts.group, samples) == facts
    scene.run(scene.collector.submit(CollectorCommands(drop=[5])))
    assert scene.store.num_groups == 1


def test_failures_say_whether_another_try_may_help(loop: EventLoop) -> None:
    scene = Scene(loop)
    scene.engine.answer = lambda body: (503, "down")
    scene.begin(5)
    [failure] = scene.poll_events().failed
    assert failure.may_retry and "HTTP 503: down" in failure.message
    answer = sampled_answer({"sampling_params": {"max_new_tokens": 2}}, 0, weight_versions=[])
    scene.engine.answer = lambda body: (200, answer)
    scene.begin(6)
    [failure] = scene.poll_events().failed
    assert not failure.may_retry and "do not cover its 2 tokens" in failure.message
    assert scene.store.num_groups == 0


def test_a_canceled_group_leaves_nothing(loop: EventLoop) -> None:
    scene = Scene(loop)
    scene.engine.num_free = 0
    scene.begin(5)
    scene.run(scene.collector.submit(CollectorCommands(cancel=[5, 77])))
    scene.engine.resume()
    scene.begin(6)
    events = scene.poll_events()
    assert [facts.group for facts in events.finished] == [6]
    assert events.num_done == {0: 4} and scene.store.num_groups == 1


def test_a_group_that_is_canceled_as_it_begins_counts_as_done(loop: EventLoop) -> None:
    scene = Scene(loop)
    scene.begin(5, cancel=[5])
    assert scene.run(scene.collector.poll_events(5.0)).num_done == {0: 2}
    scene.begin(5)
    assert [facts.group for facts in scene.poll_events().finished] == [5]


def test_held_requests_wait_for_the_end_of_the_hold(loop: EventLoop) -> None:
    scene = Scene(loop)
    assert scene.run(scene.collector.hold(0, cut_off=True)) == 0
    scene.begin(5)
    assert scene.run(scene.collector.poll_events(0.2)).finished == [] and not scene.engine.sampled
    scene.run(scene.collector.resume(0))
    assert len(scene.poll_events().finished) == 1


def test_orders_say_which_engines_serve(loop: EventLoop) -> None:
    scene = Scene(loop)
    scene.run(
        scene.collector.submit(
            CollectorCommands(rotation=Rotation({scene.engine.url: "it is stale"}))
        )
    )
    scene.begin(5)
    [failure] = scene.poll_events().failed
    assert "no engine in rotation" in failure.message and "it is stale" in failure.message
    scene.run(scene.collector.submit(CollectorCommands(rotation=Rotation({scene.engine.url: ""}))))
    scene.begin(6)
    assert len(scene.poll_events().finished) == 1
    assert scene.run(scene.collector.idle_seconds()) > 0


def test_news_are_gathered_while_more_is_to_come(loop: EventLoop) -> None:
    scene = Scene(loop)
    scene.begin(*range(6), num_samples=1)
    events = scene.run(scene.collector.poll_events(5.0, 5.0))
    assert len(events.finished) == 6  # all at once, and no later than the last of them


def test_the_end_of_a_session_cancels_its_groups(loop: EventLoop) -> None:
    scene = Scene(loop)
    scene.engine.num_free = 0
    scene.begin(5)
    scene.run(scene.collector.submit(CollectorCommands(end=[0])))
    assert scene.run(scene.collector.poll_events(0.1)).num_done == {0: 2}
    scene.run(scene.collector.close())
    scene.engine.resume()


def test_facts_of_rows_say_which_beginnings_they_share() -> None:
    tree = random_tree(random.Random(3), 8)
    prompt = Prompt(0, (1,), (), "unit", "")
    samples = [sample_of(tree, prompt, i, at_turns) for i in range(2)]
    rows = [row for sample in samples for row in sample.episode.rows]  # type: ignore[union-attr]
    facts = [fact for of_sample in describe_group(0, samples).episode_rows for fact in of_sample]
    assert [fact.index for fact in facts] == list(range(len(rows)))
    assert [fact.num_tokens for fact in facts] == [len(row.token_ids) for row in rows]
    assert any(fact.parent >= 0 for fact in facts)
    for row, fact in zip(rows, facts, strict=True):
        if fact.parent >= 0:
            parent = rows[fact.parent].token_ids
            assert (row.token_ids[: fact.start + 1] == parent[: fact.start + 1]).all()
            assert not row.is_trained[: fact.start + 1].any()
