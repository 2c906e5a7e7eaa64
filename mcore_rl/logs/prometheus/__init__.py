"""Metrics of a running run for Prometheus."""
