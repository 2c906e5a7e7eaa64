"""Adapters take turns: whose a step is, which prompts it draws, and how it is logged."""

from typing import Any

import pytest

from mcore_rl.data.source import ShuffledStream
from mcore_rl.run.roles.turns import TurnLog, TurnOrder, TurnPrompts, log_by_adapter
from mcore_rl.types import Prompt

SIZES = {"ada": 3, "bob": 5}


def make_prompts(seed: int = 0) -> TurnPrompts:
    streams = {}
    for name, size in SIZES.items():
        prompts = [Prompt(i, (1,), (), name, None) for i in range(size)]
        streams[name] = ShuffledStream(prompts, seed)
    return TurnPrompts(streams, list(SIZES.values()))


def test_each_step_is_the_turn_of_the_next_adapter() -> None:
    turns, told = TurnOrder(["ada", "bob", "cy"]), []
    turns.tell(told.append)
    for step in range(1, 6):
        turns.begin(step)
    assert told == ["ada", "bob", "cy", "ada", "bob"]
    assert [turns.find(step) for step in (3, 4)] == [("cy", 1), ("ada", 2)]


def test_prompts_are_those_of_the_adapter_and_go_on_where_they_were_saved() -> None:
    prompts = make_prompts()
    alone = {
        name: ShuffledStream([Prompt(i, (1,), (), name, None) for i in range(size)], 0)
        for name, size in SIZES.items()
    }

    def draw(stream: TurnPrompts, name: str) -> list[int]:
        stream.choose(name)
        begun = [stream.begin() for _ in range(2)]
        assert all(prompt.adapter == prompt.data_source == name for _, prompt in begun)
        sources = {stream.find_epoch(position)[0] for position, _ in begun}
        assert sources == {list(SIZES).index(name)}
        stream.end(position for position, _ in begun)
        return [prompt.index for _, prompt in begun]

    order = ("ada", "bob", "ada", "bob", "bob", "ada")
    wanted = [[prompt.index for prompt in alone[name].take(2)] for name in order]
    assert [draw(prompts, name) for name in order[:3]] == wanted[:3]
    assert prompts.get_place().next == 6 and prompts.get_place().rows == (3, 5)
    resumed = make_prompts()
    resumed.load_state_dict(prompts.state_dict())
    assert [draw(resumed, name) for name in order[3:]] == wanted[3:]
    with pytest.raises(ValueError, match=r"is of adapters \['ada', 'bob'\], and this run has"):
        TurnPrompts({"ada": alone["ada"]}, [3]).load_state_dict(prompts.state_dict())
    with pytest.raises(ValueError, match=r"seed=0, this run 1"):
        make_prompts(1).load_state_dict(prompts.state_dict())


class Rows:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: Any) -> None:
        self.rows.append((step, dict(metrics)))

    def log_samples(self, step: int, samples: Any, scores: Any, split: str = "train") -> None: ...


def test_metrics_of_a_step_have_the_adapters_name_too() -> None:
    rows, turns = Rows(), TurnOrder(list(SIZES))
    log = log_by_adapter(rows, turns)
    assert isinstance(log, TurnLog) and log_by_adapter(rows, None) is rows
    of_step = {"loss/total": 1.0, "reward/mean": 0.5, "time/step": 3.0}
    log.log(4, of_step)
    log.log(4, {"eval/bob/greedy_accuracy": 0.25})
    own = {
        "adapters/bob/loss/total": 1.0,
        "adapters/bob/reward/mean": 0.5,
        "adapters/bob/version": 2.0,
    }
    assert rows.rows == [(4, {**of_step, **own}), (4, {"eval/bob/greedy_accuracy": 0.25})]
