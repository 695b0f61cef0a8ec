"""How tests ask a stand, and what they hold its answers against."""

import asyncio
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from draftquant.calibration.prompts.prompt_file import Prompt, read_prompts
from draftquant.calibration.recording.decoding import GREEDY, Decoding
from draftquant.calibration.recording.record import record_traces
from draftquant.calibration.traces.folder import TraceFolder
from draftquant.quantize.stored.loading import load_draft
from draftquant.validate.measure.client import Patience, ServerClient
from draftquant.validate.measure.measurement import ServerIdentity, Speculation
from draftquant.validate.measure.protocols.protocol import Ask, Completion, EngineProtocol
from replay_proof import replayed_steps
from stand.decoder import PAIR, Decoder

NUM_TOKENS = 32
PROMPTS = read_prompts(PAIR / "prompts.jsonl")[:6]
IMPATIENT = Patience(attempts=3, first_pause=0.01, seconds=5)


def ask(
    *,
    decoding: Decoding = GREEDY,
    max_new_tokens: int = NUM_TOKENS,
    ignore_eos: bool = False,
) -> Ask:
    return Ask(decoding=decoding, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)


def identify(
    protocol: EngineProtocol, url: str, patience: Patience = IMPATIENT
) -> tuple[ServerIdentity, Speculation | None]:
    async def asking() -> tuple[ServerIdentity, Speculation | None]:
        async with ServerClient(url, key=None, most_in_flight=4, patience=patience) as client:
            return await protocol.identify(client)

    return asyncio.run(asking())


def complete(
    protocol: EngineProtocol,
    url: str,
    prompts: Sequence[Prompt] = PROMPTS,
    asked: Ask | None = None,
    patience: Patience = IMPATIENT,
) -> list[Completion]:
    """All prompts at once, after asking who answers."""

    async def asking() -> list[Completion]:
        async with ServerClient(url, key=None, most_in_flight=4, patience=patience) as client:
            await protocol.identify(client)
            answers = [protocol.complete(client, prompt, asked or ask()) for prompt in prompts]
            return list(await asyncio.gather(*answers))

    return asyncio.run(asking())


class Replayed:
    """draftquant's own replay of the same prompts: tokens, and rounds in order."""

    def __init__(self, folder: Path, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        traces = record_traces(
            PAIR / "target",
            PROMPTS,
            folder / "traces",
            max_new_tokens=NUM_TOKENS,
            aux_layer_ids=(0, 1, 2),
        )
        draft = load_draft(PAIR / "draft", dtype=torch.float32)
        self.token_ids: list[tuple[int, ...]] = []
        self.rounds: list[tuple[int, ...]] = []
        for trace in TraceFolder.open(traces.folder):
            self.token_ids.append(tuple(trace.token_ids[trace.prompt_length :].tolist()))
            steps = replayed_steps(draft, traces, trace, num_draft_tokens)
            self.rounds.append(tuple(steps))


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
