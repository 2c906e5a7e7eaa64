"""Images of every mode, size and kind of damage, and a tiny image processor's directory."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PLACEHOLDER = "<|image_pad|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|user|>", "<|assistant|>", "<|vision_start|>", "<|vision_end|>", PLACEHOLDER]
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 4 * 64, "longest_edge": 40 * 64 + 7},
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
}


def write_processor(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **changes}))
    return folder


def make_vision_tokenizer() -> Any:
    """Return a tokenizer of bytes, whose template renders image parts as Qwen's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})  # type: ignore[dict-item]
    return tokenizer


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    if mode == "I;16":
        wide = generator.integers(0, 65536, (height, width), dtype=np.uint16)
        return Image.fromarray(wide)
    return Image.fromarray(pixels).convert(mode)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def animation(width: int, height: int) -> bytes:
    frames = [noise(width, height, "P", seed) for seed in range(3)]
    return encode(frames[0], "GIF", save_all=True, append_images=frames[1:])


def turned(width: int, height: int, kind: str = "JPEG", orientation: int = 6) -> bytes:
    """A picture that EXIF tells to turn; by 90 degrees if `orientation` is 6."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(noise(width, height), kind, exif=exif)


def bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """A PNG of a few bytes whose header announces gigabytes of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + body


def good_images() -> dict[str, bytes]:
    """Return images that are unusual but can be used."""
    return {
        "plain": encode(noise(40, 30)),
        "tiny": encode(noise(1, 1)),
        "palette": encode(noise(20, 20, "P")),
        "cmyk": encode(noise(33, 21, "CMYK"), "JPEG"),
        "gray": encode(noise(21, 33, "L"), "JPEG"),
        "gray_alpha": encode(noise(12, 12, "LA")),
        "alpha": encode(noise(24, 18, "RGBA"), "WEBP"),
        "bits": encode(noise(17, 31, "1")),
        "deep": encode(noise(16, 16, "I;16")),
        "animated": animation(18, 14),
        "turned": turned(48, 16),
        "turned_tiff": turned(48, 16, "TIFF"),
        "turned_png": turned(48, 16, "PNG"),
        "long": encode(noise(390, 2)),
        "tiff": encode(noise(30, 10), "TIFF"),
    }


def bad_images() -> dict[str, bytes]:
    """Return images that cannot be used."""
    whole = encode(noise(64, 64))
    return {
        "empty": b"",
        "text": b"<svg></svg>",
        "truncated": whole[: len(whole) // 2],
        "header_only": whole[:40],
        "flipped": whole[:60] + bytes(byte ^ 255 for byte in whole[60:90]) + whole[90:],
        "bomb": bomb(),
        "flat_bomb": bomb(200_000, 4_000),
        "stripe": encode(noise(900, 2)),
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    }
