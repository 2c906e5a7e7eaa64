"""The table of a run's engines."""

from mcore_rl.run.engine_requests import format_engines


def test_engines_are_shown_with_their_versions_or_why_they_do_not_serve() -> None:
    engines = [
        (0, "http://10.0.0.2:30877", "node node1", "serves"),
        (2, "-", "node node2", "is being started"),
        (3, "http://10.0.0.3:1", "this node", "out: it is being drained"),
    ]
    assert format_engines(engines, version=12).splitlines() == [
        "engine  address                node        state",
        "0       http://10.0.0.2:30877  node node1  serves version 12",
        "2       -                      node node2  is being started",
        "3       http://10.0.0.3:1      this node   out: it is being drained",
    ]
