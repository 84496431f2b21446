"""Real wandb (offline) and real MLflow (file store), read back from what they wrote."""

import io
import os
import socket
import struct
import threading
from contextlib import contextmanager

import pytest
import urllib3
from mlflow import MlflowClient
from wandb.proto.wandb_internal_pb2 import Record

from megappo.config.guard import WatchdogSection
from megappo.config.tracking import LOGGER_PACKAGES, TrackingSection, check_loggers
from megappo.loggers import LOGGERS, LoggerSettings
from megappo.loggers.contained import ContainedLogger


def settings(run_dir, *, first_step=0, **names):
    return LoggerSettings(
        run_dir=run_dir,
        first_step=first_step,
        total_steps=9,
        terminal=io.StringIO(),
        tracking=TrackingSection(project_name="sums", wandb_mode="offline", **names),
        config={"actor.optim.lr": 0.5, "model.path": "m"},
    )


def write(run_dir, kind, steps, *, first_step=0, **names):
    logger = LOGGERS[kind](settings(run_dir, first_step=first_step, **names))
    for step, value in steps:
        logger.log(step, {"critic/score/mean": value, "odd/gsm8k v1:x": 2.0})
    return logger


def wandb_records(path):
    """What a `.wandb` file holds: LevelDB's log of blocks, protocol buffers in it."""
    data, parts, position = path.read_bytes(), [], 7
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        if (room := 32768 - position % 32768) < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(b"".join(parts))
            parts = []


def wandb_rows(run_dir):
    """(run id, step, score) of all offline runs, in order."""
    found = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "history":
                items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
                found.append(
                    (
                        path.stem.removeprefix("run-"),
                        record.history.step.num,
                        float(items["critic/score/mean"]),
                    )
                )
    return found


def test_wandb_offline_has_each_step_once_also_after_a_resume_and_a_roll_back(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")  # for its own process to start; 30 s else
    logger = write(tmp_path, "wandb", [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)])
    logger.rewind(2)
    logger.log(2, {"critic/score/mean": 99.0})
    logger.close()
    (run_id,) = {row[0] for row in wandb_rows(tmp_path)}
    # A checkpoint of step 2: the resumed run makes step 3 again, then goes on.
    write(tmp_path, "wandb", [(3, 0.3), (4, 0.4)], first_step=3).close()
    want = [(run_id, step, pytest.approx(step / 10)) for step in range(5)]
    assert wandb_rows(tmp_path) == want


def mlflow_runs(run_dir):
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # as the logger does in its process
    client = MlflowClient(tracking_uri=(run_dir / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("sums")
    return client, client.search_runs([experiment.experiment_id])


def test_mlflow_has_each_step_once_also_after_a_resume_and_a_roll_back(tmp_path):
    logger = write(tmp_path, "mlflow", [(1, 0.1), (2, 0.2), (3, 0.3)], experiment_name="first")
    logger.rewind(3)
    logger.log(3, {"critic/score/mean": 99.0})
    logger.close()
    write(tmp_path, "mlflow", [(3, 0.3), (4, 0.4)], first_step=3, experiment_name="first").close()
    client, (run,) = mlflow_runs(tmp_path)
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert run.data.metrics["odd/gsm8k v1_x"] == 2.0  # a character that MLflow has no place for
    assert run.data.params == {"actor.optim.lr": "0.5", "model.path": "m"}
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")


def test_mlflow_has_a_step_once_that_was_written_and_not_noted(tmp_path):
    """A kill lies between MLflow's answer and our note of it."""
    write(tmp_path, "mlflow", [(1, 0.1), (2, 0.2)])
    note = tmp_path / "mlflow_run.json"
    note.write_text(note.read_text().replace('"last_step": 2', '"last_step": 1'))
    write(tmp_path, "mlflow", [(2, 0.2), (3, 0.3)], first_step=2).close()
    client, (run,) = mlflow_runs(tmp_path)
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert [m.step for m in history] == [1, 2, 3]


def test_a_run_that_starts_anew_is_a_new_one_in_the_tracker(tmp_path):
    for value in (0.1, 0.7):
        write(tmp_path, "mlflow", [(1, value)]).close()
    _, runs = mlflow_runs(tmp_path)
    assert sorted(run.data.metrics["critic/score/mean"] for run in runs) == [0.1, 0.7]


def test_a_logger_that_fails_is_told_once_and_stops_nothing(tmp_path):
    told = []
    logger = ContainedLogger(
        "jsonl",
        lambda: LOGGERS["jsonl"](settings(tmp_path, first_step=1)),
        report=lambda step, text: told.append((step, text)),
        first_step=1,
    )
    logger.log(1, {"x": 1.0})
    logger.log(2, {"x": "no number"})
    logger.log(3, {"x": 3.0})
    logger.rewind(2)
    logger.note(3, "text")
    logger.close()
    ((step, text),) = told
    assert step == 2
    assert "'jsonl' failed and is off until the run starts again: TypeError" in text
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "x": 1.0}\n'


def test_a_logger_that_cannot_start_is_told_once(tmp_path):
    (tmp_path / "mlruns").write_text("a file where MLflow wants a folder")
    told = []
    logger = ContainedLogger(
        "mlflow",
        lambda: LOGGERS["mlflow"](settings(tmp_path)),
        report=lambda step, text: told.append(text),
        first_step=0,
    )
    logger.log(1, {"x": 1.0})
    logger.close()
    assert len(told) == 1
    assert "the logger 'mlflow' failed" in told[0]


@contextmanager
def server(answer=b""):
    """Takes requests, counts them, and says this to each; nothing, and nobody is hung up on."""
    listener, taken = socket.create_server(("127.0.0.1", 0)), []

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            taken.append(connection)
            if answer:
                connection.recv(2**16)
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", taken
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in [listener, *taken]:
            connection.close()


def told_of_mlflow(run_dir, uri):
    """What a run hears of a logger with this server: of its start, a step and its end."""
    told = []
    logger = ContainedLogger(
        "mlflow",
        lambda: LOGGERS["mlflow"](settings(run_dir, mlflow_uri=uri)),
        report=lambda step, text: told.append(text),
        first_step=0,
    )
    logger.log(1, {"x": 1.0})
    logger.close()
    return told


@pytest.fixture
def no_limits_set(monkeypatch):
    for name in ("REQUEST_TIMEOUT", "REQUEST_MAX_RETRIES", "RESPECT_RETRY_AFTER_HEADER"):
        monkeypatch.delenv(f"MLFLOW_HTTP_{name}", raising=False)


def test_an_mlflow_server_that_is_silent_is_told_once(tmp_path, monkeypatch, no_limits_set):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with server() as (uri, taken):
        (text,) = told_of_mlflow(tmp_path, uri)
    assert len(taken) == 1
    assert "the logger 'mlflow' failed and is off until the run starts again" in text
    assert "timed out" in text


def test_a_busy_mlflow_server_cannot_hold_the_ranks(tmp_path, monkeypatch, no_limits_set):
    slept_s = []
    monkeypatch.setattr(urllib3.util.retry.time, "sleep", slept_s.append)
    head = b"HTTP/1.1 503 Busy\r\nRetry-After: 3600\r\n"
    busy = head + b"Content-Length: 0\r\nConnection: close\r\n\r\n"
    with server(busy) as (uri, taken):
        (text,) = told_of_mlflow(tmp_path, uri)
    assert len(taken) == 3
    assert sum(slept_s) < 30
    assert "the logger 'mlflow' failed" in text


def test_a_silent_mlflow_server_is_given_up_long_before_the_watchdog_acts(tmp_path, no_limits_set):
    write(tmp_path, "mlflow", []).close()
    timeout_s = int(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"])
    retries = int(os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"])
    assert (1 + retries) * timeout_s < WatchdogSection().timeout_s / 10


def test_the_config_knows_the_loggers_that_there_are():
    assert sorted(LOGGER_PACKAGES) == list(LOGGERS)


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(LOGGER_PACKAGES, "wandb", "no_such_package_at_all")
    (problem,) = check_loggers(["jsonl", "wandb"])
    assert "no_such_package_at_all is not installed; pip install wandb" in problem


def test_unknown_and_repeated_loggers_are_refused():
    problems = check_loggers(["jsonl", "wand", "jsonl"])
    assert problems == [
        "loggers has 'jsonl' 2 times: name it once",
        "loggers has 'wand': known: console, jsonl, tensorboard, wandb, mlflow",
    ]
