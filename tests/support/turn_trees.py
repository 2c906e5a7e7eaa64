"""Random turn trees, and the stand-in policy and environment that tests of episodes talk with."""

import random

import torch

from mcore_rl.agents.messages import Answer, EndReason
from mcore_rl.agents.turn_tree import Cut, Fork, Turn, TurnTree, at_leaves, rows_of
from mcore_rl.batches.episodes import sample_of_episode
from mcore_rl.types import EpisodeRecord, Prompt, Sample, VersionSpan, WeightVersion

NUM_EXPERTS = 8
LAYERS = 3


def random_tree(
    generator: random.Random, num_turns: int, vocabulary: int = 100, with_experts: bool = True
) -> TurnTree:
    """Return a tree whose turns continue, branch and fork at random."""
    tree = TurnTree()
    for number in range(num_turns):
        kind = generator.random() if number else 1.0
        parent = None if kind > 0.8 else number - 1 if kind > 0.3 else generator.randrange(number)
        tree.add(_random_turn(generator, tree, number, parent, vocabulary, with_experts))
    return tree


def episode_of(tree: TurnTree, cut: Cut = at_leaves) -> EpisodeRecord:
    """Return the episode of a tree that is done."""
    reward = sum(turn.reward for turn in tree.turns)
    return EpisodeRecord(rows_of(tree, cut), tree.records(), EndReason.DONE, reward)


def sample_of(tree: TurnTree, prompt: Prompt, index: int, cut: Cut = at_leaves) -> Sample:
    return sample_of_episode(prompt, index, episode_of(tree, cut), f"text {index}")


def _random_turn(
    generator: random.Random,
    tree: TurnTree,
    number: int,
    parent: int | None,
    vocabulary: int,
    with_experts: bool,
) -> Turn:
    def some_ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(generator.randrange(vocabulary) for _ in range(generator.randint(least, most)))

    context = some_ids(1 if parent is None else 0, 4)
    answer = some_ids(1, 5)
    prefix_len = 0 if parent is None else len(tree.path_ids(parent))
    middle = generator.randint(0, len(answer))
    versions = (
        VersionSpan(0, middle, WeightVersion(number)),
        VersionSpan(middle, len(answer), WeightVersion(number + 1)),
    )
    start = generator.choice([0, max(prefix_len - 1, 0)])
    num_run = prefix_len + len(context) + len(answer) - 1 - start
    experts = torch.tensor(
        [generator.randrange(NUM_EXPERTS) for _ in range(num_run * LAYERS * 2)], dtype=torch.int16
    )
    return Turn(
        number=number,
        parent=parent,
        fork=Fork.NONE if parent is not None or not number else Fork.HISTORY,
        messages=({"role": "user", "content": f"question {number}"},),
        tools=(),
        context_ids=context,
        token_ids=answer,
        logprobs=tuple(-generator.random() for _ in answer),
        versions=tuple(span for span in versions if span.stop > span.start),
        finish_reason="stop",
        answer=Answer({"role": "assistant", "content": f"answer {number}"}),
        routed_experts=experts.view(num_run, LAYERS, 2) if with_experts else None,
        experts_start=start,
        reward=float(generator.randint(-1, 2)),
    )
