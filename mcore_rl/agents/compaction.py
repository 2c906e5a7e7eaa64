"""Shortens conversations before the policy answers."""

from collections.abc import Sequence

from mcore_rl.agents.messages import Message


def keep_last_answers(messages: Sequence[Message], number: int) -> list[Message]:
    """Return the first messages, up to the first answer, and what follows the last answers.

    With number=1 and  system, task, answer 1, result 1, answer 2, result 2  these are
    system, task, answer 2, result 2. With number=0 they are  system, result 2.
    """
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if len(answers) <= number:
        return list(messages)
    if not number:
        system = [message for message in messages if message.get("role") == "system"]
        return [*system, *messages[answers[-1] + 1 :]]
    return [*messages[: answers[0]], *messages[answers[-number] :]]
