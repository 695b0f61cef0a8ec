"""What another tool's benchmark measured of one draft, as far as a verdict needs it.

A verdict needs, of every request, which prompt it was and how many draft tokens each of its verify
steps accepted, so that prompts can be paired and bounds are over prompts. An average has neither.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ..counting.acceptance_counts import AcceptanceCounts
from ..counting.draft_counts import PromptCounts
from ..errors import MeasureError

_NOT_THE_PROMPT = ("model", "stream", "stream_options", "rid", "request_id", "user")
"""Keys of a request that say nothing of what is generated, or name the server."""
_PROMPTS = ("prompt", "messages", "text", "input_ids", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRequest:
    """What one request got.

    Attributes:
        id: of the prompt, as the tool calls it.
        prompt_sha256: of what identifies the prompt.
        settings: of the request that change what is generated, as far as the tool keeps them.
        num_output_tokens: None = the tool does not keep it.
        output: text; None = the tool does not keep it.
        histogram: [K + 1] verify steps by number of accepted draft tokens.
        cluster: see `PromptCounts`.
    """

    id: str
    prompt_sha256: str
    settings: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    num_output_tokens: int | None
    output: str | None
    histogram: tuple[int, ...]
    cluster: str = ""

    @property
    def counts(self) -> AcceptanceCounts:
        """Of its verify steps."""
        return AcceptanceCounts(histogram=self.histogram)

    @property
    def prompt(self) -> PromptCounts:
        """As the gate counts it."""
        return PromptCounts(
            id=self.id,
            category="all",
            prompt_sha256=self.prompt_sha256,
            counts=self.counts,
            cluster=self.cluster,
            alike=self.cluster,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignMeasurement:
    """All requests of one run, in the tool's order.

    Attributes:
        name: of the file. tool: with its version, as far as the file says it.
        engine, version, model: of the server; "" = the file does not say.
        num_draft_tokens: K.
        settings: of the whole run that have to be equal, as the file calls them.
        paired_by: how a request is known as the same on another server, in words.
        told_positions: False = only the sums of each request are known: its verify steps and its
            accepted tokens. Its histogram is then the narrowest with these sums.
        to_keep_outputs: how the tool is made to keep the texts of outputs.
    """

    name: str
    tool: str
    engine: str
    version: str = ""
    model: str = ""
    num_draft_tokens: int
    settings: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    paired_by: str
    told_positions: bool = True
    to_keep_outputs: str
    requests: tuple[ForeignRequest, ...]

    @property
    def temperature(self) -> float | None:
        """Of all requests; None where it is not known."""
        told = [self.settings, *(request.settings for request in self.requests)]
        values = [one["temperature"] for one in told if one.get("temperature") is not None]
        known = {float(one) for one in values if isinstance(one, int | float)}
        return known.pop() if len(known) == 1 else None

    @property
    def has_outputs(self) -> bool:
        """Every request has its text."""
        return all(request.output is not None for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPair:
    """Two runs: of the draft as released (BF16), and of the quantized draft."""

    baseline: ForeignMeasurement
    candidate: ForeignMeasurement


def narrowest(num_steps: int, num_accepted: int, num_draft_tokens: int) -> tuple[int, ...]:
    """The histogram of verify steps with the least spread that has these sums.

    Bounds of a verdict need the sums alone; what a position accepted cannot be read from it.
    """
    counts = [0] * (num_draft_tokens + 1)
    if num_steps:
        fewer, more = divmod(num_accepted, num_steps)
        counts[fewer] = num_steps - more
        if more:
            counts[fewer + 1] = more
    return tuple(counts)


def sha256_of(value: object) -> str:
    """Identity of anything that JSON can say."""
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def asked(payload: Mapping[str, object]) -> tuple[str, Mapping[str, object]] | None:
    """Identity of the prompt of a request that was sent, and its settings; None = no prompt."""
    prompt = {key: payload[key] for key in _PROMPTS if payload.get(key) is not None}
    if not prompt:
        return None
    rest = {
        key: value
        for key, value in payload.items()
        if key not in _PROMPTS and key not in _NOT_THE_PROMPT and value is not None
    }
    return sha256_of(prompt), rest


def with_k(
    path: Path, told: Sequence[tuple[ForeignRequest, int]]
) -> tuple[int, tuple[ForeignRequest, ...]]:
    """The one K of all requests, and their histograms with K + 1 columns.

    Args:
        told: requests, each with its K; 0 = it has no verify step that would say it.

    Raises:
        MeasureError: there is not one K.
    """
    sizes = {most for _, most in told if most}
    if len(sizes) != 1:
        what = f"expected one K in all requests, got {sorted(sizes)}"
        raise MeasureError(path, what, fix="keep the requests of one server with one K in a file")
    (most,) = sizes
    return most, tuple(
        dataclasses.replace(
            request, histogram=(*request.histogram, *(0,) * (most + 1 - len(request.histogram)))
        )
        for request, _ in told
    )


def with_copies_together(
    requests: Sequence[ForeignRequest], num_prompt_tokens: Sequence[int | None]
) -> tuple[ForeignRequest, ...]:
    """Requests whose prompts are not known: prompts of one length with one output are one cluster.

    Args:
        requests: in any order.
        num_prompt_tokens: of each; None = its prompt is known.
    """
    both = list(zip(requests, num_prompt_tokens, strict=True))
    alike = Counter((one.output, length) for one, length in both)
    first: dict[tuple[str | None, int | None], str] = {}
    return tuple(
        one
        if length is None or one.output is None or alike[one.output, length] == 1
        else dataclasses.replace(
            one, cluster=first.setdefault((one.output, length), one.prompt_sha256)
        )
        for one, length in both
    )


def numbered(requests: Sequence[ForeignRequest]) -> dict[tuple[str, int], ForeignRequest]:
    """Every request by its prompt and by how often that prompt came before."""
    seen: dict[str, int] = {}
    found = {}
    for request in requests:
        place = seen.get(request.prompt_sha256, 0)
        seen[request.prompt_sha256] = place + 1
        found[request.prompt_sha256, place] = request
    return found
