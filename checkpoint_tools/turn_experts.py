"""Writes a HuggingFace model whose stacked experts lie the other way round.

published           gate_up_proj [experts, hidden, 2 * width]    down_proj [experts, width, hidden]
transformers 5      gate_up_proj [experts, 2 * width, hidden]    down_proj [experts, hidden, width]
"""

from functools import partial
from pathlib import Path

from checkpoint_tools.assembly import Assembly, Piece, whole
from checkpoint_tools.hf import open_hf
from checkpoint_tools.hf_model import read_config
from checkpoint_tools.hf_output import make_hf
from checkpoint_tools.options import Effort
from checkpoint_tools.output import Made
from checkpoint_tools.produce import ConversionReport
from checkpoint_tools.staging import refuse_existing
from checkpoint_tools.stored import Chunk
from mcore_rl.weights.hf.folder import write_small_files
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.qwen3_vl import MOE
from mcore_rl.weights.models.value_head import stem_of


def turn_experts(
    source_hf: Path, out: Path, max_file_bytes: int, effort: Effort
) -> ConversionReport:
    """Write the model of `source_hf` to `out` with each expert's matrices transposed.

    Values stay bit for bit. Raises ValueError for another architecture than Qwen3-VL with experts,
    and with the file and tensor that is wrong.
    """
    refuse_existing(out)
    config = read_config(source_hf)
    family = family_of(config)
    if stem_of(family.architecture) != stem_of(MOE.architecture):
        raise ValueError(
            f"{source_hf}: {family.architecture} has one form of experts; only"
            f" {MOE.architecture} is saved in two"
        )
    reopen = partial(open_hf, either_way=True)
    checkpoint = reopen(source_hf)
    sizes = family.sizes(config)
    stacked = {
        tensor.name.format(layer=layer)
        for rule, tensor, layer, _ in family.places(config, sizes)
        if rule.stacked
    }
    assemblies: dict[str, Made] = {}
    for name, tensor in checkpoint.tensors.items():
        chunk = tensor.chunks[0]
        assemblies[name] = _turn(chunk) if name in stacked else whole(chunk)
    describe = partial(write_small_files, config=config, side_files_from=source_hf)
    kept = (frozenset[str](), describe, max_file_bytes, effort)
    return make_hf(out, [checkpoint], assemblies, *kept, reopen=reopen)


def _turn(chunk: Chunk) -> Assembly:
    """Return the assembly of a tensor whose last two axes change places."""
    experts, rows, columns = chunk.shape
    size = rows * columns
    pieces = (
        Piece(chunk, number * size, number * size, columns, rows, rows, transposed=True)
        for number in range(experts)
    )
    return Assembly(chunk.key, chunk.dtype, (experts, columns, rows), tuple(pieces))
