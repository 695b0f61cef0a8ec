"""HTTP to a server that may be slow, overloaded, or not a server of this kind at all.

Every answer is hostile input: bounded in size and time, parsed strictly, quoted briefly.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import httpx2

from ..recipes.errors import NoAnswerError, ServerError, short
from ..recipes.strict_json import JsonProblem, parse_json

_MOST_BYTES = 64 * 2**20  # 100,000 tokens with 20 log-probabilities each have 40 MB
_LONGEST_PAUSE = 60.0
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses of answers after which asking again makes sense."""
_DATA, _DONE = "data:", "[DONE]"
_ADDRESS = "give http://HOST:PORT"
KEY_VARIABLE = "DRAFTQUANT_SERVER_KEY"
"""Environment variable with the key of the server, if the server wants one."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for a server."""

    attempts: int = 6
    first_pause: float = 0.5  # seconds, doubled each time unless the server says how long
    seconds: float = 600.0  # of one attempt, to its last byte


@dataclass(frozen=True, slots=True)
class Event:
    """A JSON object, and how many seconds after its request it came."""

    seconds: float
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to a request; one event where it is not streamed."""

    events: tuple[Event, ...]
    num_attempts: int


class _PassingError(Exception):
    def __init__(self, what: str, pause: float | None = None) -> None:
        super().__init__(what)
        self.pause = pause


class _AbsentError(ServerError):
    """The server has nothing at an address."""


class ServerClient:
    """Requests to one server; an asynchronous context. The key is a bearer token, never shown."""

    def __init__(
        self, url: str, *, key: str | None, most_in_flight: int, patience: Patience
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience = patience
        if not re.match(r"https?://[^/]", url):
            raise ServerError("--server", f"expected an address, got {short(url)}", fix=_ADDRESS)
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ServerError(KEY_VARIABLE, "holds characters that an HTTP header cannot hold",
                               fix="set it to the key of the server")  # fmt: skip
        try:
            self._http = httpx2.AsyncClient(
                base_url=self.url,
                verify=url.startswith("https"),  # certificates take long to load
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx2.Timeout(connect=10, write=60, pool=None, read=patience.seconds),
                # Before the server closes an idle connection (vLLM after 5 seconds).
                limits=httpx2.Limits(max_connections=most_in_flight, keepalive_expiry=2),
            )
        except httpx2.InvalidURL as exc:
            raise ServerError("--server", f"{short(url)}: {exc}", fix=_ADDRESS) from exc

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End its connections."""
        await self._http.aclose()

    async def get_text(self, path: str) -> str:
        """A text, such as /metrics; a ServerError where none comes after all attempts."""
        return (await self._patiently(lambda: self._text("GET", path, None)))[0]

    async def get_object(self, path: str) -> Mapping[str, Any]:
        """A JSON object."""

        async def attempt() -> Mapping[str, Any]:
            return self._object(await self._text("GET", path, None))

        return (await self._patiently(attempt))[0]

    async def find_text(self, path: str) -> str | None:
        """A text that not every server has; None where this one has nothing there (404)."""
        with contextlib.suppress(_AbsentError):
            return await self.get_text(path)
        return None

    async def find_object(self, path: str) -> Mapping[str, Any] | None:
        """A JSON object that not every server has; None where this one has nothing there (404)."""
        with contextlib.suppress(_AbsentError):
            return await self.get_object(path)
        return None

    async def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """The JSON object that answers a request."""

        async def attempt() -> Event:
            began = time.monotonic()
            text = await self._text("POST", path, body)
            return Event(time.monotonic() - began, self._object(text))

        event, attempts = await self._patiently(attempt)
        return Reply(events=(event,), num_attempts=attempts)

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        failed: Callable[[Mapping[str, Any]], str | None] = lambda _event: None,
    ) -> Reply:
        """The events that answer a request (server-sent, each a JSON object), to the last.

        A stream that breaks off, or ends without "[DONE]" or with an error, is requested again; so
        is one for which `failed` returns text: some servers report overload in a stream with 200.
        """
        events, attempts = await self._patiently(lambda: self._events(path, body, failed))
        return Reply(events=events, num_attempts=attempts)

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """The result of an attempt, and the number of that attempt."""
        patience, pause = self._patience, self._patience.first_pause
        problems: list[str] = []
        for number in range(1, patience.attempts + 1):
            try:
                async with asyncio.timeout(patience.seconds):
                    return await attempt(), number
            except TimeoutError:
                problem, wait = f"no whole answer within {patience.seconds:g} seconds", None
            except httpx2.HTTPError as exc:
                problem, wait = f"{type(exc).__name__}: {exc}", None
            except _PassingError as exc:
                problem, wait = str(exc), exc.pause
            problems.append(problem)
            if number < patience.attempts:
                await asyncio.sleep(min(wait or pause, _LONGEST_PAUSE))
                pause *= 2
        raise NoAnswerError(
            self.url,
            f"no answer after {patience.attempts} attempt(s): {problems[-1]}",
            details=[] if problems[0] == problems[-1] else [f"  attempt 1: {problems[0]}"],
            fix="see the server's own messages, then run the same command again: the"
            " answers so far are kept",
        )

    async def _text(self, method: str, path: str, body: Mapping[str, Any] | None) -> str:
        async with self._http.stream(method, path, json=body) as answer:
            return await self._whole(answer, path)

    async def _events(
        self, path: str, body: Mapping[str, Any], failed: Callable[[Mapping[str, Any]], str | None]
    ) -> tuple[Event, ...]:
        began = time.monotonic()
        events: list[Event] = []
        async with self._http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                await self._whole(answer, path)
            async for line in self._lines(answer):
                if not line.startswith(_DATA):
                    continue  # comments, names of events and empty lines
                data = line.removeprefix(_DATA).strip()
                if data == _DONE:
                    return tuple(events)
                event = Event(time.monotonic() - began, self._object(data))
                if error := event.data.get("error"):
                    self._check_error(error, path)
                if problem := failed(event.data):
                    raise _PassingError(problem)
                events.append(event)
        raise _PassingError(f"its answer to {path} broke off after {len(events)} event(s)")

    async def _whole(self, answer: httpx2.Response, path: str) -> str:
        received = bytearray()
        async for part in answer.aiter_bytes():
            received += part
            self._check_size(len(received))
        text = received.decode("utf-8", errors="replace")
        self._check_status(answer, path, text)
        return text

    async def _lines(self, answer: httpx2.Response) -> AsyncIterator[str]:
        """Lines of server-sent events; U+2028 and the like do not end them: JSON may hold them."""
        size, pending = 0, bytearray()
        async for part in answer.aiter_bytes():
            size += len(part)
            self._check_size(size)
            pending += part
            if b"\n" in part:
                *lines, pending = pending.split(b"\n")
                for line in lines:
                    yield line.decode("utf-8", errors="replace")

    def _check_status(self, answer: httpx2.Response, path: str, text: str) -> None:
        status = answer.status_code
        if status == 200:
            return
        # With its end: a server that dies from a request tells why, often last.
        excerpt = text if len(text) <= 1000 else f"{text[:500]}…{text[-500:]}"
        what = f"{status} from {path}: {excerpt!r}"
        if status in PASSING:
            after = answer.headers.get("retry-after", "")  # a date would be by the server's clock
            is_number = after.isascii() and after.isdigit()
            raise _PassingError(what, float(after) if is_number else None)
        kind = _AbsentError if status == 404 else ServerError
        raise kind(self.url, what, fix=_FIXES.get(status, _FIX))

    def _check_error(self, error: object, path: str) -> None:
        """An error that ends a stream, with its status if it has one."""
        status = error.get("code") if isinstance(error, Mapping) else None
        what = f"its answer to {path} ends with {short(error)}"
        if type(status) is int and 400 <= status < 500 and status not in PASSING:
            raise ServerError(self.url, what, fix=_FIXES.get(status, _FIX))
        raise _PassingError(what)

    def _check_size(self, size: int) -> None:
        if size > _MOST_BYTES:
            raise ServerError(self.url, f"its answer has more than {_MOST_BYTES:,} bytes",
                               fix="give the address of an engine's server")  # fmt: skip

    def _object(self, text: str) -> Mapping[str, Any]:
        try:
            value = parse_json(text)
        except JsonProblem as exc:
            raise _PassingError(f"its answer is {exc}") from exc
        if not isinstance(value, Mapping):
            raise ServerError(self.url, f"expected a JSON object, got {short(value)}",
                               fix="give the address of an engine's server")  # fmt: skip
        return value


_FIX = "check --engine: the server at this address may be another engine"
_FIXES = {
    400: "see the server's message: it refuses this request",
    401: "set DRAFTQUANT_SERVER_KEY to the key of the server",
    403: "set DRAFTQUANT_SERVER_KEY to the key of the server",
    404: "give the root of the server (http://HOST:PORT), and the --engine that runs there",
}
