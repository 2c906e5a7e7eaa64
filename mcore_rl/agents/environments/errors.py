"""Errors of an episode's environment; the texts name worker, environment and task."""


class EpisodeError(RuntimeError):
    """The environment of an episode gives no answer; the episode is over."""


class EnvironmentLost(EpisodeError):
    """The worker of an episode died or hangs. The episode may be tried again in another worker."""


class EnvironmentFailed(EpisodeError):
    """The environment raised an error; the text has the end of its traceback."""


class EnvironmentTimeout(EnvironmentFailed):
    """The environment did not answer in time, while its worker did."""
