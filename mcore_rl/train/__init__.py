"""Training on megatron-core: process groups, model, optimizer step, checkpoints, export."""
