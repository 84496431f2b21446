"""Model families, how Megatron-Core builds them, and how Hugging Face weights go in and out."""
