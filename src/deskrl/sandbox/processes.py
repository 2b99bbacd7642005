"""Child processes that outlive no one: started, bounded, and killed whole on cancellation.

Invariant: when a coroutine here ends, normally, by error or by cancellation, the process that it started
is dead and reaped. asyncio alone does not give that: a task cancelled while it awaits a subprocess simply
forgets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, override

# What host-side helpers and bwrap itself see. bwrap's environment must never be the harness's: whatever the
# first process of a sandbox was started with can be read inside as /proc/1/environ.
CLEAN_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_CHUNK = 1 << 16
# A shell that left a background child behind never closes its output; wait this long for the rest (seconds).
_LINGER = 0.5


async def finish[T](work: Awaitable[T]) -> T:
    """Run `work` to its end even if the caller is cancelled meanwhile, then re-raise the cancellation."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
            cancelled = True
        except BaseException:  # raised again by task.result()
            break
    if cancelled:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not complain
        raise asyncio.CancelledError
    return task.result()


class _Protocol(asyncio.subprocess.SubprocessStreamProtocol):
    def __init__(self) -> None:
        super().__init__(limit=_CHUNK, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    @override
    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class Child(asyncio.subprocess.Process):
    """A process whose `wait` ends with the process.

    asyncio's own `wait` also waits until the pipes are closed, which a detached grandchild can put off for ever.
    """

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: _Protocol) -> None:
        super().__init__(transport, protocol, asyncio.get_running_loop())
        self._child_transport, self._exited = transport, protocol.exited

    @override
    async def wait(self) -> int:
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode

    def close(self) -> None:
        """Close this side of the pipes, and kill the process should it still run."""
        self._child_transport.close()


async def _start(argv: Sequence[str], **kwargs: Any) -> Child:
    transport, protocol = await asyncio.get_running_loop().subprocess_exec(_Protocol, *argv, **kwargs)
    return Child(transport, protocol)


async def start_process(argv: Sequence[str], **kwargs: Any) -> Child:
    """Start a process in a session of its own; it leaves nothing behind when cancelled."""
    task = asyncio.ensure_future(_start(argv, start_new_session=True, **{"env": CLEAN_ENV, **kwargs}))
    try:
        return await finish(task)
    except asyncio.CancelledError:
        if task.done() and not task.cancelled() and task.exception() is None:
            await finish(kill_group(task.result()))
            task.result().close()
        raise


async def kill_group(process: Child) -> None:
    """SIGKILL the process and its session's process group, and reap it. Idempotent."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


@dataclass(frozen=True)
class Completed:
    """A finished command: exit status, captured output (bytes, possibly cut), and how it ended."""

    returncode: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False


class Capture:
    """Keeps the first `limit` bytes of a stream and counts the rest, so that output cannot eat memory."""

    def __init__(self, limit: int) -> None:
        self._limit, self._kept, self._dropped = limit, bytearray(), 0

    def __call__(self, chunk: bytes) -> None:
        room = self._limit - len(self._kept)
        self._kept += chunk[:room]
        self._dropped += max(0, len(chunk) - room)

    def value(self) -> bytes:
        """The kept bytes, with a note at the end when some were dropped."""
        note = f"\n[deskrl: output cut, {self._dropped} more bytes dropped]\n" if self._dropped else ""
        return bytes(self._kept) + note.encode()


async def _pump(stream: asyncio.StreamReader, sink: Callable[[bytes], None]) -> None:
    while chunk := await stream.read(_CHUNK):
        sink(chunk)


async def run_bounded(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] = CLEAN_ENV,
    stdin: IO[bytes] | None = None,
    timeout: float | None = None,  # noqa: ASYNC109 - the process has to be killed, not only abandoned
    limit: int = 10_000_000,
    stdout_sink: Callable[[bytes], None] | None = None,
) -> Completed:
    """Run `argv` to its end with at most `limit` bytes kept of each stream.

    `timeout` in seconds, None for none: past it the process group is killed and `timed_out` is set with
    status 124. `stdout_sink` gets standard output chunk by chunk instead of it being kept; what it raises
    kills the command and propagates.
    """
    process = await start_process(
        argv,
        env=dict(env),
        stdin=stdin if stdin is not None else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    out, err = Capture(limit), Capture(limit)
    pumps = asyncio.gather(_pump(process.stdout, stdout_sink or out), _pump(process.stderr, err))
    timed_out = False
    try:
        async with asyncio.timeout(timeout):
            waiter = asyncio.ensure_future(process.wait())
            watched: set[asyncio.Future[Any]] = {waiter, pumps}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if pumps.done():
                pumps.result()  # a sink that refused: kill the command now
            await waiter
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(pumps), _LINGER if stdout_sink is None else None)
    except TimeoutError:
        timed_out = True
    finally:
        if process.returncode is None:
            await finish(kill_group(process))
        if not pumps.done():
            pumps.cancel()
            await asyncio.wait({pumps})
        # Closes the pipe ends that a surviving background child keeps from reaching their end.
        process.close()
    status = 124 if timed_out else process.returncode
    return Completed(status if status is not None else -1, out.value(), err.value(), timed_out)


async def run_host(argv: Sequence[str]) -> None:
    """Run a host tool (cp, chown, rm) to its end; raises OSError with its error text when it fails."""
    done = await run_bounded(argv, limit=20_000)
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip()
        raise OSError(f"{argv[0]} failed with status {done.returncode}: {text[-2000:]}")
