"""Saving and resuming a run, in Megatron's dist_checkpointing format."""
