"""One engine of two processes with a prefix cache: pushes are compared on both, caches are new."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import settings_for

from megappo.rollout.engine import GenerationRequest
from megappo.rollout.sampling import SamplingSettings
from megappo.rollout.sglang_engine import SGLangEngine

pytestmark = pytest.mark.engine

REQUEST = GenerationRequest(
    token_ids=tuple(range(10, 60)),
    seed=0,
    sampling=SamplingSettings(max_new_tokens=4, ignore_eos=True),
)


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    settings = settings_for(
        tiny_model,
        tmp_path_factory.mktemp("logs") / "engine.log",
        tp_size=2,
        prefix_cache=True,
        verify_sync="always",
        bucket_bytes=20_000,
    )
    with SGLangEngine(settings) as engine:
        yield engine


def test_a_push_forgets_cached_prefixes_and_a_cache_that_outlives_it_is_an_error(
    pair, tiny_weights
):
    for version in (1, 2):
        report = pair.update_weights(
            tiny_weights.items(), expected_names=set(tiny_weights), version=version
        )
        assert report.num_verified == 15
        first = pair.generate([REQUEST])
        assert pair.generate([REQUEST])[0].token_ids == first[0].token_ids  # from the cache
    pair._cache_is_new = True  # as if the flush of the last push had not happened
    with pytest.raises(RuntimeError, match="first response after weight version 2 took"):
        pair.generate([REQUEST])
    with pytest.raises(RuntimeError, match="outlived a push"):
        pair.generate([REQUEST])


def test_a_weight_that_changes_on_its_way_to_the_second_process_is_found_out(pair, tiny_weights):
    name = "model.layers.1.self_attn.v_proj.weight"

    def changing() -> Iterator[tuple[str, torch.Tensor]]:
        for key, weight in tiny_weights.items():
            sent = weight.clone()
            yield key, sent
            if key == name:
                sent[-1, -1] += 1e-3  # after its copy was taken, before its bucket goes

    with pytest.raises(RuntimeError, match=r"v_proj.weight was sent, and process 1 of the engine"):
        pair.update_weights(changing(), expected_names=set(tiny_weights), version=3)
