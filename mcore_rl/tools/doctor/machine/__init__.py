"""Checks of the machine itself, and of several against one another, before a run is started.

Each check returns findings: ok, a warning, or a failure with its remedy. docs/doctor.md lists them.
"""
