"""Images per second from a parquet file to an engine's first token, and bytes between processes.

    parquet -> headers, ids -> encoded bytes to the collector -> patches in shared memory
        -> an engine (a tiny Qwen2.5-VL on SGLang) maps them, or gets them in each request
        -> a micro-batch of the training ranks

Both ways to the engine run one after the other, in this order and the reverse, on other images.
The last line is JSON.

    python -m benchmarks.vision_data [--images 64] [--side 224] [--samples 4]
"""

import argparse
import asyncio
import io
import json
import pickle
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import save_file

from mcore_rl.config import Config, DataConfig, ModelConfig, RolloutConfig
from mcore_rl.data.images.batch import join_patches
from mcore_rl.data.images.processor import ImageProcessor
from mcore_rl.data.images.shared_patches import SharedPatches
from mcore_rl.data.rows import prompt_row, write_parquet
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.rollout.client import RolloutClient
from mcore_rl.rollout.engine import EngineProcess
from mcore_rl.rollout.engine_spec import EngineSpec
from mcore_rl.rollout.image_request import pack_request, refer_request
from mcore_rl.rollout.request import EngineAffinity, Request, Sampling, make_body
from mcore_rl.rollout.transport import HttpOptions
from mcore_rl.run.prompts import PromptReader
from mcore_rl.tasks.tiny_models import write_tiny_vision_model
from mcore_rl.types import Prompt

CACHE_BYTES = 1 << 30
PHASES = ("files", "inline", "inline", "files")
"""Ways to the engine, one after the other."""


@dataclass(frozen=True)
class Timed:
    """Seconds of the stages of some prompts."""

    read_s: float
    engine_s: float


def write_images(path: Path, numbers: range, side: int) -> None:
    """Write rows with smooth color images of random sizes near `side`, as JPEG."""
    rows = []
    for number in numbers:
        rng = np.random.default_rng(number)
        small = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        size = (side, max(56, side - 28 * int(rng.integers(0, 3))))
        image = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)
        out = io.BytesIO()
        image.save(out, "JPEG", quality=90)
        row = prompt_row(f"<image> how many ? {number % 10}", "1", "made", "train", number)
        rows.append({**row, "images": [{"bytes": out.getvalue()}]})
    write_parquet(rows, path)


def write_model(folder: Path) -> None:
    """Write a tiny Qwen2.5-VL with random weights."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    write_tiny_vision_model(folder, ["how", "many", "?", *map(str, range(10))])
    torch.manual_seed(0)
    model: Any = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(folder))
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    renamed = {name.replace("model.visual.", "visual."): weights[name] for name in weights}
    renamed = {name.replace("model.language_model.", "model."): t for name, t in renamed.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


class FirstTokens:
    """Draws one token for each sample of prompts, by one way to the engine."""

    def __init__(self, engine: EngineProcess, way: str, num_samples: int) -> None:
        self._engine = engine
        self._way = way
        self._num_samples = num_samples

    def draw(self, prompts: Sequence[Prompt], patches: SharedPatches) -> float:
        """Return the seconds until all samples have their token."""
        rollout = RolloutConfig(max_concurrency=16)
        options = replace(HttpOptions.make(rollout, (1,), str), patches=patches)
        client = RolloutClient([self._engine.address], rollout, options.open)
        return asyncio.run(self._draw(client, prompts))

    async def _draw(self, client: RolloutClient, prompts: Sequence[Prompt]) -> float:
        async with client.open() as session:
            if self._way == "inline":
                session.transport._far.add(self._engine.url)  # type: ignore[attr-defined]
            began_s = time.perf_counter()
            await session.generate(prompts, self._num_samples, Sampling(1))
            return time.perf_counter() - began_s


def load(folder: Path, path: Path) -> list[Prompt]:
    data = DataConfig(train=[str(path)], max_prompt_len=1024)
    config = Config(model=ModelConfig(path=str(folder)), data=data)
    tokenizer = load_tokenizer(folder, "model.path")
    return PromptReader.make(config, tokenizer).load(config.data.train)


def request_bytes(prompt: Prompt, patches: SharedPatches, way: str) -> int:
    """Return the bytes of the body of one sample's request."""
    body = make_body(Request(prompt, 0, EngineAffinity(1)), Sampling(1), (1,))
    if way == "files":
        return len(refer_request(body, [patches.place(image) for image in prompt.images]))
    images = join_patches([[patches.read(image) for image in prompt.images]])
    assert images is not None
    return len(pack_request(body, images))


def micro_batch_bytes(prompt: Prompt, patches: SharedPatches) -> int:
    """Return the bytes of a prompt's pixels in a micro-batch with one of its samples."""
    images = join_patches([[patches.read(image) for image in prompt.images]])
    assert images is not None
    return images.pixels_PD.nbytes


def copies(moved: Mapping[str, int], num_samples: int) -> float:
    """Return how often a pixel buffer is copied for the first sample of its prompt."""
    of_first = moved["into shared memory"]
    of_first += (moved["to the engine"] + moved["into micro-batches"]) // num_samples
    return round(of_first / moved["into shared memory"], 3)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = folder / "model"
    write_model(model)
    processor = ImageProcessor(model, cache_bytes=0)
    times: dict[str, list[Timed]] = {way: [] for way in PHASES}
    moved: dict[str, dict[str, int]] = {}
    num_images = 0
    spec = EngineSpec(str(model), str(folder / "log"), kv_cache_len=16384, max_running=16)
    with EngineProcess(spec) as engine:
        for phase, way in enumerate(PHASES):
            path = folder / f"{phase}.parquet"
            write_images(path, range(phase * args.images, (phase + 1) * args.images), args.side)
            began_s = time.perf_counter()
            prompts = load(model, path)
            read_s = time.perf_counter() - began_s
            patches = SharedPatches(processor.patches_of, CACHE_BYTES)
            engine_s = FirstTokens(engine, way, args.samples).draw(prompts, patches)
            times[way].append(Timed(read_s, engine_s))
            assert patches.num_made == len(prompts), "an image was processed twice"
            num_images = len(prompts)
            sent = args.samples * sum(request_bytes(p, patches, way) for p in prompts)
            shared = sum(Path(patches.place(p.images[0]).path).stat().st_size for p in prompts)
            batched = args.samples * sum(micro_batch_bytes(p, patches) for p in prompts)
            pickled = sum(len(pickle.dumps(prompt)) for prompt in prompts)
            moved[way] = {
                "to the collector, encoded": pickled // num_images,
                "into shared memory": shared // num_images,
                "to the engine": sent // num_images,
                "into micro-batches": batched // num_images,
            }
            patches.close()
    whole = {
        way: num_images / statistics.mean(t.read_s + t.engine_s for t in own)
        for way, own in times.items()
    }
    return {
        "images": num_images,
        "samples_per_image": args.samples,
        "images_per_second": {way: round(speed, 2) for way, speed in whole.items()},
        "speed_ratio": round(whole["files"] / whole["inline"], 3),
        "bytes_per_image": moved,
        "copies_per_sample": {way: copies(of_way, args.samples) for way, of_way in moved.items()},
        "seconds": {
            way: [[round(t.read_s, 3), round(t.engine_s, 3)] for t in own]
            for way, own in times.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--samples", type=int, default=4)
    args = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    for name, value in result.items():
        print(f"{name}: {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
