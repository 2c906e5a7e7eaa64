"""Signals of the test run itself."""

import signal


def pytest_configure() -> None:
    """Have Ctrl-C reach the processes that tests start, also where the test run is a background job.

    A shell without job control starts background jobs with SIGINT ignored, and every child inherits that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
