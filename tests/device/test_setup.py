"""megatron-core can be imported here, and only because its kernels for Triton are left out."""

import subprocess
import sys

import pytest

from tests.support.upstream import assert_defect

IMPORT = "import megatron.core.pipeline_parallel.schedules"
PREPARE = "from mcore_rl.device.setup import let_megatron_import as go; go()"
BACKENDS = "; import megatron.core.models.backends"
PICKLED = "import pickle, torch; print(b'megatron' in pickle.dumps(torch.ones(1)))"
HANDLERS = "; import logging; print(len(logging.root.handlers))"
WITHOUT_TRITON = "import sys; sys.modules['triton'] = None; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.fixture(scope="module")
def prepared() -> subprocess.CompletedProcess[str]:
    """A process that lets megatron be imported, and shows every warning and how it pickles."""
    warned = f"import warnings; warnings.resetwarnings(); {IMPORT}{BACKENDS}"
    return run(f"{PREPARE}; {warned}; {PICKLED}")


@pytest.fixture(scope="module")
def actor() -> subprocess.CompletedProcess[str]:
    """A process that has imported the trainer: it shows how it pickles, and its log's handlers."""
    return run(f"import mcore_rl.train.actor{BACKENDS}; {PICKLED}{HANDLERS}")


def test_megatron_is_imported_without_triton(prepared: subprocess.CompletedProcess[str]) -> None:
    assert prepared.returncode == 0, prepared.stderr


@pytest.mark.slow
def test_megatron_alone_is_not() -> None:
    assert_defect("device.setup.let_megatron_import", run(WITHOUT_TRITON + IMPORT).returncode != 0)


def test_no_terminal_shows_what_megatron_does_without(
    prepared: subprocess.CompletedProcess[str], actor: subprocess.CompletedProcess[str]
) -> None:
    assert "Transformer Engine and Apex are not installed" in prepared.stderr
    assert actor.stderr == ""


def test_tensors_are_pickled_as_torch_does(
    prepared: subprocess.CompletedProcess[str], actor: subprocess.CompletedProcess[str]
) -> None:
    assert_defect("device.setup.keep_torch_pickles", prepared.stdout.strip() == "True")
    assert actor.stdout.split()[0] == "False"


def test_the_root_logger_is_left_alone(actor: subprocess.CompletedProcess[str]) -> None:
    without = (
        "import sys, typing, typing_extensions; typing.override = typing_extensions.override; "
    )
    stand_in = "from types import ModuleType as M; n = 'emerging_optimizers.triton_kernels.syrk'; "
    modules = "m = sys.modules[n] = M(n); m.tsyrk_ex = m.HAS_TRITON_340 = None; "
    optimizers = "import emerging_optimizers.registry as r; r.get_optimizer_cls('muon')"
    muon = "import emerging_optimizers.orthogonalized_optimizers; "
    told = run(f"{without}{stand_in}{modules}{muon}{optimizers}{HANDLERS}")
    assert_defect("device.setup.keep_absl_from_the_root_logger", told.stdout.strip() == "1")
    assert actor.stdout.split()[1] == "0"
