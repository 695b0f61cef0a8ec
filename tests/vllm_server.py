"""A small HTTP server that answers completions as vLLM does, for tests of what measures it.

Its target adds one to a token. Its draft is right about some of them, as `accepted_at` says. Its
clock is wrong. The real engine is started by experiments/served.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal

from local_http import listening

VOCAB, END = 64, 63
MODEL = "the-target"
GAP = 0.75
"""Between the log-probabilities of the two most likely tokens, at every place."""


def accepted_at(token: int, num_draft_tokens: int) -> int:
    """Accepted draft tokens of a round behind this token."""
    return (token * 5 + 2) % (num_draft_tokens + 1)


def continued(prompt: list[int], count: int, *, ignore_eos: bool = False) -> list[int]:
    """The target's text."""
    token_ids: list[int] = []
    while len(token_ids) < count and (ignore_eos or END not in token_ids):
        token_ids.append(([*prompt, *token_ids][-1] + 1) % VOCAB)
    return token_ids


def rounds_of(token_ids: list[int], num_draft_tokens: int) -> list[int]:
    """Accepted tokens of each round, the last of which may go beyond the end."""
    steps, written = [], 1
    while written < len(token_ids):
        steps.append(accepted_at(token_ids[written - 1], num_draft_tokens))
        written += steps[-1] + 1
    return steps


@dataclass
class VLLMServer:
    """What the server does, which tests change.

    Attributes:
        num_draft_tokens: K; None = it drafts nothing.
        metrics: level of the per-request metrics. counts: whether it has /metrics.
        config: what /server_info tells; None = it has none.
        status: of an answer to the request with this number, from 1; 0 = the connection breaks.
        change: of the events of an answer before they are sent, in a list that ends with [DONE].
        during: called while a request runs.
        seconds: that an answer takes.
        headers: of every answer.
        asked: the bodies of all completions that were asked for. most_running: of them at a time.
        began: when each came, by the monotonic clock.
    """

    num_draft_tokens: int | None = 3
    metrics: Literal["none", "summary", "detailed"] = "detailed"
    counts: bool = True
    version: str = "0.32.0"
    models: Any = None
    config: dict[str, Any] | None = None
    status: Callable[[int], int] = lambda _number: 200
    change: Callable[[int, list[Any]], list[Any]] = lambda _number, events: events
    during: Callable[["VLLMServer"], None] = lambda _server: None
    seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    most_running: int = 0
    running: int = 0
    finished: int = 0
    tokens: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * 16)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """That were asked for, without the probe."""
        found = (tuple(body["prompt"]) for body in self.asked)
        return [prompt for prompt in found if prompt != (1, 2, 3, 4)]

    def get(self, path: str) -> Any:
        """A document, or a text; None = there is none."""
        model = {"id": MODEL, "owned_by": "vllm", "root": "/models/target", "max_model_len": 4096}
        return {
            "/version": {"version": self.version},
            "/v1/models": self.models if self.models is not None else {"data": [model]},
            "/server_info?config_format=json": self.config,
            "/metrics": self._exposition() if self.counts else None,
        }.get(path)

    def events(self, body: dict[str, Any], number: int) -> list[Any]:
        """Of one answer; the counters have moved when the last is sent."""
        text = continued(body["prompt"], body["max_tokens"], ignore_eos=body["ignore_eos"])
        most = self.num_draft_tokens
        steps = [0] * (len(text) - 1) if most is None else rounds_of(text, most)
        events, at = [], 0
        for size in (1, *(step + 1 for step in steps)):
            events.append(self._event(body, text[at : at + size], first=at == 0))
            at += size
        ended = "stop" if text[-1] == END and not body["ignore_eos"] else "length"
        events[-1]["choices"][0]["finish_reason"] = ended
        events.append(self._last(body, text, steps))
        with self.lock:
            self.finished += 1
            self.tokens += len(text)
            for step in steps if most is not None else ():
                self.histogram[step] += 1
        return self.change(number, [*events, "[DONE]"])

    def _event(self, body: dict[str, Any], new: list[int], *, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": "\u2028 is no line end",
            "logprobs": None,
            "finish_reason": None,
            "prompt_token_ids": body["prompt"] if first else None,
            "token_ids": new,
        }
        if num := body.get("logprobs"):
            places = [{f"token_id:{t}": -0.5, "token_id:999": -0.5 - GAP} for t in new]
            top = [dict(list(place.items())[:num]) for place in places]
            choice["logprobs"] = {"token_logprobs": [-0.5] * len(new), "top_logprobs": top}
        return {"created": -1, "model": MODEL, "choices": [choice]}

    def _last(self, body: dict[str, Any], text: list[int], steps: list[int]) -> dict[str, Any]:
        prompt = len(body["prompt"])
        usage = {"prompt_tokens": prompt, "completion_tokens": len(text)}
        last: dict[str, Any] = {"choices": [], "usage": usage, "system_fingerprint": "vllm-print"}
        most = self.num_draft_tokens
        if most is not None and self.metrics != "none":
            told: dict[str, Any] = {
                "num_spec_tokens": most,
                "acceptance_histogram": [steps.count(j) for j in range(most + 1)],
                "num_spec_steps": len(steps),
                "mean_acceptance_length": 1.0,
            }
            if self.metrics == "detailed" and steps:
                told |= {"per_step_accepted": steps, "per_step_drafted": [most] * len(steps)}
            last["metrics"] = {"speculative_decoding": told}
        return last

    def _exposition(self) -> str:
        """Two engines, of which the second does nothing."""
        lines = ["# HELP of something", "process_start_time_seconds 1.7e+09"]

        def counter(name: str, value: float, labels: str = "") -> None:
            for engine, own in (("0", value), ("1", 0)):
                lines.append(
                    f'vllm:{name}{{engine="{engine}",model_name="a{{}}\\""{labels}}} {own}'
                )

        counter("num_requests_running", float(self.running))
        counter("num_requests_waiting", 0.0)
        counter("request_success_total", float(self.finished), ',finished_reason="length"')
        counter("request_success_total", 0.0, ',finished_reason="stop"')
        counter("generation_tokens_total", float(self.tokens))
        if self.num_draft_tokens is not None:
            counter("spec_decode_num_drafts_total", float(sum(self.histogram)))
            for i in range(self.num_draft_tokens):
                reached = float(sum(self.histogram[i + 1 :]))
                name = "spec_decode_num_accepted_tokens_per_pos_total"
                counter(name, reached, f',position="{i}"')
        return "\n".join(lines) + "\n"


@contextmanager
def served(server: VLLMServer, port: int = 0) -> Iterator[VLLMServer]:
    """The server at a port; 0 = a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.keys.add(self.headers["Authorization"])
            answer = server.get(self.path)
            self._send(404 if answer is None else 200, answer)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.asked.append(body)
                server.began.append(time.monotonic())
                server.running += 1
                server.most_running = max(server.most_running, server.running)
                number = len(server.asked)
            self._answer(body, number)

        def _answer(self, body: dict[str, Any], number: int) -> None:
            """The request has ended before the client knows it."""
            status = server.status(number)
            events = [] if status != 200 else server.events(body, number)
            if status == 200:
                server.during(server)
                self._head(200, "text/event-stream")
            with suppress(BrokenPipeError, ConnectionResetError):
                for event in events[:-1]:
                    time.sleep(server.seconds / len(events))
                    self._write(event)
            with server.lock:
                server.running -= 1
            if status == 0:
                self.close_connection = True
            elif status != 200:
                self._send(status, {"error": "the server says no"})
            elif events:
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._write(events[-1])

        def _write(self, event: Any) -> None:
            data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            self.wfile.write(f"data: {data}\n\n".encode())

        def _send(self, status: int, answer: Any) -> None:
            text = answer if isinstance(answer, str) else json.dumps(answer)
            self._head(status, "application/json")
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(text.encode())

        def _head(self, status: int, kind: str) -> None:
            self.send_response_only(status)
            self.send_header("Content-Type", kind)
            self.send_header("Date", "Thu, 01 Jan 1970 00:00:00 GMT")
            for name, value in server.headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quietly."""

    with listening(Handler, port) as server.url:
        yield server
