"""Servers that are down, slow, overloaded, or none at all; streams; keys."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import pytest
from draftquant.calibration import server_client as client_module
from draftquant.calibration.server_client import Patience, ServerClient
from draftquant.recipes.errors import ServerError
from local_http import Quiet, listening

T = TypeVar("T")
Answers = Callable[[Quiet, int], None]


class Site:
    """A server that answers request number i, from 1, as `answer` writes it."""

    def __init__(self) -> None:
        self.answer: Answers = lambda _handler, _number: None
        self.times: list[float] = []
        self.url = ""


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()

    class Handler(Quiet):
        def answered(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found.times.append(time.monotonic())
            found.answer(self, len(found.times))

    with listening(Handler) as found.url:
        yield found


def says(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Answers:
    """Always the same."""
    return lambda handler, _number: handler.answer(status, body, headers)


def first_then(count: int, bad: Answers, good: Answers) -> Answers:
    return lambda handler, number: (bad if number <= count else good)(handler, number)


def ask(
    url: str,
    what: Callable[[ServerClient], Awaitable[T]],
    *,
    key: str | None = None,
    **patience: Any,
) -> T:
    async def asked() -> T:
        patient = Patience(**({"attempts": 3, "first_pause": 0.01, "seconds": 60} | patience))
        async with ServerClient(url, key=key, most_in_flight=2, patience=patient) as found:
            return await what(found)

    return asyncio.run(asked())


def get(found: ServerClient) -> Any:
    return found.get_object("/x")


def stream(found: ServerClient) -> Any:
    return found.stream("/x", {"a": 1})


def test_what_is_not_there(site: Site) -> None:
    site.answer = says(b"{}", 404)
    assert ask(site.url, lambda c: c.find_text("/x")) is None
    assert ask(site.url, lambda c: c.find_object("/x")) is None
    with pytest.raises(ServerError, match="404 from /x"):
        ask(site.url, get)
    site.answer = says(b'{"a": 1}')
    assert ask(site.url, lambda c: c.find_object("/x")) == {"a": 1}


def test_addresses_that_are_none() -> None:
    for url in ("localhost:8000", "", "ftp://x", "http://", "http:///v1", "http://x:y"):
        with pytest.raises(ServerError, match="--server: "):
            ask(url, get)


def test_keys_are_sent_and_never_shown(site: Site) -> None:
    seen: list[str | None] = []

    def answer(handler: Quiet, number: int) -> None:
        seen.append(handler.headers["Authorization"])
        says(b"no", 401)(handler, number)

    site.answer = answer
    with pytest.raises(ServerError, match="401 from /x") as found:
        ask(site.url, get, key="secret")
    assert seen == ["Bearer secret"]
    assert "secret" not in str(found.value)
    for key in ("a\nb", "\u00e9"):
        with pytest.raises(ServerError, match="DRAFTQUANT_SERVER_KEY: holds characters"):
            ask(site.url, get, key=key)


def test_storms_pass(site: Site) -> None:
    for status in (408, 425, 429, 500, 502, 503, 504):
        site.times.clear()
        site.answer = first_then(2, says(b"busy", status), says(b'{"a": 1}'))
        assert ask(site.url, lambda c: c.post("/x", {})).num_attempts == 3
        site.times.clear()
        with pytest.raises(ServerError, match=rf"after 2 attempt\(s\): {status} from /x: 'busy'"):
            ask(site.url, get, attempts=2)


def test_a_server_that_dies_of_a_request_is_quoted(site: Site) -> None:
    """What it said at the first attempt, with its end; later ones find nobody."""
    said = b"EngineDeadError" + b" ." * 4000 + b" AttributeError: cpu_gemm_wna16"
    site.answer = first_then(1, says(said, 500), says(b"gone", 503))
    with pytest.raises(ServerError, match=r"after 3 attempt\(s\): 503 from /x: 'gone'") as caught:
        ask(site.url, get)
    (first,) = caught.value.details
    assert len(first) < 1100
    site.times.clear()
    site.answer = says(b"busy", 503)
    with pytest.raises(ServerError) as caught:
        ask(site.url, get)
    assert caught.value.details == ()


@pytest.mark.parametrize("status", [301, 400])
def test_a_refusal_is_final(site: Site, status: int) -> None:
    site.answer = says(b"no", status, {"Location": "/y"})
    with pytest.raises(ServerError, match=f"{status} from /x: 'no'"):
        ask(site.url, get)
    assert len(site.times) == 1


def test_the_server_says_how_long_to_wait(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(client_module.asyncio, "sleep", sleep)
    site.answer = says(b"", 429)
    with pytest.raises(ServerError):
        ask(site.url, get, **dataclasses.asdict(Patience()))
    assert slept == [0.5, 1, 2, 4, 8]  # as long as a server may take to start again
    for after, expected in (
        ("3", [3.0, 3.0]),
        ("9999", [60.0, 60.0]),
        ("Thu, 01 Jan 1970 00:00:00 GMT", [0.01, 0.02]),  # of a clock that is wrong
        ("-1", [0.01, 0.02]),
    ):
        slept.clear()
        site.answer = says(b"", 429, {"Retry-After": after})
        with pytest.raises(ServerError):
            ask(site.url, get)
        assert slept == expected


def test_answers_that_never_end_do(site: Site) -> None:
    def drips(handler: Quiet, _number: int) -> None:
        handler.send_response(200)
        handler.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # nobody waits any longer
            for _ in range(5000):  # in the end whole, which nobody waits for
                time.sleep(0.02)
                handler.wfile.write(b": still here\n\n")

    site.answer = drips
    for what in (get, stream):
        with pytest.raises(ServerError, match=r"no whole answer within 0\.2 seconds"):
            ask(site.url, what, attempts=2, seconds=0.2)


def test_answers_are_of_bounded_size(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_MOST_BYTES", 1000)
    for body in (b"x" * 2000, b"data: " + b"x" * 2000, b"data: {}\n\n" * 200):
        site.answer = says(body)
        for what in (get, stream):
            with pytest.raises(ServerError, match="more than 1,000 bytes"):
                ask(site.url, what)
    site.answer = says(b"x" * 2000, 500)
    with pytest.raises(ServerError, match="more than 1,000 bytes"):
        ask(site.url, stream)


def test_what_is_no_json_is_asked_for_again(site: Site) -> None:
    site.answer = first_then(1, says(b"<html>"), says(b'{"a": 1}'))
    assert ask(site.url, get) == {"a": 1}
    site.answer = says(b'{"a": "\xff"')
    with pytest.raises(ServerError, match="its answer is not JSON"):
        ask(site.url, get)


# ---- streams

WHOLE = (
    b': ping\r\n\r\nevent: token\ndata: {"t": "a\xe2\x80\xa8b\xc2\x85"}\n\ndata:{"t": 2}\r\n\n'
    b"data: [DONE]\n\ndata: {}\n"
)


def test_events(site: Site) -> None:
    site.answer = says(WHOLE)
    began = time.monotonic()
    reply = ask(site.url, stream)
    assert [event.data for event in reply.events] == [{"t": "a\u2028b\u0085"}, {"t": 2}]
    first, second = (event.seconds for event in reply.events)
    assert 0 < first <= second <= time.monotonic() - began


def test_streams_that_break_off_are_asked_for_again(site: Site) -> None:
    for bad in (
        says(WHOLE[:-30]),
        says(b"data: {\n\ndata: [DONE]\n"),
        says(b'data: {"error": {"message": "no blocks"}}\n\ndata: [DONE]\n'),
    ):
        site.times.clear()
        site.answer = first_then(2, bad, says(WHOLE))
        reply = ask(site.url, stream)
        assert (len(reply.events), reply.num_attempts) == (2, 3)
        site.answer = bad
        with pytest.raises(ServerError):
            ask(site.url, stream)
