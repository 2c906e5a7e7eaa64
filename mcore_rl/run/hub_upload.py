"""Uploads a finished run's export to the Hugging Face hub."""

from pathlib import Path

from httpx import HTTPError
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from mcore_rl.logs.progress import say, tell_stage


def upload_export(repo: str, folder: Path, step: int) -> None:
    """Upload an export as the newest commit of `repo`, and print where it is.

    A repository that is not there is created, private. The export stays as it is. An upload that
    fails is told with the command that repeats it, as everything else of the run is done. With
    HF_HUB_OFFLINE=1 the files are counted, and stay here.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    what = f"{len(files)} files, {size / 1e9:.3g} GB, of {folder}"
    if constants.HF_HUB_OFFLINE:
        say(f"not uploaded, as HF_HUB_OFFLINE is set: {what} to {repo}")
        return
    try:
        with tell_stage(f"uploading {what} to {repo}", is_told=True):
            api = HfApi()
            api.create_repo(repo, private=True, exist_ok=True)
            message = f"weights after step {step}"
            done = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except (HfHubHTTPError, HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        say(f"{repo} was not uploaded: {reason}; repeat it by: hf upload {repo} {folder}")
        return
    say(f"uploaded to {done.commit_url}")
