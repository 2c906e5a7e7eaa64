"""Experts whose products are few launches, and whose counts of rows stay on the device."""
