"""HTTP of the stands: routes, streams, and what goes wrong with real servers."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from draftquant.validate.measure.measurement import EngineName
from local_http import listening

Object = dict[str, Any]


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
    """A server of an engine; subclasses say what it answers.

    Attributes:
        faults: by the number of the POST request, from 1.
        change: of the answer's events (of the one object, if it is not streamed).
        asked: bodies of all POST requests. got: paths of all GET requests.
    """

    faults: dict[int, Fault] = field(default_factory=dict)
    change: Callable[[list[Object]], list[Object]] = lambda events: events
    asked: list[Object] = field(default_factory=list)
    got: list[str] = field(default_factory=list)
    url: str = ""
    engine: EngineName = "vllm"

    def get(self, path: str) -> object:
        """What a path answers: JSON, or text; KeyError = 404."""
        raise NotImplementedError

    def post(self, path: str, body: Object) -> list[Object]:
        """Events that answer, or one object; ValueError = 400."""
        raise NotImplementedError


@contextmanager
def served(stand: Stand, port: int = 0) -> Iterator[Stand]:
    """The stand at a port; 0 = a free one."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stand.got.append(self.path)
            try:
                self._send(200, stand.get(self.path))
            except KeyError:
                self._send(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                stand.asked.append(body)
                fault = stand.faults.get(len(stand.asked), Fault())
            time.sleep(fault.seconds)
            if fault.status == 0:
                self.close_connection = True
                return
            if fault.status != 200:
                self._send(
                    fault.status, {"error": {"message": "the server says no"}}, fault.headers
                )
                return
            if fault.text is not None:
                self._send(200, fault.text)
                return
            try:
                events = stand.change(stand.post(self.path, body))
            except ValueError as exc:
                self._send(400, {"error": {"message": str(exc)}})
                return
            if body.get("stream"):
                self._stream(events, fault.events)
            else:
                self._send(200, events[0])

        def _send(
            self, status: int, answer: object, headers: Mapping[str, str] | None = None
        ) -> None:
            data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | dict(headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):  # the client has given up
                self.wfile.write(data)

        def _stream(self, events: list[Object], most: int | None) -> None:
            """Server-sent events; the end of the connection is that of the answer."""
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):
                for event in events[:most]:
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                if most is None:
                    self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: Any) -> None:
            """Quietly."""

    with listening(Handler, port) as stand.url:
        yield stand
