"""A rank by itself, for what adds up over ranks."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One rank, by itself all of DP."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield SimpleNamespace(data_group=dist.group.WORLD, dp_rank=0)
    dist.destroy_process_group()
