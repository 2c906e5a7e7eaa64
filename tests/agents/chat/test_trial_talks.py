"""Trial conversations are valid, repeat kinds of turns, and are the same each time."""

from mcore_rl.agents.chat.shortcut import make_excerpt, make_trial_talks


def test_trials_end_with_an_answer_whose_calls_get_results():
    for talk in make_trial_talks(50):
        answer = talk.history[-1]
        assert answer["role"] == "assistant" and talk.new
        told = [message["tool_call_id"] for message in talk.new if message["role"] == "tool"]
        assert told == [call["id"] for call in answer.get("tool_calls", ())]


def test_most_trials_have_something_to_leave_out():
    excerpts = [make_excerpt(talk.history, ()) for talk in make_trial_talks(100)]
    assert sum(excerpt is not None for excerpt in excerpts) > 80


def test_trials_do_not_depend_on_chance():
    assert list(make_trial_talks(5)) == list(make_trial_talks(5))
    assert list(make_trial_talks(5)) != list(make_trial_talks(5, seed=1))
