from dataclasses import replace

import pytest
import torch

from megappo.config.sections import Config, ModelSection, TrainerSection
from megappo.distributed.metrics import Tally
from megappo.models.spec import load_spec
from megappo.trainer.utilization import Utilization, peak_flops_per_s
from tests.tiny_run import make_model


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return load_spec(str(folder))


def forward(n, *, head):
    """By hand, of the tiny model: 4 layers, hidden 32, 4 + 2 + 2 heads of 8, MLP 64, 261 words."""
    layer = 2 * 32 * (32 + 16 + 16) + 2 * 32 * 32 + 2 * 3 * 32 * 64
    pairs = n * (n + 1) // 2
    return n * (4 * layer + (2 * 32 * 261 if head else 0)) + pairs * 4 * 4 * 32


def test_operations_over_time_over_peak(spec):
    use = Utilization(specs={"actor": spec, "critic": spec}, peak_flops_per_s=1e9)
    tally = Tally()
    use.add(tally, {"actor": [3, 10, 3, 10], "critic": [3, 10]})
    reduced = {name: total / count for name, (total, count) in tally.sums.items()}
    found = use.finish(reduced, seconds={"actor": 0.5, "critic": 0.25})
    actor = 2 * 3 * (forward(3, head=True) + forward(10, head=True))
    critic = 3 * (forward(3, head=False) + forward(10, head=False))
    assert found == pytest.approx(
        {
            "perf/tflops/actor": actor / 0.5 / 1e12,
            "perf/mfu/actor": actor / 0.5 / 1e9,
            "perf/tflops/critic": critic / 0.25 / 1e12,
            "perf/mfu/critic": critic / 0.25 / 1e9,
        },
        rel=1e-12,
    )
    assert reduced == {}


def test_a_role_that_was_not_trained_has_no_figure_and_an_unknown_device_no_mfu(spec):
    use = Utilization(specs={"actor": spec, "critic": spec}, peak_flops_per_s=None)
    reduced = {"perf/flops/actor": 1.0, "perf/flops/critic": 2e12}
    assert use.finish(reduced, seconds={"critic": 4.0}) == {"perf/tflops/critic": 0.5}


def test_a_cpu_has_a_peak_only_if_it_is_given():
    config = Config(model=ModelSection(path="m"), trainer=TrainerSection())
    cpu = torch.device("cpu")
    assert peak_flops_per_s(config, cpu) is None
    given = replace(config, trainer=TrainerSection(device_peak_tflops=0.25))
    assert peak_flops_per_s(given, cpu) == 0.25e12
