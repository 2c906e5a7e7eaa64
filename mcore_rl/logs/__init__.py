"""Sends the metrics of each step to the console, JSON lines, TensorBoard, W&B and MLflow."""
