"""A table for people, JSON lines for programs; colors on a terminal alone."""

import io
import json

from mcore_rl.tools.doctor.machine.finding import (
    fail,
    has_failed,
    make_table,
    ok,
    print_report,
    summarize,
    warn,
)

FOUND = [ok("python", "3.11"), warn("limits", "few", "more"), fail("shm", "full", "empty it")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(out: io.StringIO, as_json: bool = False) -> list[str]:
    print_report(FOUND, out, as_json=as_json, seconds=1.25)
    return out.getvalue().splitlines()


def test_the_table_has_outcome_check_text_and_remedy() -> None:
    assert printed(io.StringIO()) == [
        "ok       python  3.11",
        "warning  limits  few",
        "                 -> more",
        "failed   shm     full",
        "                 -> empty it",
        "1 ok, 1 warning, 1 failed; 1.2 s",
    ]


def test_only_a_terminal_gets_colors(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert printed(Terminal())[0].startswith("\x1b[32mok     \x1b[0m  python")
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(Terminal())[0].startswith("ok       python")


def test_json_lines_end_with_a_summary() -> None:
    *lines, summary = map(json.loads, printed(io.StringIO(), as_json=True))
    assert [line["outcome"] for line in lines] == ["ok", "warning", "failed"]
    assert lines[2] == {
        "check": "shm",
        "outcome": "failed",
        "text": "full",
        "remedy": "empty it",
        "figures": {},
        "node": "",
    }
    assert summary["summary"] == {"ok": 1, "warning": 1, "failed": 1}
    assert summary["failed"] == ["shm"]


def test_what_nodes_have_alike_is_one_line_and_failures_stay_apart() -> None:
    found = [
        *(ok("python", "3.11").name_node(node) for node in "abcd"),
        *(ok("write", f"{rate} MiB/s").name_node(node) for node, rate in (("a", 7), ("b", 7))),
        fail("shm", "3 MiB", "more").name_node("a"),
        fail("shm", "4 MiB", "more").name_node("b"),
    ]
    lines = make_table(found, colored=False)
    assert lines[0].split() == ["ok", "a", "and", "3", "others:", "python", "3.11"]
    assert lines[1].split() == ["ok", "a,", "b:", "write", "7", "MiB/s"]
    assert [line.split()[1] for line in lines if line.startswith("failed")] == ["a:", "b:"]


def test_a_failure_fails_and_is_named_with_its_node() -> None:
    assert has_failed(FOUND) and not has_failed(FOUND[:2])
    assert summarize([FOUND[2].name_node("n1")], 1.0, 2)["failed"] == ["n1: shm"]
