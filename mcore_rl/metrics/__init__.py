"""Steps of metrics in; console, JSON lines, TensorBoard, W&B and MLflow out."""

from mcore_rl.metrics.logger import MetricsLogger
from mcore_rl.metrics.timer import PhaseTimer

__all__ = ["MetricsLogger", "PhaseTimer"]
