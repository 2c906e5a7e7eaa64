"""NOTICE names what was copied from others, and the licenses of packages that ask for it."""

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.support.policy import ROOT, tracked

NOTICE = (ROOT / "NOTICE").read_text()
CONDITIONS = re.compile(r"\b(L?GPL|AGPL|MPL)|Lesser General Public|Mozilla Public")
OURS = "tests/launch/golden/"


def sources() -> dict[Path, str]:
    """Return the data files of tests that say where they come from."""
    found = {}
    for path in tracked(".json"):
        held = json.loads((ROOT / path).read_text())
        if isinstance(held, dict) and "source" in held:
            found[path] = held["source"]
    return found


def test_every_data_file_of_tests_is_ours_or_says_where_it_comes_from() -> None:
    data = [path for path in tracked(".json", ".jsonl", ".txt", ".yaml", ".sh", ".parquet")
            if path.parts[0] == "tests" and not path.as_posix().startswith(OURS)]  # fmt: skip
    assert len(data) == 6
    assert set(data) == sources().keys()


def test_notice_names_the_files_with_project_and_license() -> None:
    for path, source in sources().items():
        project, version = source.split()[:2]
        assert path.as_posix() in NOTICE
        head = re.escape(f"{project} {version}, https://")
        assert re.search(head, NOTICE, re.IGNORECASE), project
        assert "Apache-2.0" in source
    named = re.findall(r"(?m)^(tests/\S+\.json)$", NOTICE)
    assert {Path(name) for name in named} == sources().keys()


def test_notice_names_direct_requirements_with_conditions_on_changed_copies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {Requirement(line).name for line in lines}
    conditional = {name for name in names if CONDITIONS.search(license_of(name))}
    assert {"pebble", "orjson", "hypothesis"} <= conditional
    missing = {name for name in conditional if not re.search(rf"\b{name}\b", NOTICE)}
    assert not missing, f"NOTICE does not name {missing}"
    assert re.search(r"(?m)^pebble, LGPL-3\.0:", NOTICE)
    assert "LESSER GENERAL PUBLIC LICENSE\n                       Version 3" in text_of("pebble")


def test_a_wheel_carries_both_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license-files"] == ["LICENSE", "NOTICE"]
    for name in ("Dockerfile", "Dockerfile.rocm"):
        assert "LICENSE NOTICE ./" in (ROOT / name).read_text()


def license_of(name: str) -> str:
    about: Any = metadata.metadata(name)
    classifiers = [each for each in about.get_all("Classifier") or () if "License" in each]
    named = about.get("License-Expression") or about.get("License") or ""
    return " ".join([named.partition("\n")[0], *classifiers])


def text_of(name: str) -> str:
    files = metadata.files(name) or []
    return next(file.read_text() for file in files if file.name.startswith("LICEN"))
