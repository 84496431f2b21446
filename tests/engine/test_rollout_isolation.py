import asyncio
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.errors import UserError
from megappo.rollout.isolation import environment_kept, output_to, trainer_kept


def test_torchrun_variables_are_hidden_inside_and_back_after(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with environment_kept({"OMP_NUM_THREADS": "1"}):
        assert "RANK" not in os.environ
        assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["RANK"] == "3"
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_every_change_to_the_environment_is_undone(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    before = dict(os.environ)
    with environment_kept({}):
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
        del os.environ["PATH"]
    assert dict(os.environ) == before


def test_loopback_never_goes_through_a_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "example.com,localhost")
    with environment_kept({}):
        assert os.environ["no_proxy"] == "example.com,localhost,127.0.0.1,::1"


def test_output_of_this_process_and_its_children_goes_to_the_log(tmp_path: Path, capfd):
    log = tmp_path / "deep" / "engine.log"
    with output_to(log):
        os.write(1, b"mine\n")
        subprocess.run([sys.executable, "-c", "print('child')"], check=True)
    os.write(1, b"after\n")
    assert log.read_text() == "mine\nchild\n"
    assert capfd.readouterr().out == "after\n"


def test_a_log_that_cannot_be_written_is_a_user_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), output_to(tmp_path / "file" / "log"):
        pass


def test_process_wide_settings_are_back_after_an_exception(tmp_path: Path):
    root = logging.getLogger()
    handler = logging.FileHandler(tmp_path / "trainer.log")
    root.addHandler(handler)
    before = (
        root.handlers[:],
        root.level,
        signal.getsignal(signal.SIGTERM),
        multiprocessing.get_start_method(allow_none=True),
        asyncio.get_event_loop_policy(),
    )

    def meddle() -> None:
        logging.basicConfig(force=True, level=logging.DEBUG)
        signal.signal(signal.SIGTERM, lambda *_: None)
        multiprocessing.set_start_method("spawn", force=True)
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        raise KeyError("inside")

    with (
        pytest.raises(KeyError, match="inside"),
        trainer_kept(log_file=tmp_path / "engine.log", environment={}),
    ):
        meddle()
    assert before == (
        root.handlers[:],
        root.level,
        signal.getsignal(signal.SIGTERM),
        multiprocessing.get_start_method(allow_none=True),
        asyncio.get_event_loop_policy(),
    )
    root.error("still open")
    root.removeHandler(handler)
    handler.close()
    assert "still open" in (tmp_path / "trainer.log").read_text()
