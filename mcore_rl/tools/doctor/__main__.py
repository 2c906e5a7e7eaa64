"""`python -m mcore_rl.tools.doctor`, for machines where this package is not installed."""

import sys

from mcore_rl.tools.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
