"""What `--dtype` leaves alone and what is dropped on purpose, and the words that say so."""

from __future__ import annotations

import torch

from megappo.models.name_map import Entry

BUFFER_RULE = "router biases in float32: they choose experts, and a rounded one chooses others"
MTP_RULE = "layers that predict several tokens (MTP; num_nextn_predict_layers), which are not kept"


def given_dtype(entry: Entry, wanted: torch.dtype | None) -> torch.dtype | None:
    """What a parameter is converted to; None: it keeps its own.

    Args:
        entry: The parameter; one that is a buffer is float32 whatever the model is.
        wanted: What was asked for, None for nothing.
    """
    return torch.float32 if wanted is not None and entry.is_buffer else wanted
