"""Measuring: every prompt is asked, a bounded number at a time, and each answer is kept at once.

It knows neither engines, which are behind `EngineProtocol`, nor the command line.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...calibration.prompts.prompt_file import Prompt
from ...calibration.server_client import ServerClient
from ...calibration.traces.prompt_trace import prompt_sha256
from ...quantize.files.staging import check_output
from ..counting.acceptance_counts import AcceptanceCounts, pooled
from ..errors import MeasureError
from .measure_plan import Plan, ServerAddress
from .measurement import Measurement, RequestRecord, Setup
from .measuring_file import KeptRecords, kept_records, setup_differences
from .protocols.protocol import Completion, EngineProtocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        setup: of the run.
        num_done: of the prompts; with what earlier runs have kept.
        counts: of all their rounds; None without speculation.
        dropped_line: of what was kept the last line was cut off, and is asked for again.
    """

    setup: Setup
    num_done: int
    num_prompts: int
    counts: AcceptanceCounts | None
    dropped_line: bool


def measure(
    out: Path,
    server: ServerAddress,
    protocol: EngineProtocol,
    plan: Plan,
    *,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Measurement:
    """Measure a server, or go on with what an earlier run of the same plan has kept beside `out`.

    Args:
        out: the file to create; it appears when every prompt has its record.
        protocol: of its engine, new.
        on_progress: called at the start, and after every answer.

    Raises:
        OutputError: `out` exists or cannot be written, or another plan was begun there.
        ServerError: the server does not answer.
        MeasureError: it is not what is asked for, or was changed between
            two requests. What was measured is kept.
    """
    check_output(out)
    return asyncio.run(_measure(out, server, protocol, plan, on_progress))


async def _measure(
    out: Path,
    server: ServerAddress,
    protocol: EngineProtocol,
    plan: Plan,
    on_progress: Callable[[Progress], None],
) -> Measurement:
    async with ServerClient(
        server.url, key=server.key, most_in_flight=plan.concurrency, patience=server.patience
    ) as client:
        identity, speculation = await protocol.identify(client)
        setup = plan.setup(protocol, identity, speculation)
        with kept_records(out, setup) as kept:
            _check_kept(kept, plan.prompts)
            run = _Run(client, protocol, plan, setup, kept, on_progress, server.most_per_second)
            await run.all()
            again = plan.setup(protocol, *await protocol.identify(client))
            if differences := setup_differences(setup, again):
                raise MeasureError(
                    server.url,
                    "was changed while it was measured:",
                    details=differences,
                    fix=f"measure one server; rm {kept.path}, and run again",
                )
            return kept.publish([prompt.id for prompt in plan.prompts])


class _Run:
    """The requests of one run."""

    def __init__(
        self,
        client: ServerClient,
        protocol: EngineProtocol,
        plan: Plan,
        setup: Setup,
        kept: KeptRecords,
        on_progress: Callable[[Progress], None],
        most_per_second: float | None,
    ) -> None:
        self._client = client
        self._protocol = protocol
        self._plan = plan
        self._setup = setup
        self._kept = kept
        self._on_progress = on_progress
        self._pause = 1 / most_per_second if most_per_second else 0.0
        self._next_start = 0.0
        done = kept.records.values()
        # Its clock goes on where that of an earlier run ended.
        self._before = max((record.began + record.latency for record in done), default=0.0)
        self._num_done = len(done)
        self._counts = _pooled(done, setup)

    async def all(self) -> None:
        """Ask what is not answered yet."""
        plan = self._plan
        waiting = [prompt for prompt in plan.prompts if prompt.id not in self._kept.records]
        self._tell()
        if not waiting:
            return
        warm_up = itertools.islice(itertools.cycle(plan.prompts), plan.num_warm_up)
        await self._in_parallel(warm_up, self._complete)
        began = time.monotonic()
        with ThreadPoolExecutor(1) as writer:  # a flush to the disk keeps no answer waiting
            writing: list[Future[None]] = []

            async def answer(prompt: Prompt) -> None:
                start = time.monotonic()
                completion = await self._complete(prompt)
                record = _record(prompt, completion, self._before + start - began)
                writing.append(writer.submit(self._kept.add, record))
                for written in [each for each in writing if each.done()]:
                    writing.remove(written)
                    written.result()
                self._num_done += 1
                if self._counts is not None and record.counts is not None:
                    self._counts += record.counts
                self._tell()

            await self._in_parallel(iter(waiting), answer)
        for written in writing:
            written.result()

    async def _in_parallel(
        self, prompts: Iterator[Prompt], do: Callable[[Prompt], Awaitable[object]]
    ) -> None:
        """So many workers take one prompt after the other; the first error ends them all."""

        async def work() -> None:
            for prompt in prompts:
                await self._paced()
                await do(prompt)

        tasks = [asyncio.create_task(work()) for _ in range(self._setup.asked.concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _paced(self) -> None:
        """Wait until a request may begin."""
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + self._pause
        if start > now:
            await asyncio.sleep(start - now)

    async def _complete(self, prompt: Prompt) -> Completion:
        completion = await self._protocol.complete(self._client, prompt, self._plan.ask)
        speculation = self._setup.speculation
        expected = speculation.num_draft_tokens if speculation else None
        if completion.num_draft_tokens not in (None, expected):
            raise MeasureError(
                f"{self._client.url}: prompt {prompt.id}",
                f"the server drafted K = {expected} tokens, and now"
                f" {completion.num_draft_tokens}: it was changed while it was measured",
                fix=f"measure one server; rm {self._kept.path}, and run again",
            )
        return completion

    def _tell(self) -> None:
        self._on_progress(
            Progress(
                setup=self._setup,
                num_done=self._num_done,
                num_prompts=len(self._plan.prompts),
                counts=self._counts,
                dropped_line=self._kept.dropped_line,
            )
        )


def _record(prompt: Prompt, completion: Completion, began: float) -> RequestRecord:
    return RequestRecord(
        id=prompt.id,
        category=prompt.category,
        prompt_sha256=prompt_sha256(prompt.token_ids),
        num_prompt_tokens=len(prompt.token_ids),
        token_ids=completion.token_ids,
        ended=completion.ended,
        histogram=completion.histogram,
        accepted=completion.accepted,
        drafted=completion.drafted,
        num_cut_rounds=completion.num_cut_rounds,
        token_logprob=completion.token_logprob,
        top_gap=completion.top_gap,
        began=began,
        time_to_first_token=completion.time_to_first_token,
        latency=completion.latency,
        num_attempts=completion.num_attempts,
        cluster=prompt.cluster,
    )


def _check_kept(kept: KeptRecords, prompts: Sequence[Prompt]) -> None:
    """What lies there belongs to these prompts, as its setup says."""
    of = {prompt.id: (prompt.category, prompt_sha256(prompt.token_ids)) for prompt in prompts}
    for record in kept.records.values():
        if of.get(record.id) != (record.category, record.prompt_sha256):
            raise MeasureError(kept.path, f"prompt {record.id} is not one of those that are asked",
                               fix=f"rm {kept.path}, and run again")  # fmt: skip


def _pooled(records: Iterable[RequestRecord], setup: Setup) -> AcceptanceCounts | None:
    if setup.speculation is None:
        return None
    counts = (record.counts for record in records if record.counts is not None)
    return pooled(counts, setup.speculation.num_draft_tokens)
