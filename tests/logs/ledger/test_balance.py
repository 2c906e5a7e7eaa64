"""Whether books balance: valid books of random runs do, and every planted fault is named."""

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.logs.ledger.balance import Balance, format_balance, make_balance

ROWS = 5
GROUP = 2
Records = list[dict[str, Any]]
LIFE = ("drawn", "sampled", "scored", "rejected", "trained", "step")


@dataclass
class Books:
    """Writes the records of a synchronous run of 3 prompts a step, as a right run would.

    `trained` is the oracle: the prompts of the steps that count, by step.
    """

    records: Records = field(default_factory=list)
    trained: dict[int, list[int]] = field(default_factory=dict)
    position: int = 0
    group: int = 0
    step: int = 0
    before: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Step -> position after it."""

    def write(self, kind: str, **fields: Any) -> None:
        self.records.append({"is": kind, **fields})

    def launch(self, step: int = 0) -> None:
        self.step, self.position, self.group = step, self.before[step], 0
        self.trained = {s: prompts for s, prompts in self.trained.items() if s <= step}
        how = {"mode": "sync", "bound": 0, "seed": 0, "rows": [ROWS]}
        self.write("launch", step=step, next=self.position, again=[], **how)

    def draw(self, num: int) -> list[tuple[int, int]]:
        """Return (position, group) of each prompt, drawn, sampled and scored."""
        drawn = []
        for _ in range(num):
            epoch, prompt = divmod(self.position, ROWS)
            self.write("drawn", at=self.position, prompts=[prompt], source=0, epoch=epoch)
            where = {"at": self.position, "group": self.group}
            self.write("sampled", **where, store=0, tokens=[3] * GROUP, ends="stop", weights=0)
            self.write("scored", group=self.group, rewards=[0, 1], differ=True)
            drawn.append((self.position, self.group))
            self.position += 1
            self.group += 1
        return drawn

    def reject(self, drawn: tuple[int, int]) -> None:
        self.write("rejected", at=drawn[0], why="equal_rewards")

    def train(self, drawn: list[tuple[int, int]], left_out: bool = False) -> None:
        self.step += 1
        groups: list[Any] = [group for _, group in drawn]
        trained, fields = groups, {}
        if left_out:
            trained = [[groups[0], 0], *groups[1:]]
            fields = {"left_out": {"no_reward": [[groups[0], 1]]}}
        self.write("trained", step=self.step, groups=trained)
        self.write("sync", version=self.step)
        self.write("step", step=self.step, groups=groups, **fields)
        self.trained[self.step] = [position for position, _ in drawn]
        self.before[self.step] = self.position


def make_books() -> Books:
    """Return 4 steps, the second with a replaced prompt, one killed step, and a resume after 2."""
    books = Books()
    books.launch()
    books.train(books.draw(3))
    replaced, *others = books.draw(4)
    books.reject(replaced)
    books.train(others, left_out=True)
    books.write("save", step=2)
    books.train(books.draw(3))
    books.draw(2)
    books.launch(2)
    books.train(books.draw(3))
    books.train(books.draw(3))
    books.write("end", how="finished")
    return books


def balance(records: Records) -> Balance:
    return make_balance(records)


def test_the_balance_counts_what_became_of_prompts_and_samples() -> None:
    found = balance(make_books().records)
    assert found.holds and found.last_step == 4 and found.ended == "finished"
    assert found.samples == {
        **{"trained": 23, "left out": 1, "rejected: equal_rewards": 2},
        **{"void: trained": 6, "void: under way": 4},
    }
    assert found.num_samples == 36 and found.left_out == {"no_reward": 1}
    of_epochs = [(e.drawn, e.trained, dict(e.rejected), e.under_way) for e in found.epochs]
    assert of_epochs == [(5, 4, {"equal_rewards": 1}, 0), (5, 5, {}, 0), (3, 3, {}, 0)]
    assert found.events["voided_steps"] == 1 and found.events["launch"] == 2
    text = format_balance(found)
    assert "steps 1 to 4: 2 launches; voided steps: 1; finished" in text
    assert text.endswith("the books balance")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_books_of_random_runs_balance(seed: int) -> None:
    """Kills come anywhere, also before the first step; a launch goes on after any earlier step."""
    generator = random.Random(seed)
    books = Books()
    books.launch()
    for _ in range(generator.randrange(1, 25)):
        choice = generator.random()
        if choice < 0.15:
            books.draw(generator.randrange(3))  # under way when the kill comes
            books.launch(generator.randrange(books.step + 1))
        elif choice < 0.4:
            replaced, *others = books.draw(4)
            books.reject(replaced)
            books.train(others)
        else:
            books.train(books.draw(3), left_out=generator.random() < 0.3)
    found = balance(books.records)
    assert found.holds, found.imbalances
    assert sum(epoch.trained for epoch in found.epochs) == sum(map(len, books.trained.values()))
    assert sum(found.samples.values()) == found.num_samples
    assert found.last_step == books.step


def find(records: Records, kind: str, number: int = 0) -> dict[str, Any]:
    return [record for record in records if record["is"] == kind][number]


def drop(kind: str, number: int = 0) -> Callable[[Records], None]:
    """Return a fault: a record of this kind was never written."""
    return lambda records: records.remove(find(records, kind, number))


def change(kind: str, number: int = 0, **fields: Any) -> Callable[[Records], None]:
    """Return a fault: a record says something else."""
    return lambda records: find(records, kind, number).update(fields)


def insert(after: str, number: int, **record: Any) -> Callable[[Records], None]:
    """Return a fault: a record that should not be there."""

    def plant(records: Records) -> None:
        records.insert(records.index(find(records, after, number)) + 1, record)

    return plant


FAULTS: dict[str, tuple[Callable[[Records], None], str]] = {
    "a step has a sample of an earlier step, too": (
        change("step", 1, groups=[4, 5, 0]),
        "step 2 has prompt 0 (epoch 0, position 0) (group 0), but step 1 trained it",
    ),
    "a sample trained twice in a step": (
        change("trained", 0, more=[[1, 0, 2]]),
        "step 1 trained sample 0 of prompt 1 (epoch 0, position 1), group 1 2 times",
    ),
    "a prompt is lost": (
        change("step", 0, groups=[0, 1]),
        "prompt 2 (epoch 0, position 2) is lost: it was neither trained nor rejected by step 1",
    ),
    "a rejection without a record": (
        drop("rejected"),
        "prompt 3 (epoch 0, position 3) is lost: it was neither trained nor rejected by step 2",
    ),
    "a step claims another sample": (
        change("step", 0, groups=[0, 1, 77]),
        "step 1 has group 77, which was never sampled",
    ),
    "a step trains what it does not name": (
        change("trained", 0, groups=[0, 1, 2, [9, 1]]),
        "step 1 trained sample 1 of group 9, which it does not name as its own",
    ),
    "a step without training": (
        drop("trained", 1),
        "step 2 has samples, but no record says that it trained any",
    ),
    "a sample neither trained nor left out": (
        change("step", 1, left_out={}),
        "step 2 has sample 1 of prompt 4 (epoch 0, position 4), group 4, did not train it, and"
        " gives no reason",
    ),
    "a sample trained and left out": (
        change("trained", 1, groups=[4, 5, 6]),
        "step 2 trained sample 1 of prompt 4 (epoch 0, position 4), group 4 and left it out",
    ),
    "a step is missing": (drop("step", 1), "step 3 follows step 1"),
    "a position passed over": (
        change("drawn", 0, at=1),
        "position 0 was passed over: 1 was drawn instead",
    ),
    "a prompt drawn twice in an epoch": (
        change("drawn", 1, prompts=[0]),
        "prompt 0 (epoch 0, position 1) was drawn before, at position 0",
    ),
    "a position drawn twice": (
        insert("drawn", 3, **{"is": "drawn", "at": 2, "prompts": [2], "source": 0, "epoch": 0}),
        "prompt 2 (epoch 0, position 2) was drawn a second time, as prompt 2",
    ),
    "a resume that leaves a prompt out": (
        change("launch", 1, next=8),
        "prompt 2 (epoch 1, position 7) is lost: it was trained by step 3, which is void, and the"
        " launch after step 2 does not draw it again",
    ),
    "a resume that draws a trained prompt again": (
        change("launch", 1, again=[1]),
        "prompt 1 (epoch 0, position 1) was trained by step 1, and the launch after step 2 draws"
        " it again",
    ),
    "a resume beyond the books": (
        change("launch", 1, step=5),
        "a launch goes on after step 5, but the books end at step 3",
    ),
    "samples of nobody's prompt": (
        insert(
            *("step", 0),
            **{"is": "sampled", "at": 0, "group": 90, "tokens": [1], "ends": "stop", "weights": 0},
        ),
        "group 90 was sampled for prompt 0 (epoch 0, position 0), not under way",
    ),
    "rejected before it was scored": (
        drop("scored", 3),
        "prompt 3 (epoch 0, position 3) was rejected (equal_rewards) before it was scored",
    ),
    "other samples after a recovery": (
        insert("step", 0, **{"is": "trained", "step": 1, "groups": [0, 1, [9, 0]]}),
        "step 1 was repeated after a recovery, and trained sample 0 of group 9, which it had not"
        " before",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    plant, expected = FAULTS[name]
    records = deepcopy(make_books().records)
    plant(records)
    found = balance(records)
    assert not found.holds
    assert any(expected in text for text in found.imbalances), found.imbalances
    assert expected in format_balance(found)


def test_no_record_of_a_prompts_life_can_be_left_out_unseen() -> None:
    """Two prompts are under way at the kill, after step 3, and are drawn again in any case: whether
    they were scored, and what step 3 had, is not asked.
    """
    unseen: list[str] = []
    records = make_books().records
    for i, record in enumerate(records):
        without = deepcopy(records[:i] + records[i + 1 :])
        if record["is"] in LIFE and balance(without).holds:
            unseen.append(record["is"])
    assert unseen == ["step", "scored", "scored"]


def test_a_repeated_step_counts_once() -> None:
    books = make_books()
    again = deepcopy(find(books.records, "trained", 1))
    books.records.insert(books.records.index(find(books.records, "step", 1)), again)
    found = balance(books.records)
    assert found.holds and found.events["repeated_steps"] == 1
    assert found.samples["trained"] == 23


def test_books_that_begin_in_the_middle_of_a_run_balance() -> None:
    """A run that an earlier version began has no records of its first steps."""
    books = Books(position=7, before={4: 7})
    books.launch(4)
    books.train(books.draw(3))
    found = balance(books.records)
    assert found.holds and found.before == 7 and found.last_step == 5
    assert [(epoch.epoch, epoch.drawn) for epoch in found.epochs] == [(1, 3)]


def test_only_some_of_many_imbalances_are_shown() -> None:
    books = Books()
    books.launch()
    books.draw(30)
    books.train([(0, 0)])
    found = balance(books.records)
    assert found.num_imbalances == 29
    text = format_balance(found)
    assert "the books do not balance: 29 imbalances" in text and "and 9 more" in text
