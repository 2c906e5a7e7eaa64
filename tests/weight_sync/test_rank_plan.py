"""Which ranks may write into which; test_plan_handshake.py has the plans of whole links."""

import pytest

from mcore_rl.weight_sync.plan_handshake import find_direct_peers
from mcore_rl.weight_sync.roster import RankFacts, make_roster
from mcore_rl.weight_sync.verify import XXH3
from mcore_rl.weight_sync.wire import Link


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        (RankFacts("here", (XXH3,), writes=True), {0: ""}),
        (RankFacts("elsewhere", (XXH3,), writes=True), {}),
        (RankFacts("here", (XXH3,), writes=False), {}),
    ],
)
def test_only_trainer_ranks_of_the_machine_that_have_a_compiler_write(
    trainer: RankFacts, expected: dict[int, str]
) -> None:
    engine = RankFacts("here", (XXH3,), memory="socket")
    roster = make_roster([trainer, engine], Link("e", "", 0, "", 1, 1, 1, 1.0))
    assert find_direct_peers(roster, 1, 1) == expected
    assert find_direct_peers(roster, 1, 0) == dict.fromkeys((1,) if expected else (), "socket")
