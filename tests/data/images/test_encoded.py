"""Images are found in every form that verl's column takes; other forms are refused by place."""

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.data.images.encoded import BadImageError, read_encoded_images


@pytest.mark.parametrize(
    "entry",
    [
        b"pixels",
        bytearray(b"pixels"),
        "sub/a.png",
        {"bytes": b"pixels", "path": None},
        {"bytes": None, "path": "sub/a.png"},
        {"path": "file://sub/a.png"},
        {"path": "sub/a.png", "url": "https://h/a.png"},
        {"image": {"bytes": b"pixels"}},
    ],
)
def test_every_form_gives_the_bytes(tmp_path: Path, entry: Any) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.png").write_bytes(b"pixels")
    [image] = read_encoded_images({"images": [entry]}, "a.parquet row 3", tmp_path)
    assert (image.data, image.where) == (b"pixels", "a.parquet row 3, image 0")


def test_absolute_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"pixels")
    [image] = read_encoded_images({"images": [str(tmp_path / "a.png")]}, "row 0", Path("/nowhere"))
    assert image.data == b"pixels"


def test_a_row_without_images_has_none(tmp_path: Path) -> None:
    assert read_encoded_images({}, "row 0", tmp_path) == []
    assert read_encoded_images({"images": None}, "row 0", tmp_path) == []


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("a.png", "row 0: `images` is 'a.png', not a list"),
        ([b"ok", 7], "row 0, image 1 is a int"),
        ([{"url": "x"}], r"row 0, image 0 has none of `bytes`, `path` and `image`: \['url'\]"),
        (["https://h/a.png"], "row 0, image 0 is a URL, 'https://h/a.png': nothing is downloaded"),
        ([{"path": "s3://b/a.png"}], "row 0, image 0 is a URL, 's3://b/a.png': .* give its path"),
        ([{"url": "http://h/a"}], "row 0, image 0 is a URL, 'http://h/a'"),
        ([{"image_url": {"url": "http://h/a"}}], "row 0, image 0 is a URL, 'http://h/a'"),
        (["data:image/png;base64,AAAA"], "row 0, image 0 is a URL, 'data:image/png;base64,AAAA'"),
        (["gone.png"], "row 0, image 0: '.*gone.png' cannot be read: No such file"),
        (["a\0b"], "row 0, image 0: .* cannot be read: embedded null"),
        ([b"x" * 9], "row 0, image 0 has 9 bytes, 8 are allowed"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, images: Any, message: str) -> None:
    with pytest.raises(BadImageError, match=message):
        read_encoded_images({"images": images}, "row 0", tmp_path, max_bytes=8)
