"""A measurement: which server was asked for what, and what every request got.

Counts are kept as they came, per request; what is pooled, is pooled by those who read them. Times
are of the client's monotonic clock: no clock of a server is believed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from typing_extensions import override

from ...recipes.brief import Brief
from ..counting.acceptance_counts import AcceptanceCounts

EngineName = Literal["vllm", "sglang", "tensorrt-llm"]
ToldBy = Literal["path", "tensors", "name", "user"]
MOST_DRAFT_TOKENS = 1024
"""Of one verify step: nobody drafts more."""
_OF_THE_DRAFT = ("spec", "draft", "fingerprint")
"""Parts of names of arguments: vLLM's fingerprint is of its whole configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """What a server says of itself.

    Attributes:
        version: of the engine. model: the name that it serves its target under.
        arguments: that it was started with, as far as it tells.
    """

    engine: EngineName
    version: str
    model: str
    arguments: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How a server drafts.

    Attributes:
        num_draft_tokens: K, proposed in a full round.
        method, draft, draft_quantization: as the server, or who measured, calls them; None = not
            known.
        draft_sha256: identity of the draft's tensors; None = its folder was not given.
        served_draft, served_quantization: what the server itself says, where its folder was given;
            None = it does not say.
        told_by: how it is known that the server runs the draft that was given: "path" = it has the
            same folder, "tensors" = one with the same tensors, "name" = one of that name, "user" =
            `--served-as` says so; None = the server names no draft, or none was given.
        lossy: settings by which tokens are accepted that the target would not have written, as
            "NAME = VALUE"; figures of such a server are not comparable.
        acceptance_told: the server tells such settings; False = it may be lossy unseen.
    """

    num_draft_tokens: int
    method: str | None = None
    draft: str | None = None
    draft_quantization: str | None = None
    draft_sha256: str | None = None
    served_draft: str | None = None
    served_quantization: str | None = None
    told_by: ToldBy | None = None
    lossy: tuple[str, ...] = ()
    acceptance_told: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What every request asked for.

    Attributes:
        prompts_sha256: over ids, categories and token ids of all prompts, in their order.
        template_sha256: of the chat template that made token ids of messages; None = the prompts
            hold token ids, or text alone.
        temperature: 0 = greedy. top_p, top_k, seed: of the draws.
        max_new_tokens: per prompt. ignore_eos: each is continued to that length.
        concurrency: requests in flight. num_warm_up: requests before them, not recorded.
        num_top_logprobs: most likely tokens asked for at each place; 0 = no log-probabilities.
    """

    prompts_sha256: str
    template_sha256: str | None = None
    temperature: float = 0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_new_tokens: int
    ignore_eos: bool = False
    concurrency: int
    num_warm_up: int = 0
    num_top_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What identifies a measurement; its first line.

    Attributes:
        speculation: None = the server drafts nothing.
        draftquant: version that measured.
    """

    format: Literal["draftquant measurement"] = "draftquant measurement"
    format_version: Literal[1] = 1
    server: ServerIdentity
    speculation: Speculation | None
    asked: Asked
    draftquant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What one prompt got.

    Attributes:
        id, category: of the prompt. prompt_sha256: of its token ids, see `prompt_trace`.
        cluster: that the prompt file declares; None = none.
        token_ids: of the output. ended: by the end-of-text token, or by the length asked for.
        histogram: [K + 1] rounds by number of accepted draft tokens; None without speculation. A
            round may have accepted tokens beyond the end of the output, which are counted.
        accepted: accepted draft tokens of every round in order, where the engine tells.
        drafted: proposed draft tokens of every round, likewise; the last rounds may have fewer.
        num_cut_rounds: rounds at the end, of at most K tokens together, that the engine tells only
            as far as the output goes; the three above leave them out. 0 where it tells them whole.
        token_logprob: of each output token; None = not asked for.
        top_gap: log-probability of the most likely token minus that of the second, at each place.
        began: seconds from the start of the run to the first attempt; the time in which a run was
            interrupted is left out.
        time_to_first_token, latency: seconds from sending the answered attempt. The first is None
            where the answer came whole.
        num_attempts: 1 = answered at once.
    """

    id: str
    category: str
    prompt_sha256: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    ended: Literal["stop", "length"]
    histogram: tuple[int, ...] | None = None
    accepted: tuple[int, ...] | None = None
    drafted: tuple[int, ...] | None = None
    num_cut_rounds: int = 0
    token_logprob: tuple[float, ...] | None = None
    top_gap: tuple[float, ...] | None = None
    began: float
    time_to_first_token: float | None
    latency: float
    num_attempts: int = 1
    cluster: str | None = None

    @property
    def counts(self) -> AcceptanceCounts | None:
        """Of its rounds, None without speculation."""
        return None if self.histogram is None else AcceptanceCounts(histogram=self.histogram)

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token behind the first; None where that is not known."""
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
        """What a reader has to know of the server and of the run, a sentence each."""
        speculation, found = self.setup.speculation, list[str]()
        if speculation is not None:
            found += [f"accepts what its target does not write: {one}" for one in speculation.lossy]
            if not speculation.acceptance_told:
                found.append(
                    "the server does not tell whether it accepts only what its target writes (vLLM:"
                    " VLLM_SERVER_DEV_MODE=1 in its environment)"
                )
        if repeated := sum(record.num_attempts > 1 for record in self.records):
            found.append(f"{repeated} requests were answered at a later attempt")
        return tuple(found)

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


def differences(one: Setup, other: Setup) -> tuple[str, ...]:
    """In what two setups differ that must not if drafts are compared, "key: one, other" each.

    The draft itself may differ, and what the server tells of it, and the concurrency.
    """
    weights = [
        found for found in _differing_arguments(one.server, other.server)
        if found[0].endswith("quantization")
    ]  # fmt: skip
    return tuple(
        f"{key}: {first}, {second}"
        for key, first, second in (*_comparable(one, other), *weights)
        if first != second
    )


def differing_arguments(one: ServerIdentity, other: ServerIdentity) -> tuple[str, ...]:
    """In what two servers say that they were started differently, "key: one, other" each."""
    found = _differing_arguments(one, other)
    return tuple(f"{key}: {first}, {second}" for key, first, second in found)


def _differing_arguments(
    one: ServerIdentity, other: ServerIdentity
) -> list[tuple[str, object, object]]:
    """Of the target: what belongs to the draft is left out.

    A key that only one of them tells says nothing where the other does not tell its configuration
    at all: vLLM's keys have a section before a full stop.
    """
    told = [{"." in key for key in server.arguments} for server in (one, other)]
    return [
        (key, one.arguments.get(key), other.arguments.get(key))
        for key in sorted({*one.arguments, *other.arguments})
        if one.arguments.get(key) != other.arguments.get(key)
        and not any(word in key for word in _OF_THE_DRAFT)
        and all(("." in key) in kinds for kinds in told)
    ]


def _comparable(one: Setup, other: Setup) -> list[tuple[str, Any, Any]]:
    a, b = one.asked, other.asked
    return [
        ("engine", one.server.engine, other.server.engine),
        ("engine version", one.server.version, other.server.version),
        ("model", one.server.model, other.server.model),
        ("prompts", a.prompts_sha256[:12], b.prompts_sha256[:12]),
        ("chat template", a.template_sha256, b.template_sha256),
        ("temperature", a.temperature, b.temperature),
        ("top-p", a.top_p, b.top_p),
        ("top-k", a.top_k, b.top_k),
        ("tokens asked for", a.max_new_tokens, b.max_new_tokens),
        ("ignore_eos", a.ignore_eos, b.ignore_eos),
    ]
