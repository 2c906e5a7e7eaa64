"""megatron-core can be imported here, and only because its kernels for Triton are left out."""

import subprocess
import sys

from tests.support.upstream import assert_defect

IMPORT = "import megatron.core.pipeline_parallel.schedules"
PREPARE = "from mcore_rl.device.setup import let_megatron_import as go; go()"
PREPARED = f"{PREPARE}; {IMPORT}"
WITHOUT_TRITON = "import sys; sys.modules['triton'] = None; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_megatron_is_imported_without_triton() -> None:
    assert_defect("device.setup.let_megatron_import", run(WITHOUT_TRITON + IMPORT).returncode != 0)
    done = run(PREPARED)
    assert done.returncode == 0, done.stderr


def test_no_terminal_shows_what_megatron_does_without() -> None:
    imports = "; import megatron.core.models.backends"
    told = run(f"{PREPARE}; import warnings; warnings.resetwarnings(); {IMPORT}{imports}")
    assert "Transformer Engine and Apex are not installed" in told.stderr
    assert run(PREPARED + imports).stderr == ""


def test_tensors_are_pickled_as_torch_does() -> None:
    pickled = "import pickle, torch; print(b'megatron' in pickle.dumps(torch.ones(1)))"
    first = run(f"{PREPARED}; {pickled}")
    assert_defect("device.setup.keep_torch_pickles", first.stdout.strip() == "True")
    assert run(f"import mcore_rl.train.runtime; {pickled}").stdout.strip() == "False"


def test_the_root_logger_is_left_alone() -> None:
    without = (
        "import sys, typing, typing_extensions; typing.override = typing_extensions.override; "
    )
    stand_in = "from types import ModuleType as M; n = 'emerging_optimizers.triton_kernels.syrk'; "
    modules = "m = sys.modules[n] = M(n); m.tsyrk_ex = m.HAS_TRITON_340 = None; "
    optimizers = "import emerging_optimizers.registry as r; r.get_optimizer_cls('muon')"
    handlers = "; import logging; print(len(logging.root.handlers))"
    muon = "import emerging_optimizers.orthogonalized_optimizers; "
    told = run(f"{without}{stand_in}{modules}{muon}{optimizers}{handlers}")
    assert_defect("device.setup.keep_absl_from_the_root_logger", told.stdout.strip() == "1")
    assert run(f"import mcore_rl.train.actor{handlers}").stdout.strip() == "0"
