"""The least loaded of many things."""

import random

from mcore_rl.rollout.collector_pool import LeastLoaded


def test_it_is_what_a_look_at_all_loads_finds() -> None:
    draw = random.Random(0)
    loads = [0] * 7
    least_loaded = LeastLoaded(len(loads))
    for _ in range(2000):
        assert least_loaded.least() == min(range(len(loads)), key=lambda k: loads[k])
        thing = draw.randrange(len(loads))
        change = draw.choice([1, 2, 16, -min(loads[thing], 5)])
        loads[thing] += change
        least_loaded.add(thing, change)
