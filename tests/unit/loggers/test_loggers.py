import io
import json
import math

import pytest

from megappo.errors import UserError
from megappo.loggers import LOGGERS, LoggerSettings
from megappo.loggers.jsonl import read_jsonl


def settings(tmp_path, *, first_step=0, terminal=None):
    return LoggerSettings(
        run_dir=tmp_path, first_step=first_step, total_steps=9, terminal=terminal or io.StringIO()
    )


def test_jsonl_writes_a_line_a_step_with_sorted_names(tmp_path):
    logger = LOGGERS["jsonl"](settings(tmp_path))
    logger.log(1, {"b/x": 2.0, "a/y": math.nan})
    logger.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a/y": null, "b/x": 2.0}\n'


def test_a_resumed_run_has_no_step_twice(tmp_path):
    logger = LOGGERS["jsonl"](settings(tmp_path))
    for step in range(6):
        logger.log(step, {"x": float(step)})
    logger.close()
    logger = LOGGERS["jsonl"](settings(tmp_path, first_step=4))
    logger.log(4, {"x": 40.0})
    logger.close()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["x"]) for r in rows] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40.0)]


def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "x"')
    LOGGERS["jsonl"](settings(tmp_path, first_step=3)).close()
    assert path.read_text() == '{"step": 1}\n'


def test_tensorboard_holds_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = LOGGERS["tensorboard"](settings(tmp_path))
    logger.log(3, {"critic/score/mean": 0.5})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(3, 0.5)]


def test_a_screen_that_is_no_terminal_gets_plain_lines(tmp_path):
    screen = io.StringIO()
    logger = LOGGERS["console"](settings(tmp_path, first_step=1, terminal=screen))
    logger.log(1, {"critic/score/mean": 0.25, "timing_s/step": 2.0, "other": 1.0})
    logger.close()
    text = screen.getvalue()
    assert text.startswith("step    1/9  score 0.250  s/step 2.0  left ")
    assert "\x1b" not in text
    assert text.count("\n") == 1


def test_an_unknown_logger_is_an_error_that_lists_the_known_ones():
    with pytest.raises(UserError, match="console, jsonl, mlflow, tensorboard, wandb"):
        LOGGERS["wand"]


def test_metrics_lines_are_json(tmp_path):
    logger = LOGGERS["jsonl"](settings(tmp_path))
    logger.log(0, {"x": math.inf, "y": 1})
    logger.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "x": None, "y": 1}


class Terminal(io.StringIO):
    """A screen that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_progress_bar_that_is_taken_away_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Terminal()
    logger = LOGGERS["console"](settings(tmp_path, first_step=1, terminal=screen))
    logger.log(1, {"critic/score/mean": 0.25})
    logger.log(2, {"critic/score/mean": 0.5})
    logger.close()
    text = screen.getvalue()
    assert "step    2/9  score 0.500" in text
    assert "2/9" in text
    assert "training" in text
    assert "\x1b[?25h" in text  # the cursor is shown again


def test_steps_that_come_again_stand_once_in_jsonl(tmp_path):
    logger = LOGGERS["jsonl"](settings(tmp_path))
    for step in range(1, 5):
        logger.log(step, {"x": float(step)})
    logger.rewind(3)
    logger.log(3, {"x": 30.0})
    logger.close()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["x"]) for r in rows] == [(1, 1), (2, 2), (3, 30.0)]


def test_tensorboard_has_sentences_and_hides_steps_that_come_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = LOGGERS["tensorboard"](settings(tmp_path))
    for step in range(1, 5):
        logger.log(step, {"x": float(step)})
    logger.note(4, "guard: roll_back")
    logger.rewind(3)
    logger.log(3, {"x": 30.0})
    logger.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("x")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert "events/text_summary" in found.Tags()["tensors"]
