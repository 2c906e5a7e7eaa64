"""Sends the metrics of each step to the console, JSON lines, TensorBoard, W&B and MLflow."""

from mcore_rl.metrics.logger import MetricsLogger
from mcore_rl.metrics.timer import PhaseTimer

__all__ = ["MetricsLogger", "PhaseTimer"]
