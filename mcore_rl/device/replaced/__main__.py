"""Prints docs/patches.md."""

import sys

from mcore_rl.device.replaced.document import make_document

sys.stdout.write(make_document())
