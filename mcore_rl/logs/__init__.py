"""Sends the metrics of each step to the console, JSON lines, TensorBoard, W&B and MLflow."""

from mcore_rl.logs.logger import MetricsLogger, PhaseTimer

__all__ = ["MetricsLogger", "PhaseTimer"]
