"""A published model: loaded, compared with transformers, served, upcycled, trained, merged."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_tools.cli import main as ckpt
from mcore_rl.config import ParallelConfig
from mcore_rl.process.network import find_free_port
from tests.support.distributed import run_ranks
from tests.support.policy import ROOT
from tests.support.real_model import batch_of, logprobs_of, write_smollm2
from tests.support.runs import Run
from tests.support.tiny_training import transformers_logprobs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]
TEXT = (
    "The capital of France is Paris. Seven plus five is twelve,"
    " and seven times five is thirty-five."
)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smollm2(tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="session")
def sparse(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with four experts in each layer, two of them for each token."""
    out = tmp_path_factory.mktemp("sparse") / "model"
    assert ckpt(["upcycle", str(smollm2), str(out), "--experts", "4", "--top-k", "2"]) == 0
    return out


def test_logprobs_are_those_of_transformers_dense_and_sparse(smollm2: Path, sparse: Path) -> None:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(smollm2)(TEXT)["input_ids"]
    expected = transformers_logprobs(smollm2, batches=[batch_of(ids)])[0][1:]
    assert expected.mean() > -4, "the model does not know its language"
    cases: list[tuple[Path, dict[str, Any]]] = [
        (smollm2, {}),
        (smollm2, {"tp": 3}),
        (sparse, {"ep": 2}),
    ]
    for path, layout in cases:
        world_size = ParallelConfig(**layout).world_size
        answers = run_ranks(logprobs_of, world_size, str(path), layout, ids, timeout_s=150)
        (logprobs,) = [answer for answer in answers if answer is not None][:1]
        assert (logprobs[1:] - expected).abs().max() < 1e-3
        assert (logprobs[1:] - expected).abs().mean() < 1e-4


def test_it_answers_a_chat(smollm2: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mcore_rl.cli",
        "serve",
        str(smollm2),
        "--once",
        "--kv-cache-len",
        "4096",
    ]
    command += ["--kv-cache-len", "4096", "--port", str(find_free_port("127.0.0.1"))]
    command += ["--log", str(tmp_path / "serve.log")]
    command += ["--ask", "What is the capital of France?"]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "Paris" in run.stdout.splitlines()[-1]


def test_a_step_of_grpo_and_a_merge(
    start: Callable[..., Run], sparse: Path, tmp_path: Path
) -> None:
    run = start(
        "train",
        f"model.path={sparse}",
        "run.steps=1",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=4",
        "rollout.max_response_len=24",
        "rollout.kv_cache_len=4096",
        "rollout.stage_weights=false",
        "data.max_prompt_len=128",
        "train.max_tokens_per_microbatch=512",
        "eval.data=[]",
        "run.call_timeout_s=150",
        "checkpoint.every_steps=1",
    )
    assert run.finish(600) == 0, run.tail()
    run.assert_nothing_left()
    (step,) = [row for row in run.metrics() if "rollout/samples" in row]
    assert step["logprob_diff/mean"] < 1e-4
    assert step["sync/parity_diff"] < 1e-4
    samples = [
        json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()
    ]
    assert any(sample["response"].strip() for sample in samples)
    merged = tmp_path / "merged"
    checkpoint = run.run_dir / "checkpoints" / "step_000001"
    assert ckpt(["to-hf", str(checkpoint), str(merged), "--source-hf", str(sparse)]) == 0
    assert ckpt(["verify", str(merged), str(run.run_dir / "hf")]) == 0
    assert ckpt(["verify", str(merged), str(sparse)]) == 1, "nothing was trained"
