"""A local HTTP server for the length of a block: what the stand-ins of servers share."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Quiet(BaseHTTPRequestHandler):
    """A handler that prints nothing, of requests that subclasses answer."""

    def do_GET(self) -> None:
        self.answered()

    do_HEAD = do_POST = do_GET  # noqa: N815 - names of the base class

    def answered(self) -> None:
        """Send the answer to the request, of whatever method."""
        raise NotImplementedError

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer to a client that may have given up."""
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """Its address. A request that still waits at the end of the block is not waited for.

    Args:
        handler: of the requests.
        port: 0 = any that is free.
    """
    http = ThreadingHTTPServer(("127.0.0.1", port), handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
