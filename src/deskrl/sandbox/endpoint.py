"""Where a trial's world answers: a URL, and for a sandbox without network the Unix socket that carries it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class WorldEndpoint:
    """`base_url` to put in front of paths; `uds` the host path of the socket, None for plain TCP."""

    base_url: str
    uds: str | None = None

    def http_client(self, **kwargs: Any) -> httpx.AsyncClient:
        """A client for this world; `kwargs` go to httpx.AsyncClient (timeouts, headers, auth).

        The environment's proxy settings are ignored: a world is never behind a proxy.
        """
        import httpx

        options: dict[str, Any] = {"base_url": self.base_url, "trust_env": False, **kwargs}
        if self.uds is not None:
            from deskrl.sandbox.uds import no_follow_transport

            options["transport"] = no_follow_transport(self.uds)
        return httpx.AsyncClient(**options)
