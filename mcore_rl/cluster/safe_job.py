"""A job of Ray whose workers do not get the controller's folders first on their path.

Ray puts the working folder of the controller, and that of its script, before the standard library.
A RankActor puts the working folder last; no other worker runs the user's code.
"""

from ray.job_config import JobConfig


class SafeJob(JobConfig):
    """As its base, for ray.init; Ray adds the folders just before it serializes the job."""

    def _serialize(self) -> str:
        self._py_driver_sys_path.clear()
        return super()._serialize()
