"""Environments and the worker processes that they run in.

Whatever a worker imports needs the standard library only, besides the package that an adapter
adapts: a worker may run in a virtual environment of its own, where mcore_rl's packages are missing.
"""
