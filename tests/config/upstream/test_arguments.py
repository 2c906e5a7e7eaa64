"""Options become arguments that SGLang's own parser reads as these options."""

import json
import subprocess
import sys
from typing import Any

import pytest

from mcore_rl.config.upstream.fields import SERVER, read_fields
from mcore_rl.config.upstream.values import problem_on_command_line, server_arguments

OPTIONS: dict[str, Any] = {
    "mem_fraction_static": 0.75,
    "chunked_prefill_size": 4096,
    "enable_dp_lm_head": True,
    "cuda_graph_bs_decode": [1, 2, 8],
    "kv_cache_dtype": "fp8_e4m3",
    "radix_eviction_policy_config": {"threshold": 4},
    "moe_dense_tp_size": 1,
    "sampling_backend": "pytorch",
}
PARSE = """
import json, sys
from mcore_rl.device.sglang_setup import use_cpu
use_cpu([])
from sglang.srt.server_args import prepare_server_args
arguments, names = json.loads(sys.argv[1]), json.loads(sys.argv[2])
args = prepare_server_args(["--model-path", "/m", "--device", "cpu", *arguments])
print(json.dumps({name: getattr(args, name) for name in names}))
"""


@pytest.mark.slow
def test_sglang_reads_them_back() -> None:
    arguments = [json.dumps(server_arguments(OPTIONS)), json.dumps(list(OPTIONS))]
    run = subprocess.run(
        [sys.executable, "-c", PARSE, *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout.splitlines()[-1]) == OPTIONS


def test_what_is_off_or_unset_is_not_spelled() -> None:
    assert server_arguments({"enable_dp_lm_head": False, "page_size": None}) == []
    assert server_arguments({}) == []


def test_what_the_command_line_cannot_say() -> None:
    fields = read_fields(SERVER)
    no_form = problem_on_command_line(fields["disable_cuda_graph"], True)
    assert no_form == "SGLang's command line has no such option"
    on = next(name for name, f in fields.items() if f.is_flag and f.has_cli and is_true(f.default))
    problem = problem_on_command_line(fields[on], False)
    assert problem and "cannot switch it off" in problem
    assert problem_on_command_line(fields[on], True) is None


def is_true(default: Any) -> bool:
    return getattr(default, "value", None) is True
