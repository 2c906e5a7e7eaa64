"""The example of an environment plays episodes in a worker process, as a recipe names it."""

from mcore_rl.agents.messages import EpisodeTask
from mcore_rl.config.recipe import load_recipe
from tests.agents.environments.pools import in_pool, play
from tests.support.policy import ROOT, read

SETTINGS = [
    "agents.environment=examples/own_environment.py:HigherLower",
    "agents.options={max_guesses:3}",
]


def test_it_tells_higher_or_lower_and_rewards_the_number() -> None:
    agents = load_recipe("tiny_agent_calculator", SETTINGS).agents
    options = {"max_guesses": agents.options["max_guesses"]}
    task = EpisodeTask((), "arithmetic", "41", index=0, sample_index=0)

    async def play_both(pool):
        return await play(pool, ["20", "60", "it is 41"], task), await play(
            pool, ["none", "40", "42"], task
        )

    kind = f"{ROOT}/{agents.environment}"
    right, wrong = in_pool(play_both, kind=kind, options=options)
    texts = [step.messages[0]["content"] for step in right[:2]]
    assert texts == ["My number is higher.", "My number is lower."]
    assert right[-1].reward == 1.0 and right[-1].done
    assert wrong[0].messages[0]["content"] == "That is no number."
    assert wrong[-1].done and not any(step.reward for step in wrong)


def test_it_takes_40_lines() -> None:
    code = read(ROOT / "examples/own_environment.py").split('"""\n')[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
