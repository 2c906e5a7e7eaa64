"""Environments of gymnasium, played by text in a worker, against the unchanged package."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.agents.environments.gymnasium_env import GymnasiumOptions
from tests.agents.environments.foreign import PYTHON, needs_agents_venv, play

TASK = {"messages": [], "index": 5, "sample_index": 1, "seed": 99, "data_source": "games"}
CARTPOLE = {"id": "CartPole-v1", "actions": ["left", "right"]}


def by_hand(code: str) -> str:
    """Return what gymnasium itself prints."""
    code = f"import gymnasium, numpy as np\n{code}"
    return subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, timeout=240, check=True
    ).stdout.strip()


@needs_agents_venv()
def test_cartpole_gives_the_observations_and_rewards_of_the_package():
    wanted = by_hand(
        "e = gymnasium.make('CartPole-v1'); o, _ = e.reset(seed=5); lines = [o]\n"
        "for _ in range(200):\n"
        "    o, r, done, _, _ = e.step(1)\n"
        "    if done: break\n"
        "    lines.append(o)\n"
        "print('\\n'.join(' '.join(str(round(float(v), 2)) for v in line) for line in lines))"
    ).splitlines()
    options = {**CARTPOLE, "instructions": "Balance.", "decimals": 2}
    start, steps = play("gymnasium", options, TASK, ["I say: left, no, right!"] * 200)
    seen = [start.messages[0]["content"].removeprefix("Balance.\n\n")]
    seen += [step.messages[0]["content"] for step in steps[:-1]]
    numbers = [[float(word) for word in line.split()] for line in seen]
    assert numbers == [[float(word) for word in line.split()] for line in wanted]
    assert all(step.reward == 1.0 for step in steps)
    assert steps[-1].done and steps[-1].messages == [] and steps[-1].end_reason == ""
    assert steps[-1].metrics == {"steps": len(steps), "parse_errors": 0}


@needs_agents_venv()
def test_an_action_may_be_taken_several_times():
    options = {**CARTPOLE, "decimals": 4}
    _, single = play("gymnasium", options, TASK, ["right"] * 40)
    _, thrice = play("gymnasium", {**options, "action_repeat": 3}, TASK, ["right"] * 40)
    assert sum(step.reward for step in thrice) == len(single)
    assert thrice[-1].done and thrice[-1].metrics["steps"] == len(single)
    seen = [step.messages for step in single]
    assert [step.messages for step in thrice[:-1]] == seen[2::3][: len(thrice) - 1]
    assert all(step.reward == 3.0 for step in thrice[:-1])


@needs_agents_venv()
def test_buckets_describe_an_observation_by_few_symbols_after_the_tasks_own_words():
    options = {
        **CARTPOLE,
        "buckets": [[], [], [-0.02, 0.0, 0.02], [-0.3, 0.3]],
        "symbols": "abcd",
        "observation": "{observation}>",
    }
    task = {**TASK, "messages": [{"role": "user", "content": "Play."}]}
    start, steps = play("gymnasium", options, task, ["right", "right"])
    assert len(start.messages) == 1 and start.messages[0]["content"].startswith("Play.\n\n")
    state = start.messages[0]["content"].removeprefix("Play.\n\n")
    assert len(state) == 3 and set(state[:2]) <= set("abcd") and state[2] == ">"
    assert steps[1].messages[0]["content"][1] == "a", "pushed to the right, the pole turns left"


def test_labels_make_a_word_of_each_number_or_symbol():
    labels = ["x", "v", "a"]
    options = GymnasiumOptions("Game-v0", labels=labels, decimals=2)
    assert options.number_text([0.123, -1.0, 2.5]) == "x0.12 v-1 a2.5"
    options = GymnasiumOptions("Game-v0", labels=labels, buckets=[[0.0], [], [1.0, 2.0]])
    assert options.bucket_text([0.1, 9.0, 1.5]) == "x1 a1"
    with pytest.raises(ValueError, match="Game-v0 observes 2 numbers, labels has 3"):
        options.number_text([0.0, 1.0])


@needs_agents_venv()
def test_answers_without_an_action_cost_a_penalty_and_then_the_episode():
    options = {**CARTPOLE, "parse_penalty": 0.25, "max_parse_errors": 2}
    _, steps = play("gymnasium", options, TASK, ["up", "left", "copyright", "left"])
    assert [step.reward for step in steps] == [-0.25, 1.0, -0.25]
    assert steps[0].messages[0]["content"] == (
        "This answer has no action. Answer with one of: left, right."
    )
    assert steps[-1].done and steps[-1].end_reason == "parse_error"
    assert steps[-1].metrics == {"steps": 1, "parse_errors": 2}


@needs_agents_venv()
@pytest.mark.parametrize(
    ("options", "answers", "rewards", "text"),
    [
        ({"id": "FrozenLake-v1", "make_options": {"is_slippery": False}}, ["2", "2"], [0, 0], "2"),
        (
            {"id": "FrozenLake-v1", "action_pattern": r"<move>(\d)</move>"},
            ["2", "<move>7</move>"],
            [0, 0],
            "This answer has no action. Answer with a number from 0 to 3.",
        ),
        (
            {
                "id": "Pendulum-v1",
                "observation": "after {step}, {values[2]:.0f}",
                "max_steps": 9,
                "decimals": -2,
            },
            ["torque -1.5"],
            [None],
            "after 1, 0",
        ),
        ({"id": "Blackjack-v1", "max_steps": 1}, ["0"], [None], None),
    ],
)
def test_other_spaces(options, answers, rewards, text):
    _, steps = play("gymnasium", options, TASK, answers)
    for step, reward in zip(steps, rewards, strict=True):
        assert reward is None or step.reward == reward
    if text is not None:
        assert steps[-1].messages[0]["content"] == text


@needs_agents_venv()
def test_samples_of_a_prompt_begin_alike_unless_told_otherwise():
    def first(options, **task):
        start, _ = play("gymnasium", {**CARTPOLE, **options}, {**TASK, **task}, [])
        return start.messages[0]["content"]

    assert first({}, seed=1) == first({}, seed=2) != first({}, index=6)
    assert first({"same_start": False}, seed=1) != first({"same_start": False}, seed=2)
    assert first({}, extra_info={"seed": 6}) == first({}, index=6)


@pytest.mark.parametrize(
    ("given_options", "text"),
    [
        ({"max_parse_errors": 0}, "max_parse_errors is 0"),
        ({"buckets": [[0.1, 0.0]]}, "bounds in rising order"),
        ({"buckets": [[0.1, 0.2]], "symbols": "ab"}, "fewer than the 2 symbols"),
        ({"actions": ["left", "left"]}, "each needs a name of its own"),
        ({"action_pattern": "("}, r"action_pattern '\('"),
        ({"observation": "{position}"}, "it may use {observation}"),
    ],
)
def test_senseless_options_are_named(given_options, text):
    with pytest.raises(ValueError, match=text):
        GymnasiumOptions("CartPole-v1", **given_options)


def test_buckets_that_do_not_fit_the_observation_are_named():
    options = GymnasiumOptions("Game-v0", buckets=[[0.0], []])
    with pytest.raises(ValueError, match="Game-v0 observes 3 numbers, buckets has bounds for 2"):
        options.bucket_text([0.0, 1.0, 2.0])


@given(
    st.lists(st.floats(-10, 10), min_size=1, max_size=9),
    st.floats(-20, 20),
    st.floats(-20, 20),
)
def test_larger_numbers_never_have_an_earlier_symbol(bounds, first, second):
    options = GymnasiumOptions("Game-v0", buckets=[sorted(bounds)])
    low, high = sorted([first, second])
    assert options.bucket_text([low]) <= options.bucket_text([high])
