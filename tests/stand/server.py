"""HTTP of the servers that tests start: routes, streams, and what goes wrong with real servers."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeVar

from draftquant.validate.measure.measurement import EngineName
from local_http import listening

Object = dict[str, Any]
_GONE = (BrokenPipeError, ConnectionResetError)  # the client has given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one request.

    Attributes:
        status: of the answer; 0 = the connection ends without one.
        headers: of such an answer.
        events: of the stream that are still sent before the connection ends; None = all.
        seconds: to wait before the first byte.
        text: sent as the answer; None = the engine's own.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    events: int | None = None
    seconds: float = 0
    text: str | None = None


@dataclass
class Stand:
    """A server of an engine, whose clock is wrong; subclasses say what it answers.

    Attributes:
        faults: by the number of the POST request, from 1. status: of those without a fault.
        change: of the answer's events (of the one object, if it is not streamed).
        during: called while a request runs. seconds: that a stream takes.
        asked: bodies of all POST requests. got: paths of all GET requests.
        began: when each POST came, by the monotonic clock. most_running: of them at a time.
        keys: of all requests.
    """

    faults: dict[int, Fault] = field(default_factory=dict)
    status: Callable[[int], int] = lambda _number: 200
    change: Callable[[list[Object]], list[Object]] = lambda events: events
    during: Callable[[Any], object] = lambda _stand: None
    seconds: float = 0.0
    asked: list[Object] = field(default_factory=list)
    got: list[str] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""
    engine: EngineName = "vllm"

    def get(self, path: str) -> object:
        """What a path answers: JSON, or text; None or KeyError = 404."""
        raise NotImplementedError

    def post(self, path: str, body: Object) -> list[Object]:
        """Events that answer, or one object; ValueError = 400."""
        raise NotImplementedError

    def lines(self, path: str, body: Object, number: int) -> list[Any]:
        """What is sent of the request with this number; a whole stream ends with [DONE]."""
        del number
        events = self.change(self.post(path, body))
        return [*events, "[DONE]"] if body.get("stream") else events[:1]


StandT = TypeVar("StandT", bound=Stand)


@contextmanager
def served(stand: StandT, port: int = 0) -> Iterator[StandT]:
    """The stand at a port; 0 = a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stand.got.append(self.path)
            stand.keys.add(self.headers["Authorization"])
            try:
                answer = stand.get(self.path)
            except KeyError:
                answer = None
            self._send(404 if answer is None else 200, answer)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stand.lock:
                stand.asked.append(body)
                stand.began.append(time.monotonic())
                stand.running += 1
                stand.most_running = max(stand.most_running, stand.running)
                number = len(stand.asked)
            fault = stand.faults.get(number, Fault(status=stand.status(number)))
            time.sleep(fault.seconds)
            is_answered = fault.status == 200 and fault.text is None
            refusal = {"message": "the server says no"}
            try:
                lines = stand.lines(self.path, body, number) if is_answered else []
            except ValueError as exc:
                lines, fault = (
                    [],
                    Fault(status=400, text=json.dumps({"error": {"message": str(exc)}})),
                )
            if lines and body.get("stream"):
                self._stream(lines if fault.events is None else lines[: fault.events])
                return
            with stand.lock:
                stand.running -= 1
            if fault.status == 0:
                self.close_connection = True
            elif lines:
                self._send(200, lines[0])
            else:
                self._send(fault.status, fault.text or {"error": refusal}, fault.headers)

        def _stream(self, lines: list[Any]) -> None:
            """Server-sent events; the request has ended before the client knows it."""
            stand.during(stand)
            self._head(200, {"Content-Type": "text/event-stream"})
            for line in lines[:-1]:
                time.sleep(stand.seconds / len(lines))
                self._write(line)
            with stand.lock:
                stand.running -= 1
            for line in lines[-1:]:
                self._write(line)

        def _write(self, event: Any) -> None:
            data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            with suppress(*_GONE):
                self.wfile.write(f"data: {data}\n\n".encode())

        def _send(
            self, status: int, answer: object, headers: Mapping[str, str] | None = None
        ) -> None:
            data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self._head(status, {"Content-Length": str(len(data)), **(headers or {})})
            with suppress(*_GONE):
                self.wfile.write(data)

        def _head(self, status: int, headers: Mapping[str, str]) -> None:
            self.send_response_only(status)
            self.send_header("Date", "Thu, 01 Jan 1970 00:00:00 GMT")
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quietly."""

    with listening(Handler, port) as stand.url:
        yield stand
