"""CartPole written by hand says and pays what the gymnasium adapter does by options."""

import re
from pathlib import Path

import yaml

from mcore_rl.agents.environments.gymnasium_env import GymnasiumEnvironment, GymnasiumOptions
from recipes.tools.cartpole import CartPole
from tests.support.policy import ROOT, read

RECIPE = yaml.safe_load((ROOT / "recipes/tiny_agent_cartpole.yaml").read_text())
TASK = {"messages": [{"role": "user", "content": ""}], "extra_info": {"seed": 7}, "index": 0}


def test_both_give_the_same_words_and_rewards() -> None:
    by_hand = CartPole()
    by_options = GymnasiumEnvironment(GymnasiumOptions(**RECIPE["agents"]["options"]))
    begun, told = by_hand.reset(TASK), by_options.reset(TASK)
    assert begun.messages[-1]["content"] == str(told.messages[-1]["content"]).strip()
    turns = 0
    is_over = False
    while not is_over:
        answer = {"role": "assistant", "content": ("left", "right")[turns % 3 == 0]}
        mine, other = by_hand.step(answer), by_options.step(answer)
        assert (mine.reward, mine.done) == (other.reward, other.done)
        is_over = mine.done
        assert is_over or mine.messages == other.messages
        turns += 1
    assert turns > 3


def test_a_word_that_is_no_action_ends_the_game() -> None:
    environment = CartPole()
    environment.reset(TASK)
    step = environment.step({"role": "assistant", "content": "up"})
    assert step.done and step.reward == 0.0


def test_the_document_shows_this_file() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", read(Path("docs/agents.md")), re.M | re.S)
    code = (ROOT / "recipes/tools/cartpole.py").read_text().partition('"""\n\n')[2]
    assert code in blocks
