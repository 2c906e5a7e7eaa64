"""An error that names lost stores survives the way between processes and joins others."""

import pickle

from mcore_rl.process.lost_samples import SamplesLostError, find_kept, join_losses
from mcore_rl.types import GroupLease, Prompt, StoredSample

PROMPT = Prompt(0, (1,), (), "unit", "")


def test_it_comes_through_pickle_whole() -> None:
    lost = pickle.loads(pickle.dumps(SamplesLostError("collector 3 died", [3, 1])))
    assert str(lost) == "collector 3 died" and lost.stores == {1, 3}


def test_losses_are_joined_with_each_message_once() -> None:
    losses = [("a", [1]), ("", []), ("a", [1]), ("b", [2])]
    joined = join_losses([SamplesLostError(*loss) for loss in losses])
    assert str(joined) == "a; b" and joined.stores == {1, 2}


def test_samples_of_other_stores_are_kept() -> None:
    samples = [
        StoredSample(PROMPT, 0, 1, "stop", (), False, GroupLease(store, 0))
        for store in (0, 2, 1, 2)
    ]
    assert find_kept(samples, SamplesLostError("", [2])) == [0, 2]
    assert find_kept(samples, SamplesLostError("", [0, 1, 2])) == []
