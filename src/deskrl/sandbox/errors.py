"""What can go wrong with a sandbox, by who has to act.

`SandboxUnavailable`: this host cannot run sandboxes until someone changes it; never worth a retry.
`SandboxError`: one sandbox failed (died, refused a transfer); another attempt may work.
"""

from __future__ import annotations


class SandboxUnavailable(RuntimeError):
    """The host lacks something that every sandbox needs; the message says what to do."""


class SandboxError(RuntimeError):
    """One sandbox failed: it is not running, it died, or a transfer in or out of it failed."""
