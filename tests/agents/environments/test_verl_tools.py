"""Tools of the unchanged verl, and a user's tool on its base class, in a worker."""

import asyncio
import json
from pathlib import Path

import pytest

from mcore_rl.agents.environments.environment import EnvironmentFailedError
from mcore_rl.agents.environments.pool import EnvironmentPool
from mcore_rl.agents.environments.verl_env import VerlToolsOptions
from mcore_rl.agents.environments.worker_process import EnvironmentOptions
from tests.agents.environments.foreign import needs_verl, verl_variables

SCHEMA = """
  tool_schema:
    type: function
    function:
      name: {name}
      description: Use it.
      parameters:
        type: object
        properties:
          {parameter}: {{type: string, description: what}}
        required: [{parameter}]
"""


def config_file(folder: Path, class_name: str, name: str, parameter: str) -> str:
    text = f"tools:\n- class_name: {class_name}\n  config: {{type: native}}"
    path = folder / "tools.yaml"
    path.write_text(text + SCHEMA.format(name=name, parameter=parameter))
    return str(path)


def play(options, extra_info, *answers):
    async def run():
        given = EnvironmentOptions("verl_tools", options, workers=1, variables=verl_variables())
        async with EnvironmentPool(given) as pool:
            episode = await pool.open({"messages": [], "index": 0, "extra_info": extra_info})
            steps = [await episode.step(answer) for answer in answers]
            await episode.close()
            return episode.start, steps

    return asyncio.run(run())


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}


@pytest.mark.slow
@needs_verl()
def test_gsm8k_of_verl_itself_rewards_an_answer(tmp_path):
    config = config_file(tmp_path, "verl.tools.gsm8k_tool.Gsm8kTool", "calc_gsm8k_reward", "answer")
    extra = {
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}},
    }
    start, (wrong, right, last) = play(
        {"config": config},
        extra,
        call("calc_gsm8k_reward", answer="71"),
        call("calc_gsm8k_reward", answer="72"),
        {"role": "assistant", "content": "#### 72"},
    )
    assert start.tools[0]["function"]["name"] == "calc_gsm8k_reward"
    assert wrong.messages[0]["content"] == "Current parsed answer='71' reward=0.0"
    assert wrong.reward == -0.05 and right.reward == 0.0
    assert last.done and last.reward == 1.0


@needs_verl()
def test_a_users_tool_has_its_keywords_and_is_released(tmp_path):
    config = config_file(tmp_path, "verl_classes.Notes", "notes", "note")
    keywords = {"create_kwargs": {"notes": ["a"]}, "execute_kwargs": {"mark": "!"}}
    _, (first, last) = play(
        {"config": config, "calc_reward": False},
        {"tools_kwargs": {"notes": keywords}},
        call("notes", note="b"),
        {"role": "assistant", "content": "done"},
    )
    assert first.messages[0]["content"] == "a,b!" and first.reward == 0.25
    assert last.done and last.reward == 0.0


@pytest.mark.slow
@needs_verl()
def test_a_service_that_a_tool_does_not_reach_is_not_the_policys_fault(tmp_path):
    config = config_file(tmp_path, "verl_classes.Notes", "notes", "note")
    extra = {"tools_kwargs": {"notes": {"create_kwargs": {"notes": []}}}}
    with pytest.raises(EnvironmentFailedError, match="tool notes gives no answer: status 503"):
        play({"config": config}, extra, call("notes", note="away"))


def test_senseless_options_are_named():
    with pytest.raises(ValueError, match=r"config is '/no.yaml': there is no such file"):
        VerlToolsOptions("/no.yaml")
