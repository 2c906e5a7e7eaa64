"""The hook of pre-commit that reads the subject of each commit lets the right ones through."""

from pathlib import Path

import yaml
from pre_commit.languages.pygrep import main as run_hook

from tests.support.policy import ROOT

RIGHT = (
    "loops: name every stage of a step",
    "weight_sync, weights: merge two rendezvous\n\nThe body may be as long as it likes." + "x" * 80,
    "fixup! docs: split sentences that had to be read twice",
    "Merge branch 'main'",
    "a: " + "b" * 69,
)
WRONG = (
    "Name every stage of a step",
    "loops: Name every stage of a step",
    "loops: name every stage of a step.",
    "a: " + "b" * 70,
    "loops:name every stage",
    "",
)


def test_a_commit_needs_an_area_and_a_short_subject(tmp_path: Path) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    [hook] = [hook for hook in hooks if "commit-msg" in hook.get("stages", ())]
    path = tmp_path / "message"
    for message in (*RIGHT, *WRONG):
        path.write_text(message)
        refused = run_hook([*hook["args"], hook["entry"], str(path)])
        assert bool(refused) == (message in WRONG), message
