"""Decodes an image of any mode to RGB, after its header has told that it is small enough.

    bytes --> header: format, size, orientation --> allowed? --> pixels, RGB, upright

The header is read first, since a few kilobytes can decode to gigabytes of pixels.
"""

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from mcore_rl.data.images.encoded import BadImageError, EncodedImage

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The formats that are decoded. Others of Pillow start programs (EPS) or are rarely tested."""
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF's orientation -> what turns the image upright. From 5 on, width and height change places."""
MAX_RATIO = 200
"""Longest side to shortest; the processors of Qwen2-VL refuse more."""
WHITE = (255, 255, 255, 255)


@dataclass(frozen=True)
class ImageSize:
    """Pixels of an image as it is shown, after EXIF's orientation."""

    width: int
    height: int


def read_size(image: EncodedImage, max_pixels: int) -> ImageSize:
    """Return the size that the header tells; no pixel is decoded.

    Raises BadImageError for an unknown or damaged format, more than `max_pixels` pixels, or a side
    more than 200 times as long as the other.
    """
    with _open_image(image) as opened:
        width, height = opened.size
        if _orientation(opened) >= 5:
            width, height = height, width
    if not width or not height:
        raise BadImageError(f"{image.where} has no pixels ({width} x {height}): remove it")
    if width * height > max_pixels:
        raise BadImageError(
            f"{image.where} has {width} x {height} pixels, {max_pixels} are allowed: shrink it, or"
            " remove the row"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise BadImageError(
            f"{image.where} has {width} x {height} pixels, and one side is more than {MAX_RATIO}"
            " times as long as the other: crop it, or remove the row"
        )
    return ImageSize(width, height)


def decode(image: EncodedImage) -> Image.Image:
    """Return the image, or the first frame of an animation, in RGB and upright.

    What is transparent becomes white. 16-bit gray is scaled to 8 bits. Call `read_size` first.
    Raises BadImageError if its data are damaged.
    """
    with _open_image(image) as opened:
        orientation = _orientation(opened)
        opened.load()
        rgb = _rgb(opened)
        return rgb.transpose(TURNS[orientation]) if orientation in TURNS else rgb


def _orientation(opened: Image.Image) -> int:
    """Return EXIF's orientation as far as it stands before the pixels; 1 is upright.

    Pillow itself turns TIFF. For PNG, its getexif() would decode the pixels.
    """
    if opened.format == "TIFF":
        return 1
    exif = Image.Exif()
    if opened.format != "PNG":
        exif = opened.getexif()
    elif "exif" in opened.info:
        exif.load(opened.info["exif"])
    orientation = exif.get(ORIENTATION, 1)
    return orientation if orientation in TURNS else 1


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or image.mode == "I":
        return image.convert("I").point(lambda value: value / 257).convert("L").convert("RGB")
    if image.has_transparency_data:
        upper = image.convert("RGBA")
        lower = Image.new("RGBA", upper.size, WHITE)
        return Image.alpha_composite(lower, upper).convert("RGB")
    return image.convert("RGB")


@contextmanager
def _open_image(image: EncodedImage) -> Iterator[Image.Image]:
    """Open the image, and turn Pillow's errors on damaged data into BadImageError."""
    damage = (
        *(OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError),
        *(struct.error, OverflowError, AttributeError, ZeroDivisionError, MemoryError),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the limit here is lower than Pillow's
            with Image.open(io.BytesIO(image.data), formats=FORMATS) as opened:
                yield opened
    except BadImageError:
        raise
    except UnidentifiedImageError as error:
        raise BadImageError(
            f"{image.where} is none of {', '.join(FORMATS)} ({len(image.data)} bytes): convert it,"
            " or remove the row"
        ) from error
    except Image.DecompressionBombError as error:
        raise BadImageError(
            f"{image.where} announces far too many pixels ({str(error).partition(',')[0]}): shrink"
            " it, or remove the row"
        ) from error
    except damage as error:
        raise BadImageError(
            f"{image.where} is damaged ({type(error).__name__}: {str(error)[:200]}): replace it, or"
            " remove the row"
        ) from error
