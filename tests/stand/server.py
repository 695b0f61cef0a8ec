"""HTTP of the servers that tests start: routes, streams, and what goes wrong with real servers."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from draftquant.validate.measure.measurement import EngineName
from local_http import Quiet, listening

Object = dict[str, Any]
_GONE = (BrokenPipeError, ConnectionResetError)  # the client has given up
_LONG_AGO = "Thu, 01 Jan 1970 00:00:00 GMT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one request.

    Attributes:
        status: of the answer; 0 = the connection ends without one.
        events: of the stream that are still sent before the connection ends; None = all.
    """

    status: int = 200
    events: int | None = None


@dataclass
class Stand:
    """A server of an engine, whose clock is wrong; subclasses say what it answers.

    Attributes:
        faults: by the number of the POST request, from 1. status: of those without a fault.
        change: of the answer's events (of the one object, if it is not streamed).
        during: called while a request runs. seconds: that a stream takes.
        asked: bodies of all POST requests. got: paths of all GET requests. keys: of all requests.
    """

    faults: dict[int, Fault] = field(default_factory=dict)
    status: Callable[[int], int] = lambda _number: 200
    change: Callable[[list[Object]], list[Object]] = lambda events: events
    during: Callable[[Any], object] = lambda _stand: None
    seconds: float = 0.0
    asked: list[Object] = field(default_factory=list)
    got: list[str] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    running: int = 0
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

    class Handler(Quiet):
        def answered(self) -> None:
            if self.command == "POST":
                self._posted()
                return
            stand.got.append(self.path)
            stand.keys.add(self.headers["Authorization"])
            try:
                answer = stand.get(self.path)
            except KeyError:
                answer = None
            self._send(404 if answer is None else 200, answer)

        def _posted(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stand.lock:
                stand.asked.append(body)
                stand.running += 1
                number = len(stand.asked)
            fault = stand.faults.get(number, Fault(status=stand.status(number)))
            refusal = {"message": "the server says no"}
            try:
                lines = stand.lines(self.path, body, number) if fault.status == 200 else []
            except ValueError as exc:
                lines, fault, refusal = [], Fault(status=400), {"message": str(exc)}
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
                self._send(fault.status, {"error": refusal})

        def _stream(self, lines: list[Any]) -> None:
            """Server-sent events; the request has ended before the client knows it."""
            stand.during(stand)
            self.send_response_only(200)
            for name, value in (("Date", _LONG_AGO), ("Content-Type", "text/event-stream")):
                self.send_header(name, value)
            self.end_headers()
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

        def _send(self, status: int, answer: object) -> None:
            data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.answer(status, data, {"Date": _LONG_AGO})

    with listening(Handler, port) as stand.url:
        yield stand
