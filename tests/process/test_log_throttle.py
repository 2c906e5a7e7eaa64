"""One of many like messages is written in a while, and says how many were not."""

from mcore_rl.process.clock import replace_clock
from mcore_rl.process.log_files import LogThrottle


def test_one_message_in_a_while_counts_those_held_back() -> None:
    clock_s = 100.0
    written = []
    with replace_clock(lambda: clock_s):
        throttle = LogThrottle(every_s=10.0)
        for second in range(25):
            clock_s = 100.0 + second
            if throttle.is_due(2):
                written.append((second, throttle.describe_held()))
    assert written == [
        (0, ""),
        (10, ", and 18 more before it"),
        (20, ", and 18 more before it"),
    ]
