"""Checks machines: their state in seconds (machine/), or by real processes in minutes (the kit).

    python -m mcore_rl.tools.doctor          this machine, or several against one another
    python -m mcore_rl.tools.doctor --gpu    the stages of the kit, a line of JSON per check

docs/doctor.md lists the checks.
"""
