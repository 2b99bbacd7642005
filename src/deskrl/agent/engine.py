"""Token-in, token-out sampling over vLLM's `/v1/completions`.

The prompt goes out as token ids; the sampled ids and their logprobs come back as the engine drew them
(`return_token_ids`). Nothing is re-tokenised. One HTTP pool per engine address and event loop is shared
by all trials of the process.

Every request carries the whole history, and the answer repeats it. Both are JSON of up to 160k numbers, tens of
milliseconds in which the event loop would stand still, and a thread would not help: the JSON codec never lets go
of the interpreter. So the text of what was sent before is kept, and the repetition is cut out before parsing.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from deskrl.agent.errors import ContextOverflowError, EngineProtocolError, EngineUnavailableError

# Told by the trainer: how many weight syncs an engine address has had. vLLM itself does not report it.
_weight_versions: dict[str, Callable[[], int]] = {}
_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, httpx.AsyncClient]] = WeakKeyDictionary()

_SLICE = 4096
_REPEATED = b'"prompt_token_ids":['


def register_weight_version(base_url: str, version: Callable[[], int]) -> None:
    """Makes generations from `base_url` carry `version()` as read before and after each request."""
    _weight_versions[base_url.rstrip("/")] = version


@dataclass(frozen=True)
class Generation:
    """One sampled turn: `len(ids) == len(logprobs)`; `finish_reason` is `stop` or `length`."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    weight_version_start: int | None
    weight_version_end: int | None
    seconds: float


class CompletionsEngine:
    """A client of one engine address (an engine, or the router before several).

    Args:
        base_url: for example `http://127.0.0.1:8000`.
        model: the served model name.
        timeout_s: limit of one request; a weight sync in between counts towards it.
        retry_s: how long an unreachable or failing engine is retried before giving up.
    """

    def __init__(self, base_url: str, model: str, *, timeout_s: float = 1800.0, retry_s: float = 60.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._sent: tuple[array[int], bytes] = array("i"), b""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        session_id: str,
    ) -> Generation:
        """Samples one turn.

        Raises:
            ContextOverflowError: prompt and max_tokens do not fit the model's context.
            EngineUnavailableError: no usable answer within `retry_s`.
            EngineProtocolError: ids or logprobs are missing, or their lengths differ.
        """
        version = _weight_versions.get(self.base_url)
        before: int | None = None
        prompt = await self._prompt_text(prompt_ids)

        def body() -> bytes:
            # Made anew for every attempt: a cache filled with earlier weights must not serve later ones.
            nonlocal before
            before = version() if version else None
            rest = {
                **sampling,
                **({} if before is None else {"cache_salt": f"weights-{before}"}),
                "model": self.model,
                "max_tokens": max_tokens,
                "stop_token_ids": list(stop_token_ids),
                "logprobs": 1,
                "return_token_ids": True,
                "skip_special_tokens": False,
            }
            rest.pop("prompt", None)
            return b'{"prompt":[%b],%b' % (prompt, json.dumps(rest, allow_nan=False).encode()[1:])

        started = time.monotonic()
        url, headers = self.base_url + "/v1/completions", {"X-Session-ID": session_id}
        response = await post_retrying(self._pool(), url, body, headers, self._timeout_s, self._retry_s)
        if response.status_code == 400 and "maximum context length" in response.text:
            raise ContextOverflowError(response.text[:500])
        after = version() if version else None
        answer = json_object(response)
        reported = answer.get("deskrl") or {}
        return read_generation(
            answer,
            weight_version_start=reported.get("weight_version_start", before),
            weight_version_end=reported.get("weight_version_end", after),
            seconds=time.monotonic() - started,
        )

    async def _prompt_text(self, ids: Sequence[int]) -> bytes:
        """The ids as JSON without brackets; of a prompt that goes on from the last one, only the new are encoded."""
        packed = ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
        sent, text = self._sent
        if packed[: len(sent)] != sent:
            sent, text = array("i"), b""
        parts = [text] if text else []
        for start in range(len(sent), len(packed), _SLICE):
            parts.append(json.dumps(packed[start : start + _SLICE].tolist(), separators=(",", ":"))[1:-1].encode())
            await asyncio.sleep(0)
        text = b",".join(parts)
        self._sent = packed, text
        return text

    def _pool(self) -> httpx.AsyncClient:
        pools = _pools.setdefault(asyncio.get_running_loop(), {})
        if self.base_url not in pools:
            # Idle connections are dropped before uvicorn's 5 s keep-alive closes them under a request.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)
            pools[self.base_url] = httpx.AsyncClient(limits=limits)
        return pools[self.base_url]


async def post_retrying(
    client: httpx.AsyncClient,
    url: str,
    body: Callable[[], Mapping[str, Any] | bytes],
    headers: Mapping[str, str],
    timeout_s: float,
    retry_s: float,
) -> httpx.Response:
    """Posts `body()` (an object, or the JSON of one) until the answer is no passing failure, for `retry_s` at most.

    Passing failures are an unreachable address, 408, 429 and 5xx.

    Raises:
        EngineUnavailableError: a request took longer than `timeout_s`, or `retry_s` are over.
    """
    deadline = time.monotonic() + retry_s
    delay = 0.25
    while True:
        data = body()
        content: dict[str, Any] = {"content": data} if isinstance(data, bytes) else {"json": data}
        sent_headers = {"Content-Type": "application/json", **headers}
        try:
            response = await client.post(url, **content, headers=sent_headers, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise EngineUnavailableError(f"{url}: no answer in {timeout_s:g} s ({type(error).__name__})") from error
        except httpx.TransportError as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if response.status_code < 500 and response.status_code not in (408, 429):
                return response
            problem = f"HTTP {response.status_code}: {response.text[:500]}"
        if time.monotonic() + delay > deadline:
            raise EngineUnavailableError(f"{url} failed for {retry_s:g} s: {problem}")
        await asyncio.sleep(delay)
        delay = min(delay * 2, 5.0)


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The object in a 200 answer; anything else raises EngineProtocolError."""
    if response.status_code != 200:
        raise EngineProtocolError(f"{response.url}: HTTP {response.status_code}: {response.text[:500]}")
    try:
        return dict(json.loads(_without_prompt(response.content)))
    except (ValueError, TypeError) as error:
        raise EngineProtocolError(f"{response.url}: not a JSON object: {response.text[:200]!r}") from error


def _without_prompt(answer: bytes) -> bytes:
    """`answer` without the prompt's ids. Inside a JSON string the key's quotes would be escaped: it cannot match."""
    start = answer.find(_REPEATED)
    end = answer.find(b"]", start)
    return answer if start < 0 or end < 0 else answer[: start + len(_REPEATED)] + answer[end:]


def read_generation(
    answer: Mapping[str, Any],
    *,
    weight_version_start: int | None,
    weight_version_end: int | None,
    seconds: float,
) -> Generation:
    """The generation in a completions answer, checked.

    Raises:
        EngineProtocolError: see `CompletionsEngine.generate`.
    """
    try:
        choice = answer["choices"][0]
        ids = choice["token_ids"]
        logprobs = (choice["logprobs"] or {}).get("token_logprobs")
        finish_reason = choice["finish_reason"]
    except (KeyError, IndexError, TypeError) as error:
        raise EngineProtocolError(f"completion without {error}: does the engine honour return_token_ids?") from error
    if ids is None or logprobs is None:
        raise EngineProtocolError("completion without token_ids or logprobs: does the engine honour return_token_ids?")
    if len(ids) != len(logprobs):
        raise EngineProtocolError(f"{len(ids)} token ids but {len(logprobs)} logprobs")
    broken = [i for i, value in enumerate(logprobs) if value is None or not math.isfinite(value)]
    if broken:
        raise EngineProtocolError(f"logprob {broken[0]} of {len(logprobs)} is {logprobs[broken[0]]!r}")
    if finish_reason not in ("stop", "length"):
        # vLLM says `abort` when a request is dropped, for instance by a weight sync that does not keep it.
        raise EngineUnavailableError(f"generation ended with finish_reason {finish_reason!r}")
    return Generation(list(ids), list(logprobs), finish_reason, weight_version_start, weight_version_end, seconds)
