"""A measurement: which server was asked for what, and what every request got.

Times are from the client's monotonic clock: no server's clock is used.
"""

import hashlib
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal

from typing_extensions import override

from ...calibration.traces.manifest import is_printable_name
from ...recipes.brief import Brief
from ...recipes.decode import AT_LEAST_0, AT_LEAST_1, HEX_64, SHARE_OR_ALL, Bounds
from ...recipes.errors import short
from ..counting.acceptance_counts import AcceptanceCounts, PromptKey, Verification, pooled

EngineName = Literal["vllm", "sglang", "tensorrt-llm"]
ToldBy = Literal["path", "tensors", "name", "user"]
MOST_DRAFT_TOKENS = 1024
"""Limit of one verify step: nobody drafts more."""
_OF_THE_CONFIGURATION = ("fingerprint",)
_OF_THE_DRAFT = ("spec", "draft", *_OF_THE_CONFIGURATION)
"""Parts of argument names to skip: vLLM's fingerprint covers its whole configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """What a server says about itself; `model` is the name under which it serves its target."""

    engine: EngineName
    version: str
    model: str
    arguments: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How a server drafts; None = it does not say, or its folder was not given.

    Attributes:
        method, draft, draft_quantization: as the server, or the user, calls them.
        told_by: shows that it runs the given draft: its folder ("path"), one with the same tensors,
            or one of that name; "user" = `--served-as` says so.
        lossy: settings that accept tokens which the target would not have written, "NAME = VALUE".
        acceptance_told: the server tells such settings; False = it may be lossy unseen.
        verification: how drawn proposals are verified, one by one ("standard") or as a block.
    """

    num_draft_tokens: Annotated[int, Bounds(least=1, most=MOST_DRAFT_TOKENS)]
    method: str | None = None
    draft: str | None = None
    draft_quantization: str | None = None
    draft_sha256: Annotated[str | None, HEX_64] = None
    served_draft: str | None = None
    served_quantization: str | None = None
    told_by: ToldBy | None = None
    lossy: tuple[str, ...] = ()
    acceptance_told: bool = True
    verification: Verification | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What every request asked for.

    Attributes:
        prompts_sha256: over ids, categories and token ids of all prompts, in their order.
        template_sha256: of the chat template that made token ids of messages; None = no messages.
    """

    prompts_sha256: Annotated[str, HEX_64]
    template_sha256: Annotated[str | None, HEX_64] = None
    temperature: Annotated[float, AT_LEAST_0] = 0
    top_p: Annotated[float, SHARE_OR_ALL] = 1.0
    top_k: Annotated[int, AT_LEAST_0] = 0
    seed: int = 0
    max_new_tokens: Annotated[int, AT_LEAST_1]
    ignore_eos: bool = False
    concurrency: Annotated[int, AT_LEAST_1]
    num_warm_up: Annotated[int, AT_LEAST_0] = 0
    num_top_logprobs: Annotated[int, AT_LEAST_0] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What identifies a measurement; its first line. Without `speculation` nothing is drafted."""

    format: Literal["draftquant measurement"] = "draftquant measurement"
    format_version: Literal[1] = 1
    server: ServerIdentity
    speculation: Speculation | None
    asked: Asked
    draftquant: str

    @property
    def verification(self) -> Verification | None:
        """Verification of drawn proposals; None if nothing was drawn, or the server is silent."""
        speculation = self.speculation if self.asked.temperature else None
        return None if speculation is None else speculation.verification


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord(PromptKey):
    """What one prompt got; None = not asked for, or the engine does not tell.

    Attributes:
        histogram: [K + 1] verify steps by number of accepted draft tokens, including those that
            the last step accepted beyond the end of the output.
        accepted, drafted: draft tokens of every step in order.
        num_cut_rounds: steps at the end, of at most K tokens together, that the engine reports only
            up to the end of the output; the three above leave them out.
        top_gap: log-probability of the most likely token minus that of the second, at each place.
        began: seconds from the start of the run to the first attempt, without interruptions.
        time_to_first_token, latency: seconds from sending the answered attempt.
    """

    prompt_sha256: Annotated[str, HEX_64]
    num_prompt_tokens: Annotated[int, AT_LEAST_1]
    token_ids: tuple[int, ...]
    ended: Literal["stop", "length"]
    histogram: tuple[int, ...] | None = None
    accepted: tuple[int, ...] | None = None
    drafted: tuple[int, ...] | None = None
    num_cut_rounds: int = 0
    token_logprob: tuple[float, ...] | None = None
    top_gap: tuple[float, ...] | None = None
    began: Annotated[float, AT_LEAST_0]
    time_to_first_token: Annotated[float | None, AT_LEAST_0]
    latency: Annotated[float, AT_LEAST_0]
    num_attempts: Annotated[int, AT_LEAST_1] = 1
    cluster: str | None = None

    @property
    def counts(self) -> AcceptanceCounts | None:
        """Counts of its verify steps, None without speculation."""
        return None if self.histogram is None else AcceptanceCounts(histogram=self.histogram)

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first; None where that is not known."""
        if self.time_to_first_token is None or len(self.token_ids) < 2:
            return None
        return (self.latency - self.time_to_first_token) / (len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Measurement(Brief):
    """What one server answered to all prompts, in one run.

    Attributes:
        name: a name for people, usually that of the file.
        setup: the server, its draft, and what was asked.
        records: one record for each request, in the order of the prompts.
    """

    name: str
    setup: Setup
    records: tuple[RequestRecord, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know about the server and the run, one sentence each."""
        speculation, warnings = self.setup.speculation, list[str]()
        if speculation is not None:
            warnings += [f"accepts what its target does not write: {s}" for s in speculation.lossy]
            if not speculation.acceptance_told:
                warnings.append(
                    "the server does not tell whether it accepts only what its target writes (vLLM:"
                    " VLLM_SERVER_DEV_MODE=1 in its environment)"
                )
        if repeated := sum(record.num_attempts > 1 for record in self.records):
            warnings.append(f"{repeated} requests were answered at a later attempt")
        return tuple(warnings)

    @override
    def brief(self) -> Mapping[str, object]:
        server, speculation = self.setup.server, self.setup.speculation
        return {
            "name": self.name,
            "server": f"{server.engine} {server.version}",
            "model": server.model,
            "K": speculation.num_draft_tokens if speculation else "drafts nothing",
            "requests": f"{len(self.records):,}",
        }


def differences(first: Setup, second: Setup, *, of_servers: bool = False) -> tuple[str, ...]:
    """What must not differ if drafts, or servers, are compared, "key: one, other" each."""
    both = [
        (setup.server.engine, setup.server.version, setup.server.model,
         setup.asked.prompts_sha256[:12], setup.asked.template_sha256, setup.asked.temperature,
         setup.asked.top_p, setup.asked.top_k, setup.asked.max_new_tokens, setup.asked.ignore_eos)
        for setup in (first, second)
    ]  # fmt: skip
    compared = zip(_COMPARED, *both, strict=True)
    weights = (
        difference
        for difference in _differing_arguments(first.server, second.server)
        if difference[0].endswith("quantization")
    )
    if of_servers:
        return _said([*compared][len(_OF_SERVERS) :])
    rules = first.verification, second.verification
    verified = [("verification", *rules)] if all(rules) else []
    return _said((*compared, *verified, *weights))


_OF_SERVERS = ("engine", "engine version", "model")
_COMPARED = (*_OF_SERVERS, "prompts", "chat template", "temperature",
             "top-p", "top-k", "tokens asked for", "ignore_eos")  # fmt: skip


def servers_apart(first: Setup, second: Setup) -> tuple[str, ...]:
    """In what two servers of one draft differ as they report it, "key: one, other" each.

    Arguments of two engines have other names, so that none are compared.
    """
    servers = first.server, second.server
    named = [(server.engine, server.version, server.model) for server in servers]
    rows: list[tuple[str, object, object]] = [*zip(_OF_SERVERS, *named, strict=True)]
    if named[0][0] == named[1][0]:
        rows += _differing_arguments(*servers, skipped=_OF_THE_CONFIGURATION)
        rows.append(("verification", first.verification, second.verification))
    return _said(rows)


def differing_arguments(first: ServerIdentity, second: ServerIdentity) -> tuple[str, ...]:
    """Differences of two servers' reported arguments, "key: one, other" each."""
    return _said(_differing_arguments(first, second))


def _said(values: Iterable[tuple[str, object, object]]) -> tuple[str, ...]:
    return tuple(f"{key}: {first}, {second}" for key, first, second in values if first != second)


def _differing_arguments(
    first: ServerIdentity, second: ServerIdentity, skipped: Sequence[str] = _OF_THE_DRAFT
) -> Iterator[tuple[str, object, object]]:
    """Without skipped ones, and without sections that one server does not report."""
    told = [{"." in key for key in server.arguments} for server in (first, second)]
    for key in sorted({*first.arguments, *second.arguments}):
        ours = not any(word in key for word in skipped)
        if ours and all(("." in key) in kinds for kinds in told):
            yield key, first.arguments.get(key), second.arguments.get(key)


_LARGEST_TOKEN = 2**31 - 1
_MAX_LOGPROB = 1e-3  # engines round logarithms of probabilities near 1 to something above 0


def prompts_sha256(prompts: Iterable[tuple[str, str, str]]) -> str:
    """Identity of prompts in their order, from id, category and `prompt_sha256` of each."""
    digest = hashlib.sha256()
    for parts in prompts:
        for part in parts:  # names are printable: no line end
            digest.update(f"{part}\n".encode())
    return digest.hexdigest()


def setup_problem(setup: Setup) -> str | None:
    """What is impossible in a decoded setup, as "key: ..."; None = nothing."""
    for key, name in (("version", setup.server.version), ("model", setup.server.model)):
        if not name or not name.isprintable():
            return f"server.{key}: expected printable characters, got {short(name)}"
    return None


def record_problem(record: RequestRecord, setup: Setup) -> str | None:
    """What is impossible in a record of a measurement with this setup; None = nothing."""
    names = {"id": record.id, "category": record.category, "cluster": record.cluster or "-"}
    for key, name in names.items():
        if not is_printable_name(name):
            return f"{key}: expected 1 to 200 printable characters, got {short(name)}"
    return (
        _output_problem(record, setup.asked)
        or _steps_problem(record, setup.speculation)
        or _logprob_problem(record, setup.asked.num_top_logprobs)
        or _time_problem(record)
    )


def _output_problem(record: RequestRecord, asked: Asked) -> str | None:
    count, most = len(record.token_ids), asked.max_new_tokens
    if count > most or (record.ended == "length" and count < most):
        return (
            f"token_ids: asked for {most} tokens, got {count} and {record.ended!r}: the server has"
            " a limit of its own, or its context is too short"
        )
    if record.ended == "stop" and asked.ignore_eos:
        return f"ended: asked for {most} tokens whatever they are, got {count} and 'stop'"
    if count and not 0 <= min(record.token_ids) <= max(record.token_ids) <= _LARGEST_TOKEN:
        return f"token_ids: expected ids in [0, {_LARGEST_TOKEN}]"
    return None


def _steps_problem(record: RequestRecord, speculation: Speculation | None) -> str | None:
    histogram, accepted, drafted = record.histogram, record.accepted, record.drafted
    if not 0 <= record.num_cut_rounds <= (speculation.num_draft_tokens if speculation else 0):
        return f"num_cut_rounds: expected 0 to K, got {record.num_cut_rounds}"
    if speculation is None:
        given = [name for name in ("histogram", "accepted", "drafted")
                 if getattr(record, name) is not None]  # fmt: skip
        return f"{given[0]}: expected none, because the server uses no draft" if given else None
    most = speculation.num_draft_tokens
    if histogram is None:
        return "histogram: expected verify steps, because the server uses a draft, got none"
    if len(histogram) != most + 1 or min(histogram) < 0:
        return (
            f"histogram: expected {most + 1} counts for K = {most}, none below 0, got"
            f" {short(list(histogram))}"
        )
    if accepted is None:
        return None if drafted is None else "drafted: expected none without accepted"
    counts = Counter(accepted)
    if [counts[j] for j in range(most + 1)] != list(histogram) or len(accepted) != sum(histogram):
        return (
            f"accepted: {len(accepted)} verify steps do not match the histogram, which counts"
            f" {sum(histogram)}"
        )
    if drafted is not None and len(drafted) != len(accepted):
        return f"drafted: expected {len(accepted)} verify steps, got {len(drafted)}"
    if not all(a <= d <= most for a, d in zip(accepted, drafted or (), strict=False)):
        return f"drafted: expected between the accepted tokens and K = {most} in every verify step"
    return None


def _logprob_problem(record: RequestRecord, num_top: int) -> str | None:
    count = len(record.token_ids)
    for name, values, needed in (
        ("token_logprob", record.token_logprob, num_top > 0),
        ("top_gap", record.top_gap, False),
    ):
        if values is None:
            if needed:
                return f"{name}: asked for, got none"
            continue
        if not num_top:
            return f"{name}: expected none, because none were asked for"
        if len(values) != count:
            return f"{name}: expected {count} numbers, one for each token, got {len(values)}"
    if record.token_logprob and max(record.token_logprob) > _MAX_LOGPROB:
        return "token_logprob: expected logarithms of probabilities, at most 0"
    if record.top_gap and min(record.top_gap) < 0:
        return "top_gap: expected differences of at least 0"
    return None


def _time_problem(record: RequestRecord) -> str | None:
    first = record.time_to_first_token
    if first is None or first <= record.latency:
        return None
    return f"time_to_first_token: {first} seconds are more than the latency, {record.latency}"


ALL = "all requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of some requests; times are medians in seconds, None where answers came whole."""

    category: str
    num_requests: int
    num_output_tokens: int
    num_rounds: float | None
    acceptance_length: float | None
    time_to_first_token: float | None
    time_per_output_token: float | None
    num_repeated: int


def all_figures(measurement: Measurement) -> tuple[Figures, ...]:
    """Figures of each category in order of appearance, and of all requests last."""
    speculation = measurement.setup.speculation
    most = None if speculation is None else speculation.num_draft_tokens
    records = measurement.records
    categories = dict.fromkeys(record.category for record in records)
    by_category = ([r for r in records if r.category == category] for category in categories)
    some = zip(categories, by_category, strict=True) if len(categories) > 1 else ()
    return (*(_figures(name, inside, most) for name, inside in some), _figures(ALL, records, most))


def tokens_per_second(measurement: Measurement) -> float | None:
    """Output tokens over the time from the first request to the last answer; None for no time."""
    records = measurement.records
    seconds = max(r.began + r.latency for r in records) - min(r.began for r in records)
    return sum(len(r.token_ids) for r in records) / seconds if seconds else None


def _figures(
    category: str, records: Sequence[RequestRecord], num_draft_tokens: int | None
) -> Figures:
    counts = None
    if num_draft_tokens is not None:
        recorded = (record.counts for record in records)
        counts = pooled((c for c in recorded if c is not None), num_draft_tokens)
    return Figures(
        category=category,
        num_requests=len(records),
        num_output_tokens=sum(len(record.token_ids) for record in records),
        num_rounds=None if counts is None else counts.num_steps,
        acceptance_length=counts.mean_acceptance_length if counts and counts.num_steps else None,
        time_to_first_token=_median(record.time_to_first_token for record in records),
        time_per_output_token=_median(record.time_per_output_token for record in records),
        num_repeated=sum(record.num_attempts > 1 for record in records),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
