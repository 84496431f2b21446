import gzip
import json

import pytest
import torch

from megappo.trainer.profiler import StepProfiler
from megappo.trainer.stopwatch import Stopwatch

CPU = torch.device("cpu")


def make(folder, told, *, max_gb=4.0):
    return StepProfiler(
        steps=[2],
        folder=folder,
        rank=3,
        device=CPU,
        max_gb=max_gb,
        report=lambda step, text, details: told.append((step, text)),
    )


def names(path):
    with gzip.open(path, "rt") as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


def test_a_trace_has_the_phases_of_its_step_alone(tmp_path):
    told = []
    profiler, watch = make(tmp_path, told), Stopwatch(CPU)
    for step, phase in ((1, "generate"), (2, "update_actor"), (3, "sync")):
        with profiler.recording(step), watch.phase(phase):
            torch.ones(4) @ torch.ones(4)
    assert [p.name for p in tmp_path.iterdir()] == ["step_2_rank_3.json.gz"]
    found = names(tmp_path / "step_2_rank_3.json.gz")
    assert {"phase/update_actor", "aten::dot"} <= found
    assert not {"phase/generate", "phase/sync"} & found
    ((step, text),) = told
    assert step == 2
    assert "early" not in text


def test_a_trace_that_takes_too_much_memory_ends_early_and_says_so(tmp_path):
    told = []
    profiler = make(tmp_path, told, max_gb=0.05)
    with profiler.recording(2):
        torch.ones(4).exp()
        profiler.watch()
        held = torch.ones(32 * 1024 * 1024)  # 128 MiB
        profiler.watch()
        torch.ones(4).tanh()
    del held
    found = names(tmp_path / "step_2_rank_3.json.gz")
    assert "aten::exp" in found
    assert "aten::tanh" not in found
    assert "it ends early, at trainer.profile_max_gb (0.05)" in told[0][1]


def test_a_step_that_fails_leaves_no_trace_and_the_next_one_can_be_recorded(tmp_path):
    profiler = make(tmp_path, [])
    with pytest.raises(KeyError), profiler.recording(2):
        raise KeyError("x")
    assert list(tmp_path.iterdir()) == []
    with profiler.recording(2):
        torch.ones(4).exp()
    assert "aten::exp" in names(tmp_path / "step_2_rank_3.json.gz")


def test_a_trace_that_cannot_be_written_is_said_and_ends_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    told = []
    with make(tmp_path / "file", told).recording(2):
        torch.ones(4).exp()
    assert "the trace of rank 3 could not be written" in told[0][1]


def test_a_profiler_that_does_not_start_is_told_and_the_step_goes_on(tmp_path):
    told, done = [], []
    profiler = make(tmp_path, told)
    with torch.autograd.profiler.emit_itt(), profiler.recording(2):  # there is one of all kinds
        done.append(2)
    assert done == [2]
    ((step, text),) = told
    assert step == 2
    assert "could not be started" in text
    assert list(tmp_path.iterdir()) == []
    with profiler.recording(2):
        torch.ones(4).exp()
    assert [p.name for p in tmp_path.iterdir()] == ["step_2_rank_3.json.gz"]
