"""The export of a finished run on the Hugging Face hub, or why it is not there."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.fake_hub import TOKEN, serve_hub

UPLOAD = """
import sys
from pathlib import Path
from mcore_rl.logs.progress import tell_progress
from mcore_rl.run.hub_upload import upload_export
with tell_progress(True):
    upload_export("me/policy", Path(sys.argv[1]), 40)
"""
FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 40}


def upload(folder: Path, endpoint: str, **environment: str) -> str:
    """In a process of its own, because huggingface_hub reads the environment when it is imported;
    return what is printed.
    """
    variables = {**os.environ, "HF_HOME": str(folder.parent / "home"), "HF_ENDPOINT": endpoint}
    variables = {key: value for key, value in variables.items() if key != "HF_HUB_OFFLINE"}
    argv = [sys.executable, "-c", UPLOAD, str(folder)]
    done = subprocess.run(
        argv, env={**variables, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_an_export_becomes_a_commit_of_a_private_repository_or_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    with serve_hub({}, {}) as (endpoint, hub):
        offline = upload(folder, endpoint, HF_TOKEN=TOKEN, HF_HUB_OFFLINE="1")
        assert "not uploaded, as HF_HUB_OFFLINE is set: 2 files" in offline and not hub.repos
        refused = upload(folder, endpoint, HF_TOKEN="hf_wrong")
        assert "me/policy was not uploaded: " in refused and "401" in refused
        assert f"repeat it by: hf upload me/policy {folder}" in refused and not hub.repos
        printed = upload(folder, endpoint, HF_TOKEN=TOKEN)
    assert dict(hub.repos) == {"models/me/policy": FILES}
    assert hub.messages == ["private", "weights after step 40"]
    assert "uploaded to https://huggingface.co/models/me/policy/commit/" in printed
    gone = upload(folder, endpoint, HF_TOKEN=TOKEN)
    assert "me/policy was not uploaded: " in gone
