"""Answers of the engines' stands, as they were once given, without a draft or a target behind them.

served.json has them by engine: a list of requests, each with the method, the path and the sha256 of
the body that is to be sent, and the bytes of each answer, in the order in which they were given. A
request that was never asked gets a 404: a command that asks anything else fails.
"""

import base64
import hashlib
import json
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).parent


@contextmanager
def served(engine: str, folder: Path) -> Iterator[str]:
    """Such a server, or one that records hidden states; its address."""
    with recording(folder) if engine == "states" else answering(engine) as url:
        yield url


@contextmanager
def recording(folder: Path) -> Iterator[str]:
    """The stand that answers as vLLM does when it records (tests/states_server.py)."""
    sys.path.append(str(HERE.parent))
    from states_server import StatesServer, served, write_target

    write_target(folder / "target")
    (folder / "shared").mkdir()
    with served(StatesServer(shared=folder / "shared")) as running:
        yield running.url


@contextmanager
def answering(engine: str) -> Iterator[str]:
    """A server of this engine; its address."""
    known = json.loads((HERE / "served.json").read_text(encoding="utf-8"))[engine]
    left = {key: list(answers) for key, answers in known.items()}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(hashlib.sha256(body).hexdigest()[:16])

        def _answer(self, digest: str) -> None:
            key = f"{self.command} {self.path} {digest}".strip()
            with lock:
                answers = left.get(key, [])
                answer = answers.pop(0) if len(answers) > 1 else (answers or [None])[0]
            if answer is None:
                self.send_error(404, "this was never asked")
                return
            data = zlib.decompress(base64.b64decode(answer["data"]))
            self.send_response(answer["status"])
            self.send_header("Content-Type", answer["type"])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Quietly."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
