"""How tests ask a stand, and what they hold its answers against."""

import asyncio
import copy
import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from draftquant.calibration.prompts.prompt_file import Prompt, read_prompts
from draftquant.calibration.recording.decoding import GREEDY, Decoding
from draftquant.calibration.server_client import Event, Patience, ServerClient
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.validate.measure.measurement import ServerIdentity, Speculation
from draftquant.validate.measure.server_answers import Ask, Completion, get_protocol
from recorded import record_traces
from replay_proof import replayed_steps
from stand.decoder import AUX_LAYER_IDS, PAIR, Decoder, loaded_draft
from stand.server import Stand

NUM_TOKENS = 32
PROMPTS = read_prompts(PAIR / "prompts.jsonl")[:6]
IMPATIENT = Patience(attempts=3, first_pause=0.01, seconds=60)


def ask(
    *, decoding: Decoding = GREEDY, max_new_tokens: int = NUM_TOKENS, ignore_eos: bool = False
) -> Ask:
    return Ask(decoding=decoding, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)


def client_of(stand: Stand) -> ServerClient:
    return ServerClient(stand.url, key=None, most_in_flight=4, patience=IMPATIENT)


def identify(stand: Stand) -> tuple[ServerIdentity, Speculation | None]:
    async def asking() -> tuple[ServerIdentity, Speculation | None]:
        async with client_of(stand) as client:
            return await get_protocol(stand.engine).identify(client)

    return asyncio.run(asking())


def complete(
    stand: Stand, prompts: Sequence[Prompt] = PROMPTS, asked: Ask | None = None
) -> list[Completion]:
    """All prompts at once, after asking who answers."""

    async def asking() -> list[Completion]:
        protocol = get_protocol(stand.engine)
        async with client_of(stand) as client:
            await protocol.identify(client)
            answers = [protocol.complete(client, prompt, asked or ask()) for prompt in prompts]
            return list(await asyncio.gather(*answers))

    return asyncio.run(asking())


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 10**39, 0.5, 1e308, 1e-320, "", "3", "stop",
    [], [None], [3], ["a"], [[]], {}, {"a": None},
)  # fmt: skip


def broken(events: Sequence[Event]) -> Iterator[list[Event]]:
    """The events with one value of one of them replaced, or absent; at any depth."""
    for number, event in enumerate(events):
        for path in _paths(event.data):
            for value in (*VALUES, ...):
                changed = copy.deepcopy(event.data)
                inner: Any = changed
                for key in path[:-1]:
                    inner = inner[key]
                if value is ...:
                    del inner[path[-1]]
                else:
                    inner[path[-1]] = value
                yield [*events[:number], Event(event.seconds, changed), *events[number + 1 :]]


def _paths(value: object, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all that stands in it; of a list of many the first two."""
    if isinstance(value, dict):
        entries: list[tuple[Any, Any]] = list(value.items())
    else:
        entries = list(enumerate(value))[:2] if isinstance(value, list) else []
    for key, inner in entries:
        yield (*before, key)
        yield from _paths(inner, (*before, key))


def record_of(answer: Completion) -> str:
    """What is written of it: anything that is no JSON is found here."""
    return json.dumps(dataclasses.asdict(answer), allow_nan=False)


class Replayed:
    """draftquant's own replay of the same prompts: tokens, and rounds in order."""

    def __init__(self, folder: Path, num_draft_tokens: int) -> None:
        how: Any = {"max_new_tokens": NUM_TOKENS, "aux_layer_ids": AUX_LAYER_IDS}
        traces = record_traces(PAIR / "target", PROMPTS, folder / "traces", **how)
        draft = loaded_draft()
        self.token_ids: list[tuple[int, ...]] = []
        self.rounds: list[tuple[int, ...]] = []
        for trace in TraceFolder.open(traces.folder):
            self.token_ids.append(tuple(trace.token_ids[trace.prompt_length :].tolist()))
            self.rounds.append(tuple(replayed_steps(draft, traces, trace, num_draft_tokens)))


@functools.cache
def shared_decoder() -> Decoder:
    """One for all tests: every prompt is decoded once."""
    return Decoder(num_draft_tokens=3)


@functools.cache
def _replayed() -> Replayed:
    with tempfile.TemporaryDirectory() as folder:
        return Replayed(Path(folder), 3)


@pytest.fixture
def replayed(one_thread: None) -> Replayed:
    del one_thread
    return _replayed()
