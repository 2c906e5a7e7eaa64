"""Alarms of a run: rules on its metrics, and where it tells that one is met."""
