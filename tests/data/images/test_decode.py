"""Images of every mode become upright RGB; damage and bombs are refused without decoding them."""

import io
import resource

import numpy as np
import pytest
from PIL import Image, ImageOps

from mcore_rl.data.images.decode import ImageSize, decode, read_size
from mcore_rl.data.images.encoded import BadImageError, EncodedImage
from tests.support.odd_images import bad_images, bomb, encode, good_images, noise, turned

MAX_PIXELS = 1 << 20


def encoded(data: bytes) -> EncodedImage:
    return EncodedImage(data, "a.parquet row 3, image 0")


@pytest.mark.parametrize("name", good_images())
def test_unusual_images_are_decoded(name: str) -> None:
    image = encoded(good_images()[name])
    size = read_size(image, MAX_PIXELS)
    decoded = decode(image)
    assert decoded.mode == "RGB"
    assert decoded.size == (size.width, size.height)


@pytest.mark.parametrize("name", bad_images())
def test_unusable_images_are_refused_by_place(name: str) -> None:
    image = encoded(bad_images()[name])
    with pytest.raises(BadImageError, match=r"a\.parquet row 3, image 0 (is|has|announces)"):
        read_size(image, MAX_PIXELS)
        decode(image)


@pytest.mark.parametrize(
    ("side", "message"),
    [(60_000, "announces far too many pixels"), (10_000, "10000 x 10000 pixels, 1048576 are")],
)
def test_a_bomb_is_refused_by_its_header(side: int, message: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadImageError, match=message):
        read_size(encoded(bomb(side, side)), MAX_PIXELS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_the_orientation_is_followed(kind: str, orientation: int) -> None:
    image = encoded(turned(48, 16, kind, orientation))
    decoded = decode(image)
    with Image.open(io.BytesIO(image.data)) as opened:
        wanted = ImageOps.exif_transpose(opened.convert("RGB"))
    assert np.array_equal(np.asarray(decoded), np.asarray(wanted))
    assert read_size(image, MAX_PIXELS) == ImageSize(*wanted.size)


def test_what_is_transparent_becomes_white() -> None:
    picture = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    picture.putpixel((1, 0), (10, 20, 30, 0))
    decoded = decode(encoded(encode(picture)))
    assert [decoded.getpixel((x, 0)) for x in range(2)] == [(10, 20, 30), (255, 255, 255)]


def test_deep_gray_is_scaled() -> None:
    wide = Image.fromarray(np.array([[0, 257 * 100, 65535]], dtype=np.uint16))
    assert np.asarray(decode(encoded(encode(wide))))[0, :, 0].tolist() == [0, 100, 255]


def test_an_ordinary_image_is_left_alone() -> None:
    picture = noise(7, 5)
    assert np.array_equal(np.asarray(decode(encoded(encode(picture)))), np.asarray(picture))
