"""`python -m mcore_rl.doctor`, for machines where this package is not installed."""

import sys

from mcore_rl.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
