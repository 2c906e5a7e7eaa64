"""Fields are read from upstream's source as upstream itself declares them."""

import dataclasses
import subprocess
import sys

import pytest

from mcore_rl.config.upstream.fields import (
    DDP,
    OPTIMIZER,
    SERVER,
    TRANSFORMER,
    UpstreamClass,
    is_installed,
    read_fields,
)


def public(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_fields_are_those_of_megatron_cores_classes() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    for upstream, cls in (
        (TRANSFORMER, MLATransformerConfig),
        (OPTIMIZER, OptimizerConfig),
        (DDP, DistributedDataParallelConfig),
    ):
        names = {field.name for field in dataclasses.fields(cls)}
        assert set(read_fields(upstream)) == public(names), upstream.name


SGLANG_FIELDS = """
import sys
from mcore_rl.device.sglang_setup import use_cpu
use_cpu([])
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs
import argparse
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
known = {option for action in parser._actions for option in action.option_strings}
for field in record_fields(ServerArgs):
    print(field.name, file=sys.stderr)
current = {
    action.dest
    for action in parser._actions
    if "Deprecated" not in f"{type(action).__name__} {action.help}"
}
print(*sorted(current))
print(*sorted(known))
"""


@pytest.mark.slow
def test_fields_are_those_of_sglangs_server() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SGLANG_FIELDS], capture_output=True, text=True, check=True
    )
    fields = read_fields(SERVER)
    assert public(set(run.stderr.split())) >= set(fields)
    assert {name for name in run.stderr.split() if name in fields} == set(fields)
    *_, current, known = run.stdout.splitlines()
    options = set(known.split())
    with_cli = {field.cli_name for field in fields.values() if field.has_cli}
    assert len(with_cli) > 400
    assert not with_cli - options
    without_cli = {field.name for field in fields.values() if not field.has_cli}
    assert not without_cli & set(current.split())


def test_reading_takes_no_import_and_little_time() -> None:
    code = (
        "import sys, time\n"
        "from mcore_rl.config.upstream.fields import SERVER, TRANSFORMER, read_fields\n"
        "assert read_fields(SERVER) and read_fields(TRANSFORMER)\n"
        "print([name for name in ('torch', 'sglang', 'megatron') if name in sys.modules])\n"
        "print(time.process_time())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported, spent_s = run.stdout.splitlines()
    assert imported == "[]"
    assert float(spent_s) < 3, "seconds of CPU: ten times what the start and the reading take"


@pytest.mark.parametrize(
    ("name", "choices", "is_flag", "is_json"),
    [
        ("attention_backend", True, False, False),
        ("enable_dp_lm_head", False, True, False),
        ("radix_eviction_policy_config", False, False, True),
        ("mem_fraction_static", False, False, False),
    ],
)
def test_what_is_known_of_a_field(name: str, choices: bool, is_flag: bool, is_json: bool) -> None:
    field = read_fields(SERVER)[name]
    assert (bool(field.choices), field.is_flag, field.is_json) == (choices, is_flag, is_json)
    assert field.cli_name == "--" + name.replace("_", "-")


def test_a_package_that_is_missing_or_has_changed_is_named() -> None:
    missing = UpstreamClass("Options", "no_such_package", ("options.py",))
    assert is_installed(DDP) and not is_installed(missing)
    with pytest.raises(ValueError, match="no_such_package is not installed here"):
        read_fields(missing)
    moved = UpstreamClass("Elsewhere", "megatron", DDP.files, ("Elsewhere",))
    with pytest.raises(ValueError, match=r"Elsewhere is not declared in .*not supported"):
        read_fields(moved)
