"""The model families that can be trained; each import registers one.

To add one: write a file beside these that registers a `Family`, import it here, and add a tiny
model of it to tests/distributed/tiny_models.py.
"""

from megappo.models.families import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from megappo.models.families.base import FAMILIES, Family

__all__ = [
    "FAMILIES",
    "Family",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
]
