import json
import re
import tracemalloc

import pytest

from megappo.cli import main
from megappo.report import run_folder, samples
from megappo.report.lines import read_lines, spread
from megappo.report.page import embed
from megappo.report.run_folder import read_run
from megappo.report.samples import histogram, read_samples
from tests.unit.report.made_run import EVIL, make


def test_curves_events_and_state_are_those_of_the_files(tmp_path):
    run = read_run(make(tmp_path / "run"))
    assert run.steps == list(range(1, 13))
    assert run.metrics["critic/score/mean"][3] == 0.4
    assert run.metrics["actor/grad_norm"][4] is None
    assert [(e["kind"], e["step"]) for e in run.events] == [
        ("pushed", 0),
        ("guard", 4),
        ("saved", 6),
    ]
    assert run.events[1]["text"] == f"lower_lr: actor/ppo_kl was 0.3; rate 1e-6 {EVIL}"
    assert run.state.startswith("12 steps; done at ")
    assert run.notes == []


def test_a_guards_event_of_a_supervised_run_is_its_own_sentence(tmp_path):
    folder = make(tmp_path / "run")
    event = {"time": 1.0, "kind": "guard", "step": 2, "text": "grad_norm: the update is skipped"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert [e["text"] for e in read_run(folder).events] == [event["text"]]


def test_a_killed_runs_torn_lines_are_left_out_and_said(tmp_path):
    folder = make(tmp_path / "run", steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": 4, "critic/sc')
    (folder / "rollouts" / "step_000003.jsonl").write_text('{"row": 1, "sco')
    (folder / "status.json").write_text('{"step": 4, "phase": "update_actor", "since": 5.0}')
    run = read_run(folder)
    assert run.steps == [1, 2, 3]
    assert "not done: in step 4, phase update_actor" in run.state
    found = read_samples(run, most=100)
    assert {s["step"] for s in found.shown} == {1, 2}
    assert run.notes == [
        "metrics.jsonl: the last line is torn and left out",
        "metrics.jsonl: 1 damaged lines are left out",
        "step_000003.jsonl: the last line is torn and left out",
    ]


def test_samples_of_steps_before_a_resume_are_left_out(tmp_path):
    folder = make(tmp_path / "run", steps=5)
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:3]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(folder)
    assert {s["step"] for s in read_samples(run, most=100).shown} == {1, 2, 3}
    assert run.notes == ["2 files of samples are of steps that metrics.jsonl does not have"]


def test_samples_whose_reward_failed_are_left_out_and_counted(tmp_path):
    folder = make(tmp_path / "run", steps=1)
    path = folder / "rollouts" / "step_000001.jsonl"
    first, *others = path.read_text().splitlines()
    failed = json.dumps(json.loads(first) | {"score": None})
    path.write_text("\n".join([failed, *others]) + "\n")
    run = read_run(folder)
    found = read_samples(run, most=100)
    assert found.num_read == len(found.shown) == len(others)
    assert run.notes == ["1 samples are left out, as their reward failed"]


def test_samples_and_texts_are_bounded_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "HISTOGRAM_STEPS", 6)
    monkeypatch.setattr(samples, "RESPONSE_CHARS", 6)
    run = read_run(make(tmp_path / "run"))
    found = read_samples(run, most=12)
    assert [s["step"] for s in found.shown[::2]] == [1, 3, 5, 8, 10, 12]
    assert found.shown[0]["response"] == "answer [12 more characters]"
    assert run.notes == [
        "distributions are of 6 of 12 steps with samples",
        "12 samples of 6 steps are shown, of 36 that were read; all are in rollouts/",
    ]


def test_long_samples_are_read_one_file_at_a_time(tmp_path):
    folder = make(tmp_path / "run", steps=40)
    for step in range(1, 41):
        row = {"score": 1.0, "response_tokens": 9, "response": "x" * 200_000}
        lines = (json.dumps(row) + "\n") * 2
        (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(lines)
    run = read_run(folder)
    tracemalloc.start()
    found = read_samples(run, most=40)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(found.shown), found.num_read) == (40, 80)
    assert peak < 6_000_000  # of 16 MB in all, 0.4 MB a file


def test_long_runs_are_thinned_with_their_ends_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "MOST_STEPS", 4)
    run = read_run(make(tmp_path / "run", steps=11))
    assert run.steps == [1, 4, 8, 11]
    assert len(run.metrics["critic/score/mean"]) == 4
    assert run.notes == ["curves show 4 of 11 steps, evenly spaced"]
    assert spread(range(100), 1) == [99]


def test_a_histogram_is_the_shares_of_a_step():
    by_step = {1: [{"score": 0.0}, {"score": 24.0}], 2: [{"score": 12.1}], 3: []}
    found = histogram(by_step, "score")
    assert found["edges"] == [float(i) for i in range(25)]
    assert found["steps"] == [1, 2]
    assert found["shares"][0] == [0.5] + [0.0] * 22 + [0.5]
    assert found["shares"][1].index(1.0) == 12
    assert sum(histogram({1: [{"score": 3.0}]}, "score")["shares"][0]) == 1.0  # no width


def test_no_text_can_end_the_element_that_it_stands_in():
    text = embed({"text": EVIL, "lone": "\ud800"})
    assert "<" not in text
    assert ">" not in text
    assert "&" not in text
    assert text.isascii()
    assert json.loads(text) == {"text": EVIL, "lone": "\ud800"}


def test_the_command_writes_one_file_that_holds_all_of_it(tmp_path, capsys):
    first, second = make(tmp_path / "a" / "run"), make(tmp_path / "b" / "run", shift=0.5)
    assert main(["report", str(first), str(second)]) == 0
    page = (first / "report.html").read_text()
    assert "report     " in capsys.readouterr().out
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, flags=re.DOTALL)[1])
    assert [run["name"] for run in data["runs"]] == [str(first), str(second)]
    assert data["runs"][1]["metrics"]["critic/score/mean"][0] == 0.6
    assert data["runs"][0]["samples"][3]["response"] == EVIL
    assert "plotly.js v" in page[:20_000]
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="(?!data:)', page[:20_000])
    assert "%%" not in page[:2000]


def test_a_run_that_has_just_begun_has_a_report_too(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("device: cpu\n")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "new" / "r.html")]) == 0
    assert "no step is in metrics.jsonl yet" in capsys.readouterr().out
    assert (tmp_path / "new" / "r.html").exists()


@pytest.mark.parametrize(
    ("make_it", "message"), [(False, "is no folder"), (True, "is no run's folder: it has none of")]
)
def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys, make_it, message):
    folder = tmp_path / "x"
    if make_it:
        folder.mkdir()
    assert main(["report", str(folder)]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "report.html").exists()


def test_lines_that_are_no_objects_are_damage(tmp_path):
    (tmp_path / "f").write_bytes(b'[1]\n{"a": "\xff"}\n{"b": 2}')
    notes: list[str] = []
    assert read_lines(tmp_path / "f", notes) == [{"a": "\ufffd"}, {"b": 2}]
    assert notes == ["f: 1 damaged lines are left out"]
