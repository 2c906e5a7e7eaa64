"""Interactions of the unchanged verl, and a user's own on its base class, in a worker."""

from collections.abc import Callable, Iterator

import pytest

from mcore_rl.agents.environments.environment import EnvironmentFailedError, Step
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.verl_env import VerlInteractionOptions
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from tests.agents.environments.foreign import needs_verl, verl_variables
from tests.agents.environments.pools import kept_pool

CONFIG = """
interaction:
- name: gsm8k
  class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
  config: {}
- name: echo
  class_name: verl_classes.Echo
  config: {}
"""


MAX_TURNS = 3


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Step]]]:
    """play(keywords of the interaction, *answers), in a worker that has imported verl once."""
    config = tmp_path_factory.mktemp("verl") / "interactions.yaml"
    config.write_text(CONFIG)
    options = EnvironmentOptions(
        "verl_interaction",
        {"config": str(config), "max_turns": MAX_TURNS},
        workers=1,
        variables=verl_variables(),
    )

    def play_one(keywords: dict[str, str], *answers: str) -> list[Step]:
        async def use(pool: EnvironmentPool) -> list[Step]:
            prompt = [{"role": "user", "content": "q"}]
            extra = {"interaction_kwargs": keywords}
            episode = await pool.open({"messages": prompt, "index": 0, "extra_info": extra})
            steps = []
            for answer in answers:
                steps.append(await episode.step({"role": "assistant", "content": answer}))
            await episode.close()
            return steps

        return call(use)

    with kept_pool(options) as call:
        yield play_one


@pytest.mark.slow
@needs_verl()
def test_gsm8k_of_verl_itself_asks_again_until_the_answer_is_right(play):
    wrong, right = play({"name": "gsm8k", "ground_truth": "72"}, "#### 71", "#### 72")
    assert not wrong.done and wrong.reward == 0.0
    assert wrong.messages[0]["role"] == "user" and "incorrect" in wrong.messages[0]["content"]
    assert right.done and right.reward == 1.0 and right.end_reason == ""


@needs_verl()
def test_a_users_interaction_sees_the_conversation_and_the_turns_are_bounded(play):
    keywords = {"name": "echo", "prefix": "> "}
    first, second, third = play(keywords, "hi", "ho", "hum")
    assert first.messages == [{"role": "user", "content": "> hi"}]
    assert first.reward == 0.5 and first.metrics == {"len": 2, "turns": 1}
    assert not second.done and second.metrics == {"len": 4, "turns": 2}
    assert third.done and third.end_reason == "max_turns" and third.metrics["len"] == 6
    (bye,) = play(keywords, "bye")
    assert bye.done and bye.messages == []


@needs_verl()
def test_a_task_without_the_name_of_an_interaction_is_named(play):
    with pytest.raises(
        EnvironmentFailedError, match=r"name of the task is None: .* has gsm8k, echo"
    ):
        play({}, "hi")


def test_senseless_options_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"config is '/no.yaml': there is no such file"):
        VerlInteractionOptions("/no.yaml")
    with pytest.raises(ValueError, match="max_turns is -1"):
        VerlInteractionOptions(__file__, max_turns=-1)
