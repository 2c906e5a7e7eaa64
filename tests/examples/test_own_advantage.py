"""The example of an advantage is read as a user's file, and computes what it says."""

import json
import subprocess
import sys

from tests.support.policy import ROOT

SCRIPT = """
import json
import torch
from mcore_rl.algo.outcomes import Outcomes
from mcore_rl.algo.registry import advantages
from mcore_rl.checks.algorithm import check_algorithm
from mcore_rl.config.recipe import load_recipe

settings = ["algorithm.path=examples/own_advantage.py", "algorithm.advantage=above_median"]
config = load_recipe("tiny_moe_grpo", settings)
check_algorithm(config)
rewards_N, group_N = torch.tensor([1.0, 0.0, 0.0, 3.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
outcomes = Outcomes(rewards_N, group_N, lens_N=torch.tensor([1, 2, 1, 1, 1]))
print(json.dumps(advantages["above_median"](outcomes, config.algorithm).tolist()))
"""
"""In a process of its own: the names that a user's file registers stay for good."""


def test_it_is_the_distance_from_the_median_of_the_group() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1.0, 0.0, 0.0, 0.0, 1.0, -1.0]
