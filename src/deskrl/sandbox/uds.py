"""An httpx transport over a Unix socket whose last path component must really be a socket.

The socket lies in a folder that the sandbox can write. connect() follows symbolic links, so a link there to
a socket of the host (a container runtime's, say) would make the harness talk to it with the harness's own
rights. The path is therefore opened without following, and the connection goes through that descriptor.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx
from httpcore._backends.auto import AutoBackend


class _NoFollowBackend(AutoBackend):
    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        except OSError as error:
            raise httpcore.ConnectError(f"world socket {path}: {error.strerror}") from error
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                raise httpcore.ConnectError(f"world socket {path} is not a socket: refusing to follow it")
            return await super().connect_unix_socket(
                f"/proc/self/fd/{fd}", timeout=timeout, socket_options=socket_options
            )
        finally:
            os.close(fd)


def no_follow_transport(uds: str) -> httpx.AsyncHTTPTransport:
    """A transport bound to the socket at host path `uds`; connecting to a symbolic link is refused."""
    transport = httpx.AsyncHTTPTransport(uds=uds)
    # httpx has no parameter for the network backend; its transport is a thin shell around this pool.
    transport._pool = httpcore.AsyncConnectionPool(uds=uds, network_backend=_NoFollowBackend())
    return transport
