"""Videos are found in every form of frames that verl's column takes; files are refused by place."""

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.data.images.encoded import BadImageError
from mcore_rl.data.images.video_rule import FPS, read_encoded_videos

FRAMES = [b"one", {"bytes": b"two"}, "three.png"]


@pytest.mark.parametrize(
    ("entry", "fps"),
    [
        (FRAMES, FPS),
        ({"type": "video", "video": FRAMES}, FPS),
        ({"video": FRAMES, "fps": 4}, 4.0),
        ({"video": FRAMES, "sample_fps": 0.5, "fps": None, "max_frames": None}, 0.5),
    ],
)
def test_every_form_gives_the_frames(tmp_path: Path, entry: Any, fps: float) -> None:
    (tmp_path / "three.png").write_bytes(b"three")
    [video] = read_encoded_videos({"videos": [entry]}, "row 3", tmp_path)
    assert [frame.data for frame in video.frames] == [b"one", b"two", b"three"]
    assert (video.fps, video.where, video.frames[2].where) == (
        fps,
        "row 3, video 0",
        "row 3, video 0, frame 2",
    )


def test_a_row_without_videos_has_none(tmp_path: Path) -> None:
    assert read_encoded_videos({}, "row 0", tmp_path) == []
    assert read_encoded_videos({"videos": None}, "row 0", tmp_path) == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("a.mp4", "row 0, video 0 is a file 'a.mp4', which is not decoded: extract its frames"),
        (b"mp4", "row 0, video 0 is a file, which is not decoded"),
        ("https://h/a.mp4", "row 0, video 0 is a URL, 'https://h/a.mp4': nothing is downloaded"),
        (["https://h/1.jpg"], "row 0, video 0, frame 0 is a URL"),
        ({"video": "file:///a.mp4"}, "is a file 'file:///a.mp4', .*ffmpeg"),
        ({"video": FRAMES, "nframes": 8}, r"row 0, video 0 has \['nframes'\], which are not read"),
        ({"fps": 2}, "row 0, video 0 is None, not a list of frames"),
        ([], r"row 0, video 0 is \[\], not a list of frames"),
        ([b"x" * 9], "row 0, video 0, frame 0 has 9 bytes, 8 are allowed"),
        ([["nested"]], "row 0, video 0, frame 0 is a list"),
        ({"video": [b"x"], "fps": 0}, "row 0, video 0 has fps=0: give the frames per second"),
        ({"video": [b"x"], "sample_fps": float("nan")}, "has sample_fps=nan"),
        ({"video": [b"x"], "fps": True}, "has fps=True"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, entry: Any, message: str) -> None:
    with pytest.raises(BadImageError, match=message):
        read_encoded_videos({"videos": [entry]}, "row 0", tmp_path, max_bytes=8)


def test_the_column_is_a_list(tmp_path: Path) -> None:
    with pytest.raises(BadImageError, match=r"row 0: `videos` is 'a\.mp4', not a list of videos"):
        read_encoded_videos({"videos": "a.mp4"}, "row 0", tmp_path)
