"""A local HTTP server for the length of a block: what the stand-ins of engines share."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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
