import json
import xml.etree.ElementTree as ElementTree

import pytest

from tools.plot_runs import main


def write_run(folder, values):
    folder.mkdir()
    rows = [{"step": 0, "val/score/mean": 0.0}]
    rows += [{"step": step, "score": value} for step, value in enumerate(values, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_each_run_is_a_line_through_the_steps_that_have_the_metric(tmp_path):
    one, two = write_run(tmp_path / "one", [0.0, 1.0]), write_run(tmp_path / "two", [0.5, 0.5, 0.5])
    out = tmp_path / "out.svg"
    assert main([str(out), "score", f"first={one}", f"second={two}"]) == 0
    root = ElementTree.fromstring(out.read_text())
    space = "{http://www.w3.org/2000/svg}"
    axes, *lines = root.findall(f"{space}polyline")
    assert axes.get("points") == "40.0,40.0 40.0,280.0 600.0,280.0"
    assert lines[0].get("points") == "226.7,280.0 413.3,40.0"
    assert lines[1].get("points") == "226.7,160.0 413.3,160.0 600.0,160.0"
    texts = [text.text for text in root.findall(f"{space}text")]
    assert {"score", "first", "second"} <= set(texts)


@pytest.mark.parametrize("run", ["first={root}/none", "first={root}/one", "first"])
def test_a_run_that_cannot_be_drawn_is_named(tmp_path, capsys, run):
    write_run(tmp_path / "one", [])
    assert main([str(tmp_path / "out.svg"), "score", run.format(root=tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(("error:", "usage:"))
