"""Memory of a session."""

from mcore_rl.agents.gateway.api import Memory, remember_arguments
from tests.support.episode_chats import think_and_call
from tests.support.gateway_answers import answered


def test_the_text_of_every_calls_arguments_is_kept():
    memory = Memory()
    remember_arguments(answered(think_and_call('{"a":  1}', "{}")), memory)
    assert memory.arguments == {"call_0": '{"a":  1}', "call_1": "{}"}
