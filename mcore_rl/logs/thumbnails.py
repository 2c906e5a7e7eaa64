"""Writes small copies of the images of logged samples into the run folder, each once."""

import io
from pathlib import Path

from mcore_rl.process.disk import reporting_full_disk
from mcore_rl.types import PromptImage

FOLDER = "images"
SIDE = 256
"""Pixels of the longer side, at most."""


class Thumbnails:
    """The images of a run folder; `images/<hash>.png`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def path(self, image: PromptImage) -> str:
        """Return the path of an image's copy in the run folder, and write it if it is new."""
        path = Path(FOLDER, f"{image.digest[:16]}.png")
        file = self._run_dir / path
        if not file.exists():
            with reporting_full_disk(file):
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(_small(image.data))
        return str(path)


def _small(data: bytes) -> bytes:
    from PIL import Image  # runs without images do without it

    with Image.open(io.BytesIO(data)) as opened:
        image = opened.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
