"""The Python API (docs/python_api.md): recipes, whole runs, and the parts of a loop of your own.

`import mcore_rl` loads nothing; `import mcore_rl.api` loads torch, Megatron's names and Ray.
"""

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.loops.rl import make_step_options, run_evaluation, run_step, save_checkpoint
from mcore_rl.loops.roles import Roles
from mcore_rl.loops.sampling import SamplingOptions
from mcore_rl.loops.training import StepOptions
from mcore_rl.run.commands import open_run
from mcore_rl.run.commands import run_eval as evaluate
from mcore_rl.run.commands import run_sft as sft
from mcore_rl.run.commands import run_train as train

__all__ = [
    "Config",
    "PhaseTimer",
    "Roles",
    "SamplingOptions",
    "StepOptions",
    "evaluate",
    "load_recipe",
    "make_step_options",
    "open_run",
    "run_evaluation",
    "run_step",
    "save_checkpoint",
    "sft",
    "train",
]
