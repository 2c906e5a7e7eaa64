"""Names for arrays and for versions of weights."""

from typing import Any, NewType

import numpy as np

Array = np.ndarray[Any, Any]
WeightVersion = NewType("WeightVersion", int)
"""Number of loop steps that made a set of weights; 0 is the initial weights."""
