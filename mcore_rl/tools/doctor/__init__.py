"""Checks machines: their state in seconds (machine/), or by GPU checks, which take minutes.

    python -m mcore_rl.tools.doctor          this machine, or several against one another
    python -m mcore_rl.tools.doctor --gpu    the GPU checks, a line of JSON each

docs/doctor.md lists the checks.
"""
