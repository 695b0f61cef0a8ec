"""Measuring: every prompt is sent, some at a time, and each answer is kept at once."""

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePosixPath

from ...calibration.prompts.prompt_file import Prompt
from ...calibration.server_client import Patience, ServerClient
from ...calibration.traces.prompt_trace import prompt_sha256
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.digests import tensor_digests, tensors_sha256
from ...quantize.files.staging import check_output
from ...recipes.errors import CheckpointError, MeasureError, short
from ...recipes.packages import package_version
from ..counting.acceptance_counts import AcceptanceCounts, pooled
from .measurement import (
    Asked,
    Measurement,
    RequestRecord,
    ServerIdentity,
    Setup,
    Speculation,
    ToldBy,
    prompts_sha256,
)
from .measurement_file import KeptRecords, kept_records, setup_differences
from .server_answers import Ask, Completion, EngineProtocol

_UNQUANTIZED = ("unquant", "none")
"""Words of engines for a draft that is not quantized; vLLM and SGLang say nothing where they do not
know, which is the rule."""
_NAMES_OF_THE_TARGET = ("root", "model_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftIdentity:
    """The draft that a server runs, by its folder; `served_as` is the server's name for it."""

    draft: str
    draft_sha256: str
    draft_quantization: str | None
    quantized: bool | None = None
    folder: Path | None = None
    served_as: str | None = None


def identified(
    speculation: Speculation, draft: DraftIdentity, server: ServerIdentity
) -> Speculation:
    """How a server drafts, with the identity of the draft that it is said to run."""
    named = speculation.draft or None
    of_the_target = (server.model, *map(server.arguments.get, _NAMES_OF_THE_TARGET))
    in_the_target = named is not None and named in of_the_target
    # An MTP layer is part of the target, so servers report the target's name and quantization.
    told_by = _told_by(None if in_the_target else named, draft)
    if not in_the_target:
        _check_quantization(speculation, draft)
    return replace(
        speculation,
        draft=draft.draft,
        draft_sha256=draft.draft_sha256,
        draft_quantization=draft.draft_quantization,
        served_draft=speculation.draft,
        served_quantization=speculation.draft_quantization,
        told_by=told_by,
    )


def _told_by(named: str | None, draft: DraftIdentity) -> ToldBy | None:
    """How it is known that a server, which reports a path or a Hub id, runs this draft."""
    if draft.served_as is not None and draft.served_as != named:
        raise MeasureError(
            "--served-as",
            f"expected what the server calls its draft, {short(named)}, got"
            f" {short(draft.served_as)}",
            fix="copy the name as the server reports it, or leave it out",
        )
    if named is None:
        return None
    if draft.served_as is not None:
        return "user"
    here = _folder(named)
    if here is not None and draft.folder is not None:
        if here.samefile(draft.folder):
            return "path"
        if _has_tensors(here, draft.draft_sha256):
            return "tensors"
    elif _last_name(named) in map(_last_name, filter(None, (draft.draft, str(draft.folder or "")))):
        return "name"
    raise MeasureError(
        "--draft",
        f"expected the draft that the server runs, {short(named)}, got {short(draft.draft)}"
        f" (tensors {draft.draft_sha256[:12]})",
        fix="give the draft that the server runs, or start the server with this one; if it is the"
        f" same by another name: --served-as {named}",
    )


def _folder(named: str) -> Path | None:
    """The folder, where this machine has it; the server may run elsewhere."""
    try:
        return Path(named) if Path(named).is_dir() else None
    except OSError:  # too long for a path
        return None


def _has_tensors(folder: Path, sha256: str) -> bool:
    try:
        return tensors_sha256(tensor_digests(Checkpoint.open(folder))) == sha256
    except CheckpointError:
        return False


def _last_name(path: str) -> str:
    """The last part of a path or a Hub id; for a path in the Hub's cache, the repository's."""
    parts = PurePosixPath(path).parts
    cached = [part for part in parts if part.startswith("models--")]
    return cached[-1].rpartition("--")[2] if cached else parts[-1] if parts else path


def _check_quantization(speculation: Speculation, draft: DraftIdentity) -> None:
    told, called = speculation.draft_quantization, speculation.draft
    if told is None or draft.quantized is None:
        return
    if draft.quantized == (told.lower() in _UNQUANTIZED):
        raise MeasureError(
            "--draft",
            f"{short(draft.draft)} {'is' if draft.quantized else 'is not'} quantized, but the"
            f" server reports quantization {short(told)} for its"
            f" draft{f' {short(called)}' if called else ''}",
            fix="give the draft that the server runs, or leave --draft out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where a server is (http://HOST:PORT), and how patiently and how often to ask it."""

    url: str
    key: str | None = field(default=None, repr=False)
    patience: Patience
    most_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurePlan:
    """What to measure; warm-up repeats the first prompts."""

    prompts: Sequence[Prompt]
    ask: Ask
    concurrency: int
    num_warm_up: int
    template_sha256: str | None = None
    draft: DraftIdentity | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if len({prompt.id for prompt in self.prompts}) != len(self.prompts) or not self.prompts:
            raise MeasureError(
                "prompts",
                "expected at least one prompt, and a unique id for each",
                fix="give a prompt file",
            )

    def setup(
        self, protocol: EngineProtocol, server: ServerIdentity, speculation: Speculation | None
    ) -> Setup:
        """What identifies a run of this plan; MeasureError if the server is not as expected."""
        if self.model is not None and server.model != self.model:
            what = f"expected {short(self.model)}, the server has {short(server.model)}"
            raise MeasureError("--model", what, fix="give the --server of that model")
        if self.draft is not None:
            if speculation is None:
                raise MeasureError(
                    "--draft",
                    "the server uses no draft",
                    fix="start it with this draft, or leave --draft out",
                )
            speculation = identified(speculation, self.draft, server)
        most = protocol.most_in_flight
        decoding = self.ask.decoding
        asked = Asked(
            prompts_sha256=prompts_sha256(
                (prompt.id, prompt.category, prompt_sha256(prompt.token_ids))
                for prompt in self.prompts
            ),
            template_sha256=self.template_sha256,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            seed=decoding.seed,
            max_new_tokens=self.ask.max_new_tokens,
            ignore_eos=self.ask.ignore_eos,
            concurrency=self.concurrency if most is None else min(self.concurrency, most),
            num_warm_up=self.num_warm_up,
            num_top_logprobs=decoding.num_top_logprobs,
        )
        ours = package_version("draftquant")
        return Setup(server=server, speculation=speculation, asked=asked, draftquant=ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is, with what earlier runs have kept; counts are None without speculation."""

    setup: Setup
    num_done: int
    num_prompts: int
    counts: AcceptanceCounts | None
    dropped_line: bool


def measure(
    out: Path,
    server: ServerAddress,
    protocol: EngineProtocol,
    plan: MeasurePlan,
    *,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Measurement:
    """Measure a server, or resume what an earlier run of the plan has kept beside `out`."""

    async def measured() -> Measurement:
        async with ServerClient(
            server.url, key=server.key, most_in_flight=plan.concurrency, patience=server.patience
        ) as client:
            setup = plan.setup(protocol, *await protocol.identify(client))
            with kept_records(out, setup) as kept:
                _check_kept(kept, plan.prompts)
                await _Run(client, protocol, plan, setup, kept, on_progress, server).all()
                again = plan.setup(protocol, *await protocol.identify(client))
                if differences := setup_differences(setup, again):
                    raise MeasureError(
                        server.url,
                        "was changed while it was measured:",
                        details=differences,
                        fix=f"measure one server; rm {kept.path}, and run again",
                    )
                return kept.publish([prompt.id for prompt in plan.prompts])

    check_output(out)
    return asyncio.run(measured())


@dataclass
class _Run:
    _client: ServerClient
    _protocol: EngineProtocol
    _plan: MeasurePlan
    _setup: Setup
    _kept: KeptRecords
    _on_progress: Callable[[Progress], None]
    _server: ServerAddress
    _next_start: float = 0.0
    _num_done: int = 0
    _counts: AcceptanceCounts | None = None

    async def all(self) -> None:
        plan, done = self._plan, self._kept.records.values()
        # Its clock continues where that of an earlier run ended.
        before = max((record.began + record.latency for record in done), default=0.0)
        self._num_done, speculation = len(done), self._setup.speculation
        if speculation is not None:
            counts = (record.counts for record in done if record.counts is not None)
            self._counts = pooled(counts, speculation.num_draft_tokens)
        waiting = [prompt for prompt in plan.prompts if prompt.id not in self._kept.records]
        self._tell()
        if not waiting:
            return
        warm_up = itertools.islice(itertools.cycle(plan.prompts), plan.num_warm_up)
        await self._in_parallel(warm_up, self._complete)
        began = time.monotonic()
        with ThreadPoolExecutor(1) as writer:  # so that no answer waits for a flush to the disk
            writing: list[Future[None]] = []

            async def answer(prompt: Prompt) -> None:
                start = time.monotonic()
                completion = await self._complete(prompt)
                record = _record(prompt, completion, before + start - began)
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
        """Several workers take one prompt after the other; the first error ends them all."""

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
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 1 / (self._server.most_per_second or math.inf)
        await asyncio.sleep(start - now)

    async def _complete(self, prompt: Prompt) -> Completion:
        completion = await self._protocol.complete(self._client, prompt, self._plan.ask)
        speculation = self._setup.speculation
        expected = speculation.num_draft_tokens if speculation else None
        if completion.num_draft_tokens not in (None, expected):
            where = f"{self._client.url}: prompt {prompt.id}"
            kept = self._kept.path
            raise MeasureError(
                where,
                f"the server drafted K = {expected} tokens, and now {completion.num_draft_tokens}:"
                " it was changed while it was measured",
                fix=f"measure one server; rm {kept}, and run again",
            )
        return completion

    def _tell(self) -> None:
        done = Progress(
            setup=self._setup,
            num_done=self._num_done,
            num_prompts=len(self._plan.prompts),
            counts=self._counts,
            dropped_line=self._kept.dropped_line,
        )
        self._on_progress(done)


def _record(prompt: Prompt, completion: Completion, began: float) -> RequestRecord:
    answered = {each.name: getattr(completion, each.name) for each in fields(completion)}
    del answered["num_draft_tokens"]
    return RequestRecord(
        id=prompt.id,
        category=prompt.category,
        prompt_sha256=prompt_sha256(prompt.token_ids),
        num_prompt_tokens=len(prompt.token_ids),
        began=began,
        cluster=prompt.cluster,
        **answered,
    )


def _check_kept(kept: KeptRecords, prompts: Sequence[Prompt]) -> None:
    of = {prompt.id: (prompt.category, prompt_sha256(prompt.token_ids)) for prompt in prompts}
    for record in kept.records.values():
        if of.get(record.id) != (record.category, record.prompt_sha256):
            raise MeasureError(kept.path, f"prompt {record.id} is not one of those that are asked",
                               fix=f"rm {kept.path}, and run again")  # fmt: skip
