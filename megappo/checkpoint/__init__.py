"""Saving and resuming a run; weights and optimizer state in Megatron's dist_checkpointing format."""
