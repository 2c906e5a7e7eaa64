"""Sizes of padded pictures by transformers' rule of Kimi-K2.5, whose module needs torchvision.

Arguments: JSON of [[width, height], ...], the most patches of an image and of a side. Prints JSON
of the padded sizes.
"""

import json
import sys

from mcore_rl.device.sglang_setup import STANDINS_DIR

if __name__ == "__main__":
    sys.path.insert(0, str(STANDINS_DIR))
    from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize

    padded = []
    most_patches, longest_side = map(int, sys.argv[2:])
    for width, height in json.loads(sys.argv[1]):
        _, (rows, columns) = navit_resize(height, width, 14, 2, most_patches, longest_side)
        padded.append([columns, rows])
    print(json.dumps(padded))
