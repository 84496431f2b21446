"""megappo: PPO for large language models on Megatron-Core and SGLang, one program on every rank."""

__version__ = "0.1.0"
