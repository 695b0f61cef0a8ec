"""A server that has nothing but counters of verify steps, as an engine shows them."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from draftquant.validate.measure.protocols.counters import Counters
from local_http import listening

_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens"


@dataclass
class Counting:
    """A page of counters.

    Attributes:
        page: what is answered. pages: what is answered before that, one after the other.
        status: of the answer.
        endless: the answer to what is posted never ends.
        asked: paths. posted: bodies.
    """

    page: str = ""
    pages: list[str] = field(default_factory=list)
    status: int = 200
    endless: bool = False
    asked: list[str] = field(default_factory=list)
    posted: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def counting(*pages: str) -> Iterator[Counting]:
    """A server that answers with these pages, one after the other, the last one again and again."""
    server = Counting(page=pages[-1], pages=list(pages[:-1]))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append(self.path)
            text = server.pages.pop(0) if server.pages else server.page
            data = text.encode()
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            server.posted.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(server.status)
            self.end_headers()
            try:
                while server.endless:
                    self.wfile.write(b" ")
                    time.sleep(0.1)
            except OSError:  # nobody listens any more
                pass

        def log_message(self, *_: object) -> None:
            """Quietly."""

    with listening(Handler) as server.url:
        yield server


def vllm_page(steps: float, *accepted: float, **labels: str) -> str:
    """Counters of vLLM: verify steps, and those that accepted each position."""
    own = "".join(f',{key}="{value}"' for key, value in labels.items())
    at = [
        f'{_ACCEPTED}_per_pos_total{{model_name="m",position="{i}"{own}}} {n}\n'
        for i, n in enumerate(accepted)
    ]
    return (
        f'{_DRAFTS}{{model_name="m"{own}}} {steps}\n'
        f'{_ACCEPTED}_total{{model_name="m"{own}}} {sum(accepted)}\n{"".join(at)}'
    )


def prometheus_answer(page: str) -> str:
    """What a Prometheus that scraped this page answers to an instant query."""
    result = [
        {"metric": {"__name__": name, "instance": "host:8000", **labels}, "value": [0, f"{n:g}"]}
        for name, own in Counters.parse(page, "page").samples.items()
        for labels, n in own
    ]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})
