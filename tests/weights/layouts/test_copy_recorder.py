"""A recorder lists what a loader copies, and writes nothing."""

import torch

from mcore_rl.weights.box import Padding
from mcore_rl.weights.layouts.copy_recorder import CopyRecorder, HfTensors
from mcore_rl.weights.layouts.layout import LocalTensors

SHAPES: HfTensors = dict.fromkeys(("a", "b"), ((2, 3), torch.float32))


def test_only_the_named_tensors_are_given_and_recorded():
    param = torch.ones(4, 3)

    def load_weights(weights):
        for _, loaded in weights:
            param[2:].copy_(loaded)
            param[:2].fill_(5)
            param[:2].fill_(6)

    recorder = CopyRecorder(LocalTensors({"p": param}))
    recorder.run(load_weights, SHAPES, ["b"])
    assert recorder.given == ["b"]
    assert [(s.box.name, s.tensor, s.offset) for s in recorder.shards] == [("b", "p", 6)]
    assert param.eq(1).all(), "recording wrote to a parameter"
    [(padding, fill)] = recorder.fills.items()
    assert padding == Padding("p", 0, (2, 3), (3, 1))
    fill()
    assert param[:2].eq(6).all(), "the last constant counts"
