"""A finding: one line of the report on a machine.

Prints findings: a table for people, or a JSON line each and a summary.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from typing import Any, Literal, TextIO

Outcome = Literal["ok", "warning", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "warning", "failed")


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    text      what was found, with the values
    remedy    what to do about it; empty only if the outcome is ok
    figures   measurements by name with unit
    node      name of the node on which it was found; empty if there is one node alone
    """

    check: str
    outcome: Outcome
    text: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    node: str = ""

    def __post_init__(self) -> None:
        assert self.outcome in OUTCOMES, self
        assert (self.outcome == "ok") == (not self.remedy), self

    def name_node(self, node: str) -> "Finding":
        """Return the same finding with the name of its node."""
        return replace(self, node=node)


def ok(check: str, text: str, **figures: Any) -> Finding:
    return Finding(check, "ok", text, figures=figures)


def warn(check: str, text: str, remedy: str, **figures: Any) -> Finding:
    return Finding(check, "warning", text, remedy, figures)


def fail(check: str, text: str, remedy: str, **figures: Any) -> Finding:
    return Finding(check, "failed", text, remedy, figures)


# Not rich: the machine that is checked may lack it.
COLORS: dict[Outcome, str] = {"ok": "32", "warning": "33", "failed": "1;31"}


def has_failed(findings: Sequence[Finding]) -> bool:
    return any(finding.outcome == "failed" for finding in findings)


def print_report(
    findings: Sequence[Finding], out: TextIO, *, as_json: bool, seconds: float, num_nodes: int = 1
) -> None:
    """Print a line for each finding and a summary; in color only on a terminal."""
    summary = summarize(findings, seconds, num_nodes)
    if as_json:
        for finding in findings:
            print(json.dumps(asdict(finding)), file=out)
        print(json.dumps(summary), file=out, flush=True)
        return
    colored = out.isatty() and not os.environ.get("NO_COLOR")
    for line in make_table(findings, colored=colored):
        print(line, file=out)
    counts = ", ".join(f"{summary['summary'][outcome]} {outcome}" for outcome in OUTCOMES)
    print(f"{counts}; {seconds:.1f} s", file=out, flush=True)


def summarize(findings: Sequence[Finding], seconds: float, num_nodes: int) -> dict[str, Any]:
    counts = Counter(finding.outcome for finding in findings)
    return {
        "summary": {outcome: counts[outcome] for outcome in OUTCOMES},
        "failed": [_name_finding(finding) for finding in findings if finding.outcome == "failed"],
        "seconds": round(seconds, 1),
        "date": date.today().isoformat(),
        "nodes": num_nodes,
    }


def make_table(findings: Sequence[Finding], *, colored: bool) -> list[str]:
    """Return lines: outcome, node, check, text, and below it the remedy.

    What several nodes have alike is one line.
    """
    rows = _merge(findings)
    width = max((len(_name_finding(finding)) for finding in rows), default=0)
    lines = []
    for finding in rows:
        word = f"{finding.outcome:7}"
        if colored:
            word = f"\x1b[{COLORS[finding.outcome]}m{word}\x1b[0m"
        lines.append(f"{word}  {_name_finding(finding):{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':{9 + width}}  -> {finding.remedy}")
    return lines


def _merge(findings: Sequence[Finding]) -> list[Finding]:
    """Merge the findings of several nodes that differ in nothing but the node, or are all ok."""
    merged: dict[tuple[str, ...], list[Finding]] = {}
    for number, finding in enumerate(findings):
        # The first words tell the folders of "space" from one another.
        texts = (finding.text.partition(":")[0],) if finding.outcome == "ok" else (finding.text,)
        alone = () if finding.node else (str(number),)
        key = (finding.check, finding.outcome, *texts, *alone)
        merged.setdefault(key, []).append(finding)
    return [_merge_alike(alike) for alike in merged.values()]


def _merge_alike(alike: Sequence[Finding]) -> Finding:
    first = alike[0]
    nodes = list(dict.fromkeys(finding.node for finding in alike))
    if len(nodes) == 1:
        return first
    shown = ", ".join(nodes) if len(nodes) <= 3 else f"{nodes[0]} and {len(nodes) - 1} others"
    text = first.text
    if any(finding.text != text for finding in alike):
        text = f"{text} ({first.node}; --json has all)"
    return replace(first, node=shown, text=text)


def _name_finding(finding: Finding) -> str:
    return f"{finding.node}: {finding.check}" if finding.node else finding.check
