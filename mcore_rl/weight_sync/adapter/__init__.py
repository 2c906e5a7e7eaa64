"""Brings low-rank factors to engines, which merge them into weights that they keep."""
