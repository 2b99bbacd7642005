"""The embedded engine: vLLM 0.23's HTTP surface, as SkyRL's client uses it, over transformers on a CPU.

    python -m deskrl.training.cpu.engine --model DIR --served-model-name policy --port 8301

Token ids in, token ids out: as in vLLM, a sampled stop token is part of `token_ids`. Every response also
carries `deskrl: {weight_version_start, weight_version_end, cached_tokens}`; the version counts weight
reloads of this process. What is not supported is refused with 400, never ignored.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deskrl.training.cpu.runner import Runner, Sampling, UnsupportedModelError
from deskrl.training.cpu.scheduler import PauseMode, Scheduler, Sequence

_UNSUPPORTED = {
    "stream": False, "stop": [], "echo": False, "suffix": None, "prompt_logprobs": None, "logit_bias": None,
    "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "best_of": 1,
    "use_beam_search": False, "bad_words": [], "structured_outputs": None, "response_format": None,
}  # fmt: skip
"""Fields that would change what is sampled or returned, with the only value (or null) taken for each."""


class BadRequestError(Exception):
    """The request cannot be served as it stands; becomes HTTP 400 with vLLM's error body."""


class Engine:
    """The HTTP handlers over one scheduler."""

    def __init__(
        self, scheduler: Scheduler, tokenizer: Any, name: str, max_model_len: int, record: Path | None = None
    ) -> None:
        """`record`: file that gets a line of JSON for each finished sequence (ids, logprobs, weight versions)."""
        self.scheduler, self.tokenizer, self.name, self.max_model_len = scheduler, tokenizer, name, max_model_len
        self.record = record

    def app(self) -> Starlette:
        """The ASGI application."""
        get: dict[str, Callable[..., Awaitable[Response]]] = {
            "/health": self.health,
            "/load": self.load,
            "/v1/models": self.models,
            "/get_world_size": self.world_size,
        }
        post: dict[str, Callable[..., Awaitable[Response]]] = {
            "/inference/v1/generate": self.generate,
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/finish_session": self.health,
            "/pause": self.pause,
            "/resume": self.resume,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/collective_rpc": self.collective_rpc,
        }
        routes = [Route(path, handler, methods=["GET"]) for path, handler in get.items()]
        routes += [Route(path, handler, methods=["POST"]) for path, handler in post.items()]
        errors = (BadRequestError, UnsupportedModelError)
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, _bad_request))

    # Generation

    async def generate(self, request: Request) -> Response:
        """vLLM's token-in, token-out endpoint."""
        body = await _json(request)
        params = body.get("sampling_params") or {}
        return await self._respond(request, body, params, [body.get("token_ids")], _token_choice)

    async def completions(self, request: Request) -> Response:
        """OpenAI completions; the prompt is a text, token ids, or a list of either."""
        body = await _json(request)
        prompt = body.get("prompt")
        prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        ids = [self.tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in prompts]
        return await self._respond(request, body, body, ids, self._text_choice, object="text_completion")

    async def chat(self, request: Request) -> Response:
        """OpenAI chat completions through the model's own template; tool calls are not parsed."""
        body = await _json(request)
        try:
            ids = self.tokenizer.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                tokenize=True,
                return_dict=False,
                **(body.get("chat_template_kwargs") or {}),
            )
        except Exception as error:  # templates raise whatever they like
            raise BadRequestError(f"cannot render the messages: {error}") from error
        room = self.max_model_len - len(ids)
        params = {**body, "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens") or room}
        extra = {"object": "chat.completion", "prompt_token_ids": ids}
        return await self._respond(request, body, params, [ids], self._chat_choice, **extra)

    async def _respond(
        self,
        request: Request,
        body: dict[str, Any],
        params: dict[str, Any],
        prompts: list[Any],
        choice: Callable[[Sequence], dict[str, Any]],
        **extra: Any,
    ) -> Response:
        if (model := body.get("model")) not in (None, self.name):
            return _error(404, f"The model `{model}` does not exist.", "NotFoundError")
        sequences = self._sequences(prompts, params)
        for sequence in sequences:
            self.scheduler.submit(sequence)
        everything: asyncio.Future[Any] = asyncio.gather(*(asyncio.wrap_future(s.done) for s in sequences))
        gone: asyncio.Future[Any] = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({everything, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not everything.done():
                return Response(status_code=499)
            await everything
        finally:
            gone.cancel()
            for sequence in sequences:
                self.scheduler.cancel(sequence)  # no effect on one that has finished
        if self.record is not None:
            with self.record.open("a") as handle:
                handle.writelines(json.dumps(_record(sequence)) + "\n" for sequence in sequences)
        prompt_tokens, sampled = (sum(len(x) for x in xs) for xs in (prompts, [s.output for s in sequences]))
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
        }
        identity = uuid.uuid4().hex
        return JSONResponse({
            "id": identity, "request_id": identity, "created": int(time.time()), "model": self.name, **extra,
            "choices": [{"index": i, **choice(s)} for i, s in enumerate(sequences)],
            "usage": usage,
            "deskrl": {
                "weight_version_start": min(s.version_start or 0 for s in sequences),
                "weight_version_end": max(s.version_end or 0 for s in sequences),
                "cached_tokens": sum(s.cached_tokens for s in sequences),
            },
        })  # fmt: skip

    def _sequences(self, prompts: list[Any], params: dict[str, Any]) -> list[Sequence]:
        for key, only in _UNSUPPORTED.items():
            if params.get(key) not in (None, only):
                raise BadRequestError(f"`{key}` is not supported by the embedded engine")
        max_tokens = params.get("max_tokens")
        stop = set(params.get("stop_token_ids") or ())
        if not params.get("ignore_eos"):
            stop.add(self.tokenizer.eos_token_id)
        try:
            sampling = Sampling(
                max_tokens=int(16 if max_tokens is None else max_tokens),
                min_tokens=int(params.get("min_tokens") or 0),
                temperature=float(1.0 if params.get("temperature") is None else params["temperature"]),
                top_p=float(1.0 if params.get("top_p") is None else params["top_p"]),
                top_k=int(params.get("top_k") or 0),
                stop_ids=frozenset(int(i) for i in stop),
            )
            count, seed = int(params.get("n") or 1), params.get("seed")
        except (TypeError, ValueError) as error:
            raise BadRequestError(f"bad sampling parameter: {error}") from error
        vocab = self.scheduler.runner.vocab_size
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.max_tokens < 1 or count < 1:
            raise BadRequestError("temperature >= 0, 0 < top_p <= 1, max_tokens >= 1 and n >= 1 are required")
        if any(not 0 <= i < vocab for i in sampling.stop_ids):
            raise BadRequestError(f"stop_token_ids are out of the vocabulary of {vocab}")
        for ids in prompts:
            if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
                raise BadRequestError("the prompt must be a non-empty text or list of token ids")
            if min(ids) < 0 or max(ids) >= vocab:
                raise BadRequestError(f"Token id {max(ids)} is out of vocabulary")
            if len(ids) + sampling.max_tokens > self.max_model_len:
                raise BadRequestError(
                    f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                    f"{sampling.max_tokens} output tokens and your prompt contains {len(ids)} input tokens, for a "
                    f"total of {len(ids) + sampling.max_tokens} tokens. Please reduce the length of the input "
                    f"prompt or the number of requested output tokens."
                )
        return [
            Sequence(ids, sampling, seed=None if seed is None else int(seed) + i)
            for ids in prompts
            for i in range(count)
        ]

    def _text_choice(self, s: Sequence) -> dict[str, Any]:
        logprobs = {"tokens": _names(s), "token_logprobs": s.logprobs}
        return {
            **_choice(s),
            "text": self._decode(s.output),
            "prompt_token_ids": s.prompt,
            "logprobs": logprobs,
        }

    def _chat_choice(self, s: Sequence) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._decode(s.output)}
        return {**_token_choice(s), "message": message}

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    # Information

    async def health(self, request: Request) -> Response:
        """200 while the process serves; also the answer to calls that need nothing done."""
        return JSONResponse({})

    async def load(self, request: Request) -> Response:
        """Running and waiting sequences and the weight version."""
        return JSONResponse(self.scheduler.load())

    async def models(self, request: Request) -> Response:
        """The one served model."""
        card = {"id": self.name, "object": "model", "owned_by": "deskrl", "max_model_len": self.max_model_len}
        return JSONResponse({"object": "list", "data": [card]})

    async def world_size(self, request: Request) -> Response:
        """One process."""
        return JSONResponse({"world_size": 1})

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text."""
        body = await _json(request)
        special = body.get("add_special_tokens", True)
        ids = self.tokenizer(str(body.get("prompt", "")), add_special_tokens=special)["input_ids"]
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        return JSONResponse({"prompt": self.tokenizer.decode((await _json(request)).get("tokens", []))})

    # Control

    async def pause(self, request: Request) -> Response:
        """Stop between two steps; `mode` is keep, abort or wait (vLLM's default is abort)."""
        name = request.query_params.get("mode", "abort")
        if name not in get_args(PauseMode):
            raise BadRequestError(f"unknown pause mode {name!r}: keep, abort or wait")
        mode = cast(PauseMode, name)
        pausing = await asyncio.wrap_future(self.scheduler.call(partial(self.scheduler.pause, mode)))
        await asyncio.wrap_future(pausing)
        if request.query_params.get("clear_cache") == "true":
            await asyncio.wrap_future(self.scheduler.call(partial(self.scheduler.reset_prefixes, False)))
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Go on."""
        await asyncio.wrap_future(self.scheduler.call(self.scheduler.resume))
        return JSONResponse({"status": "resumed"})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget cached prefixes; `reset_running_requests` also recomputes running sequences' keys."""
        running = bool((await _json(request)).get("reset_running_requests"))
        await asyncio.wrap_future(self.scheduler.call(partial(self.scheduler.reset_prefixes, running)))
        return JSONResponse({})

    async def collective_rpc(self, request: Request) -> Response:
        """`reload_weights` from the folder `weights_path` of safetensors files; no other method."""
        body = await _json(request)
        kwargs = body.get("kwargs") or {}
        if body.get("method") != "reload_weights" or not kwargs.get("weights_path"):
            raise BadRequestError("the embedded engine knows only reload_weights with a weights_path")
        folder = Path(kwargs["weights_path"])
        version = await asyncio.wrap_future(self.scheduler.call(partial(self.scheduler.reload, folder)))
        return JSONResponse({"results": [None], "deskrl": {"weight_version": version}})


def _choice(s: Sequence) -> dict[str, Any]:
    # vLLM names the stop token only when it is not the model's own eos; nobody reads the difference.
    stop = s.output[-1] if s.finish_reason == "stop" else None
    return {"finish_reason": s.finish_reason, "stop_reason": stop, "token_ids": s.output}


def _token_choice(s: Sequence) -> dict[str, Any]:
    pairs = zip(_names(s), s.logprobs, strict=True)
    content = [{"token": name, "logprob": logprob, "top_logprobs": []} for name, logprob in pairs]
    return {**_choice(s), "logprobs": {"content": content}}


def _names(s: Sequence) -> list[str]:
    return [f"token_id:{i}" for i in s.output]


async def _json(request: Request) -> dict[str, Any]:
    raw = await request.body()
    try:
        body = await request.json() if raw else {}
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


async def _disconnected(request: Request) -> None:
    # The body has been read, so the only message still to come is the disconnect.
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _bad_request(request: Request, error: Exception) -> Response:
    return _error(400, str(error), "BadRequestError")


def _record(sequence: Sequence) -> dict[str, Any]:
    return {
        "prompt": sequence.prompt,
        "token_ids": sequence.output,
        "logprobs": sequence.logprobs,
        "weight_versions": [sequence.version_start, sequence.version_end],
    }


def _error(code: int, message: str, kind: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, code)


def main() -> None:
    """Parse the command line and serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="deskrl.training.cpu.engine")
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", default="policy")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefix-cache-mb", type=int, default=256)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--record", type=Path, help="write every finished sequence to this file")
    args = parser.parse_args()
    # Bound before the model loads, so that a taken port is an error now and not after a minute.
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((args.host, args.port))
    import random

    from transformers import AutoTokenizer

    if args.seed is not None:
        random.seed(args.seed)
    runner = Runner(args.model, args.max_batch, args.max_model_len, args.threads)
    scheduler = Scheduler(runner, args.max_batch, args.prefix_cache_mb * 2**20)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    app = Engine(scheduler, tokenizer, args.served_model_name, args.max_model_len, args.record).app()
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, timeout_keep_alive=60)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
    # The scheduler's thread may be inside a torch step; nothing is left to save, so do not wait for it.
    os._exit(0)


if __name__ == "__main__":
    main()
