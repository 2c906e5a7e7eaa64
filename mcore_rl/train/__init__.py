"""Training on megatron-core: process groups, model, optimizer step, checkpoints, export."""

from mcore_rl.device.setup import let_megatron_import

let_megatron_import()
