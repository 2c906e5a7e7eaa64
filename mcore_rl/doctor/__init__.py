"""Checks of this machine with real processes, a line of JSON each.

    python -m mcore_rl.doctor --gpu

runs the stages in their order on the GPU of this machine, or on its CPU if there is none.
docs/doctor.md lists the checks.
"""
