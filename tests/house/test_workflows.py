"""Workflows are valid, make targets that exist, end by themselves and ask for few rights."""

import re
from typing import Any

import pytest
import yaml

from tests.support.policy import ROOT

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
WORKFLOWS = {file.name: yaml.safe_load(file.read_text()) for file in FILES}
TRIGGERS = True
"""YAML 1.1 reads the key `on` so."""
CRON = re.compile(r"([0-9*/,-]+) ([0-9*/,-]+) ([0-9*/,-]+) ([0-9*/,-]+) ([0-9*/,-]+)")


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_is_one_of_each_kind() -> None:
    assert WORKFLOWS.keys() == {"docs.yml", "newest.yml", "nightly.yml", "test.yml"}
    crons = {
        name: [each["cron"] for each in workflow[TRIGGERS].get("schedule", ())]
        for name, workflow in WORKFLOWS.items()
    }
    assert all(CRON.fullmatch(cron) for found in crons.values() for cron in found)
    days = {name: [cron.split()[-1] for cron in found] for name, found in crons.items()}
    assert days == {"docs.yml": [], "newest.yml": ["1"], "nightly.yml": ["*"], "test.yml": []}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_jobs_end_and_steps_do_one_thing(name: str) -> None:
    for job in WORKFLOWS[name]["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 360 and job["runs-on"] == "ubuntu-24.04"
    for step in steps(WORKFLOWS[name]):
        assert ("uses" in step) != ("run" in step), step
        assert "| tee" not in step.get("run", "") or "set -o pipefail" in step["run"], step
        if "uses" in step:
            assert re.fullmatch(r"(actions|astral-sh)/[\w-]+@v\d+", step["uses"]), step["uses"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_is_made_can_be_made(name: str) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    made = {
        word
        for step in steps(WORKFLOWS[name])
        for words in re.findall(r"\bmake ([^|;>\n]*)", step.get("run", ""))
        for word in re.sub(r"\$\{\{.*?\}\}", "", words).split()
        if "=" not in word and not word.isdigit()
    }
    assert made and made <= targets, made - targets


def test_only_the_report_of_the_newest_releases_and_the_site_may_write() -> None:
    asked = {name: workflow.get("permissions") for name, workflow in WORKFLOWS.items()}
    assert asked["newest.yml"] == {"contents": "read", "issues": "write"}
    assert asked["nightly.yml"] == asked["test.yml"] == {"contents": "read"}
    assert asked["docs.yml"] == {"contents": "read", "pages": "write", "id-token": "write"}


def test_the_newest_releases_are_of_the_packages_whose_names_are_replaced() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.search(r"(?m)^NEWEST := (.*)$", makefile)
    assert named is not None
    assert {*named[1].split(), "sglang"} == {"megatron-core", "ray", "transformers", "sglang"}
    tests = re.search(r"(?m)^NEWEST_TESTS \?= (.*)$", makefile)
    assert tests is not None and all((ROOT / path).exists() for path in tests[1].split())
