"""Checks this machine with real processes and prints a line of JSON per check.

    python -m mcore_rl.doctor --gpu

runs the stages in their order on the GPU of this machine, or on its CPU if there is none.
docs/doctor.md lists the checks.
"""
