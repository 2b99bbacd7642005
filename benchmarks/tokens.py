"""Cost of a turn's tokens: incremental rendering against the fixed-base method, in one run.

    python benchmarks/tokens.py [MODEL] [--turns 100] [--tokens 160000] [--tools 73] [--tool-tokens 400]

MODEL is a name for `prepare_model` or a model directory (default `tiny`). Prints one JSON line:

The work: a fifth of each turn is sampled; every twentieth turn's tool result has the 42,000 characters that the agent
loop lets through, except among the first and the last ten turns.

- `ratio`: CPU per turn of the fixed-base method (a dummy conversation with all tools and the new messages, rendered
  by the template and encoded, the known part cut off) over that of the renderer and the ledger;
- `flat`: the renderer's mean CPU of the last ten turns over that of the first ten;
- `loop_stall_ms`: the longest time for which the event loop could not run because this process was computing, while
  a `TokenPolicy` takes all turns from a completions server in another process. A gap counts with the CPU that the
  process used in it, at most its length: time in which a busy machine ran something else is not the policy's.
  `loop_gap_ms` is the longest gap as such and `idle_gap_ms` that of as long a time with nothing to do. The work is
  the same in every round and the disturbance is not, so all are those of the best of three rounds, after a short one
  in which the process makes its first request;
- `json_ms`: encoding the last prompt as JSON in one piece, as an HTTP client does; `ids_ms`: making a list of it;
  `prompt_text_ms`: what is left of both in the engine's client, for the last turn's new tokens;
- `bytes_per_token`, `save_ms`, `load_ms`: the file of the whole trajectory; `fork_bytes`: what a fork at its middle
  with one more turn adds to the file.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import statistics
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pydoc_data.topics import topics
from typing import Any

from deskrl.agent.engine import CompletionsEngine
from deskrl.agent.loop import LoopLimits
from deskrl.agent.model_files import load_chat_tokenizer
from deskrl.agent.policy import TokenLimits, TokenPolicy
from deskrl.tokens import ChatMLRenderer, ChatTokenizer, TokenLedger
from deskrl.tokens.chatml import TOOL_POSTAMBLE, TOOL_PREAMBLE
from deskrl.tokens.fork import Trajectories
from deskrl.training.models import prepare_model

_PROSE = "\n".join(topics.values())
_GENERATION_SHARE = 0.2
_LARGEST_RESULT = LoopLimits().tool_result_characters
_BEAT_S = 0.0005
_ROUNDS = 3


@dataclass(frozen=True)
class _Turn:
    """What the model says, as text and sampled ids with logprobs, and what its tool answers."""

    said: str
    ids: list[int]
    logprobs: list[float]
    result: str


@dataclass(frozen=True)
class _Work:
    start: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    turns: list[_Turn]


def _prose(rng: random.Random, characters: int) -> str:
    begin = rng.randrange(len(_PROSE) - characters)
    return _PROSE[begin : begin + characters]


def _tool(rng: random.Random, number: int, tokens: int) -> dict[str, Any]:
    # About 60 tokens of structure and names, the rest descriptions; four characters a token.
    each = max(4, (tokens - 120) * 4 // 10)
    properties = {
        f"argument_{n}": {"type": "string", "description": " ".join(_prose(rng, each).split())} for n in range(6)
    }
    parameters = {"type": "object", "properties": properties, "required": ["argument_0"]}
    description = " ".join(_prose(rng, 4 * each).split())
    function = {"name": f"server_{number % 7}_tool_{number}", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _make_work(renderer: ChatMLRenderer, count: int, tokens: int, tools: int, tool_tokens: int) -> _Work:
    rng = random.Random(0)
    tokenizer = renderer.tokenizer
    start = [{"role": "system", "content": _prose(rng, 800)}, {"role": "user", "content": _prose(rng, 2000)}]
    schemas = [_tool(rng, n, tool_tokens) for n in range(tools)]
    per_token = 100_000 / len(tokenizer.encode_content(_PROSE[:100_000]))
    large = set(range(20, count - 10, 20))
    room = tokens - len(renderer.prompt(start, schemas)) - len(large) * _LARGEST_RESULT / per_token
    # Beside its text, a turn has about 100 tokens of the call and of the template.
    characters = int((room / count - 100) * per_token)
    turns = []
    for number in range(count):
        call = json.dumps({"name": "server_0_tool_0", "arguments": {"argument_0": _prose(rng, 200)}})
        said = _prose(rng, int(characters * _GENERATION_SHARE)) + f"\n<tool_call>\n{call}\n</tool_call>"
        ids = [*tokenizer.encode_content(said), renderer.stop_token_ids[0]]
        size = _LARGEST_RESULT if number in large else int(characters * (1 - _GENERATION_SHARE))
        turns.append(_Turn(said, ids, [-rng.expovariate(2.0) for _ in ids], _prose(rng, size)))
    return _Work(start, schemas, turns)


def _cpu(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _incremental(renderer: ChatMLRenderer, work: _Work) -> tuple[TokenLedger, list[float]]:
    ledger = TokenLedger(renderer.tokenizer.vocabulary_size)
    ledger.append_prompt(renderer.prompt(work.start, work.tools))

    def step(turn: _Turn) -> None:
        ledger.append_generation(turn.ids, turn.logprobs, finish_reason="stop")
        ledger.append_close(renderer.close(turn.ids))
        ledger.append_observation(renderer.observation([turn.result]))

    return ledger, [_cpu(lambda turn=turn: step(turn)) for turn in work.turns]


def _fixed_base(tokenizer: ChatTokenizer, work: _Work) -> list[float]:
    base: list[dict[str, Any]] = [{"role": "user", "content": "I am a user."}]
    role, form, tools = "tool", "{}", work.tools
    if not tokenizer.supports_tools:
        # The template cannot render tools: their text goes where it would put them.
        definitions = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in work.tools)
        base.insert(0, {"role": "system", "content": TOOL_PREAMBLE + definitions + TOOL_POSTAMBLE})
        role, form, tools = "user", "<tool_response>\n{}\n</tool_response>", []

    def encoded(messages: list[dict[str, Any]], prompt: bool) -> list[int]:
        return tokenizer.encode_template(tokenizer.render(messages, tools=tools, add_generation_prompt=prompt))

    answered = [*base, {"role": "assistant", "content": "I am an assistant."}]
    known = len(encoded(answered, False))

    def step(turn: _Turn) -> list[int]:
        return encoded([*answered, {"role": role, "content": form.format(turn.result)}], True)[known:]

    return [_cpu(lambda turn=turn: step(turn)) for turn in work.turns]


def _serve(answers: list[bytes], pipe: Connection) -> None:
    """A completions server that says what it is told, turn by turn."""
    said = itertools.chain(answers[:1], itertools.cycle(answers))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = self.rfile.read(int(self.headers["Content-Length"]))
            # The answer repeats the prompt, as vLLM's does.
            prompt = request[request.index(b"[") : request.index(b"]") + 1]
            answer = next(said).replace(b"null", prompt, 1)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    pipe.send(server.server_port)
    server.serve_forever()


def _answer(turn: _Turn) -> bytes:
    choice = {
        "prompt_token_ids": None,
        "token_ids": turn.ids,
        "logprobs": {"token_logprobs": turn.logprobs},
        "finish_reason": "stop",
    }
    return json.dumps({"choices": [choice]}, separators=(",", ":")).encode()


async def _watched(work: Awaitable[None]) -> list[tuple[float, float]]:
    """How much later than asked for the loop wakes up while `work` runs, and CPU of the process then, in ms."""
    gaps: list[tuple[float, float]] = []

    async def watch() -> None:
        while True:
            begin, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(_BEAT_S)
            late = time.perf_counter() - begin - _BEAT_S
            gaps.append((late * 1e3, (time.process_time() - cpu) * 1e3))

    watcher = asyncio.create_task(watch())
    await work
    watcher.cancel()
    return gaps


async def _converse(renderer: ChatMLRenderer, work: _Work, url: str) -> None:
    limits = TokenLimits(max_context=10**7, max_turn=10**5)
    policy = TokenPolicy(CompletionsEngine(url, "benchmark"), renderer, limits, sampling={}, session_id="benchmark")
    await policy.start(work.start, work.tools)
    for turn in work.turns:
        said = await policy.turn()
        assert said is not None and len(said.parsed.calls) == 1
        await policy.tool_results([turn.result])
        await asyncio.sleep(2 * _BEAT_S)


async def _rounds(renderer: ChatMLRenderer, work: _Work, url: str) -> dict[str, float]:
    await _converse(renderer, replace(work, turns=work.turns[:1]), url)
    begin = time.perf_counter()
    rounds = [await _watched(_converse(renderer, work, url)) for _ in range(_ROUNDS)]
    each = (time.perf_counter() - begin) / _ROUNDS
    idle = [await _watched(asyncio.sleep(each)) for _ in range(_ROUNDS)]
    return {
        "loop_stall_ms": min(max(min(late, cpu) for late, cpu in gaps) for gaps in rounds),
        "loop_gap_ms": min(max(late for late, _ in gaps) for gaps in rounds),
        "idle_gap_ms": min(max(late for late, _ in gaps) for gaps in idle),
    }


def _measure_stalls(renderer: ChatMLRenderer, work: _Work) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=([_answer(turn) for turn in work.turns], there), daemon=True)
    server.start()
    try:
        return asyncio.run(_rounds(renderer, work, f"http://127.0.0.1:{here.recv()}"))
    finally:
        server.kill()
        server.join()


async def _prompt_text_ms(ids: array[int], new: int) -> float:
    engine = CompletionsEngine("http://127.0.0.1", "benchmark")
    costs = []
    for _ in range(5):
        await engine._prompt_text(ids[:-new])
        begin = time.process_time()
        await engine._prompt_text(ids)
        costs.append(time.process_time() - begin)
    return statistics.median(costs) * 1e3


def _milliseconds(work: Callable[[], object], rounds: int = 5) -> float:
    return statistics.median(_cpu(work) for _ in range(rounds)) * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=160_000)
    parser.add_argument("--tools", type=int, default=73)
    parser.add_argument("--tool-tokens", type=int, default=400, help="tokens of one tool's definition, about")
    args = parser.parse_args()
    renderer = ChatMLRenderer(load_chat_tokenizer(str(prepare_model(args.model))))
    work = _make_work(renderer, args.turns, args.tokens, args.tools, args.tool_tokens)
    ledger, ours = _incremental(renderer, work)
    base = _fixed_base(renderer.tokenizer, work)
    file, ids = ledger.to_bytes(), ledger.ids
    whole = {"save_ms": _milliseconds(ledger.to_bytes), "load_ms": _milliseconds(lambda: TokenLedger.from_bytes(file))}
    alone = len(Trajectories(ledger).to_bytes())
    fork = ledger.fork(len(ledger) // 2)
    fork.append_generation(work.turns[0].ids, work.turns[0].logprobs)
    report: dict[str, float] = {
        "turn_ms": statistics.mean(ours) * 1e3,
        "fixed_base_turn_ms": statistics.mean(base) * 1e3,
        "ratio": statistics.mean(base) / statistics.mean(ours),
        "flat": statistics.mean(ours[-10:]) / statistics.mean(ours[:10]),
        **_measure_stalls(renderer, work),
        "json_ms": _milliseconds(lambda: json.dumps(ids)),
        "ids_ms": _milliseconds(lambda: ledger.ids),
        "prompt_text_ms": asyncio.run(_prompt_text_ms(ledger.packed_ids, len(ledger) // args.turns)),
        "bytes_per_token": len(file) / len(ledger),
        **whole,
        "fork_bytes": len(Trajectories(ledger).to_bytes()) - alone,
    }
    sizes = {"model": args.model, "turns": args.turns, "tools": args.tools, "tokens": len(ledger)}
    sizes["prompt_tokens"], sizes["sampled_tokens"] = ledger.spans[0].end, ledger.sampled
    print(json.dumps({**sizes, **{name: round(value, 3) for name, value in report.items()}}))


if __name__ == "__main__":
    main()
