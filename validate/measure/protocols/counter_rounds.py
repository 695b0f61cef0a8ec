"""Rounds of one request as differences of vLLM's counters, with nothing else in flight.

The counters are those of the whole server (v1/spec_decode/metrics.py:214), so any other request
between two readings would be taken for ours: what finished and what was generated must be ours to
the last token.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise

from ....calibration.server_client import ServerClient
from ...errors import MeasureError
from .counters import Counters
from .engine_counters import ENGINE_COUNTERS
from .vllm_stream import Streamed

_VLLM = ENGINE_COUNTERS["vllm"]
_PAGE = "/metrics"
_ATTEMPTS = 5
_PATIENCE = 100  # readings
_POLL = 0.05  # seconds
_BETWEEN = 0.25  # seconds, for what an attempt that broke off has left running


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """One reading.

    Attributes:
        are_there: the server counts at all.
        num_running: requests that run or wait. num_finished: since the start, as the others.
        num_tokens: generated.
        num_rounds: None without speculation.
        accepted: by position of the draft token, from the first.
    """

    are_there: bool
    num_running: int
    num_finished: int
    num_tokens: int
    num_rounds: int | None
    accepted: tuple[int, ...]

    @property
    def num_draft_tokens(self) -> int | None:
        """K: there is one counter for each position, from the start of the server on."""
        return len(self.accepted) or None


async def read_counters(client: ServerClient) -> ServerCounters:
    """Read them now.

    Raises:
        ServerError: no answer.
        MeasureError: another server's.
    """
    text = await client.find_text(_PAGE) or ""
    found = Counters.parse(text, f"{client.url}{_PAGE}")
    assert _VLLM.accepted_at is not None
    positions = found.by_label(_VLLM.accepted_at.name, _VLLM.position_label)
    count = len(positions)
    if set(positions) != {str(i) for i in range(count)}:
        where, what = f"{client.url}{_PAGE}", f"counts odd positions: {sorted(positions)}"
        raise MeasureError(where, what, fix="give the address of a vLLM server")
    running = (found.total(f"vllm:num_requests_{state}") for state in ("running", "waiting"))
    finished = found.total("vllm:request_success_total")
    return ServerCounters(
        are_there=finished is not None,
        num_running=sum(number or 0 for number in running),
        num_finished=finished or 0,
        num_tokens=found.total("vllm:generation_tokens_total") or 0,
        num_rounds=found.total(_VLLM.verify_steps.name),
        accepted=tuple(positions[str(i)] for i in range(count)),
    )


async def counted_rounds(
    client: ServerClient, num_draft_tokens: int, ask: Callable[[], Awaitable[Streamed]]
) -> tuple[Streamed, tuple[int, ...]]:
    """Ask something, and count its rounds.

    Args:
        ask: the request; a repeated one is repeated once more, as all its attempts were counted.

    Returns:
        The answer, and its rounds by number of accepted tokens, [K + 1].

    Raises:
        MeasureError: other requests run there too, the server was started again meanwhile, or the
            counters do not move.
    """
    for _ in range(_ATTEMPTS):
        before = await _idle(client)
        streamed = await ask()
        if streamed.num_attempts == 1:
            after = await _after(client, before)
            return streamed, _rounds(client, before, after, streamed, num_draft_tokens)
        await asyncio.sleep(_BETWEEN)
    raise MeasureError(
        client.url,
        f"none of {_ATTEMPTS} requests was answered at the first attempt, and counters tell only"
        " of such ones what was accepted",
        fix="see the server's own messages, then run the same command again: what was measured"
        " is kept",
    )


async def _idle(client: ServerClient) -> ServerCounters:
    """The counters when nothing runs; what an attempt of ours has left ends soon."""
    for _ in range(_PATIENCE):
        counters = await read_counters(client)
        if not counters.num_running:
            return counters
        await asyncio.sleep(_POLL)
    raise _others(client, f"{counters.num_running} request(s) run there that are not ours")


async def _after(client: ServerClient, before: ServerCounters) -> ServerCounters:
    """The counters with our request; the last token may be sent before it is counted."""
    for _ in range(_PATIENCE):
        counters = await read_counters(client)
        if _went_back(before, counters):
            raise MeasureError(
                client.url,
                "its counters went back: it was started again meanwhile",
                fix="run the same command again: what was measured is kept",
            )
        if counters.num_finished > before.num_finished and not counters.num_running:
            return counters
        await asyncio.sleep(_POLL)
    if counters.num_running:
        raise _others(client, f"{counters.num_running} request(s) run there that are not ours")
    raise MeasureError(client.url, "answered, but counts no finished request",
                       fix="give the server itself, not a proxy over several")  # fmt: skip


def _rounds(
    client: ServerClient,
    before: ServerCounters,
    after: ServerCounters,
    streamed: Streamed,
    num_draft_tokens: int,
) -> tuple[int, ...]:
    finished = after.num_finished - before.num_finished
    tokens = after.num_tokens - before.num_tokens
    if finished != 1 or tokens != len(streamed.token_ids):
        raise _others(
            client,
            f"our request had {len(streamed.token_ids)} tokens, but the counters moved by"
            f" {finished} request(s) and {tokens} tokens",
        )
    if len(after.accepted) != num_draft_tokens or len(before.accepted) != num_draft_tokens:
        raise MeasureError(client.url, f"drafted K = {num_draft_tokens} tokens, now it does not",
                           fix="measure one server")  # fmt: skip
    assert after.num_rounds is not None
    assert before.num_rounds is not None
    reached = (
        after.num_rounds - before.num_rounds,
        *(b - a for a, b in zip(before.accepted, after.accepted, strict=True)),
        0,
    )
    return tuple(at_least - further for at_least, further in pairwise(reached))


def _went_back(before: ServerCounters, after: ServerCounters) -> bool:
    return (
        after.num_finished < before.num_finished
        or after.num_tokens < before.num_tokens
        or (after.num_rounds or 0) < (before.num_rounds or 0)
    )


def _others(client: ServerClient, what: str) -> MeasureError:
    return MeasureError(
        client.url,
        f"other requests run there while counters are all that tells what was accepted: {what}",
        fix="start the server with --per-request-spec-decode-metrics detailed (vLLM after 0.28), or"
        " keep others away",
    )
