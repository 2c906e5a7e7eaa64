"""Paths of a recipe as the nodes of a job see them: here, on a mount, in the image, or nowhere."""

from pathlib import Path

import pytest

from launch.mounts import find_place
from launch.options import KubeRayOptions, LocalOptions, SkyPilotOptions, SlurmOptions
from mcore_rl.config.shipped import RECIPES_DIR

SHIPPED = "recipes/rewards/math.py"


def test_jobs_of_this_machines_files_see_them_all() -> None:
    for options in (LocalOptions(), SlurmOptions()):
        place = find_place("/runs/a", options)
        assert place.is_here
        assert place.look("data.train", "a.jsonl") == Path("a.jsonl")
    assert not find_place("/runs/a", SlurmOptions(python="/env/bin/python")).is_here


def test_a_container_sees_its_mounts_at_their_places(tmp_path: Path) -> None:
    mounts = ["/lustre/models:/models:ro", "/lustre/data"]
    options = SlurmOptions(container="pyxis", image="i", mounts=mounts, image_folders=["/opt/code"])
    place = find_place("/runs/a", options)
    assert not place.is_here
    assert place.look("model.path", "/models/q") == Path("/lustre/models/q")
    assert place.look("data.train", "/lustre/data/a.jsonl") == Path("/lustre/data/a.jsonl")
    assert place.look("model.path", "/runs/a/hf") == Path("/runs/a/hf")
    assert place.look("reward.path", "/opt/code/r.py") is None
    assert place.look("reward.path", SHIPPED) == RECIPES_DIR / "rewards" / "math.py"
    with pytest.raises(ValueError, match=r"/lustre/models/q lies in no folder .*launch.mounts=\["):
        place.look("model.path", "/lustre/models/q")
    with pytest.raises(ValueError, match=r"a.jsonl is relative, .*\(they have /lustre/da"):
        place.look("data.train", "a.jsonl")


def test_apptainer_mounts_the_working_folder_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = find_place("/runs/a", SlurmOptions(container="apptainer", image="i"))
    assert place.look("data.train", "a.jsonl") == tmp_path / "a.jsonl"
    assert place.look("data.train", str(Path.home() / "a.jsonl")) == Path.home() / "a.jsonl"
    with pytest.raises(ValueError, match=r"/lustre/a.jsonl lies in no folder"):
        place.look("data.train", "/lustre/a.jsonl")


def test_what_is_on_a_mount_of_other_machines_cannot_be_seen_from_here() -> None:
    for options, remedy in (
        (KubeRayOptions(claims={"runs": "/mnt"}), "launch.claims={<claim>: <folder>}"),
        (SkyPilotOptions(volumes={"/mnt": "v"}), "launch.volumes={<folder>: <volume>}"),
        (SkyPilotOptions(buckets={"/mnt": "s3://b"}), "or launch.buckets"),
    ):
        place = find_place("/mnt/a", options)
        assert not place.is_here
        assert place.look("model.path", "/mnt/q") is None
        with pytest.raises(ValueError, match="lies in no folder") as error:
            place.look("model.path", "/q")
        assert remedy in str(error.value)
    with pytest.raises(ValueError, match="they have no folder of yours"):
        find_place("/mnt/a", KubeRayOptions()).look("model.path", "/q")
