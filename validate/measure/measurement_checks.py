"""What must hold of a measurement, whoever took it: on recording, and on reading it again."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ...calibration.traces.names import is_printable_name
from ...recipes.bounds import AT_LEAST_0, AT_LEAST_1, SHARE_OR_ALL
from ...recipes.errors import short
from .measurement import MOST_DRAFT_TOKENS, Asked, RequestRecord, Setup, Speculation

_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST_TOKEN = 2**31 - 1
_MAX_LOGPROB = 1e-3  # engines round logarithms of probabilities near 1 to something above 0


def prompts_sha256(prompts: Iterable[tuple[str, str, str]]) -> str:
    """Identity of prompts in their order, see `Asked`.

    Args:
        prompts: id, category and `prompt_sha256` of each.
    """
    digest = hashlib.sha256()
    for parts in prompts:
        for part in parts:  # names are printable: no line end
            digest.update(f"{part}\n".encode())
    return digest.hexdigest()


def setup_problem(setup: Setup) -> str | None:
    """What a setup says that cannot be, as "key: ..."; None = nothing."""
    server = setup.server
    for key, name in (("version", server.version), ("model", server.model)):
        if not name or not name.isprintable():
            return f"server.{key}: expected printable characters, got {short(name)}"
    return _speculation_problem(setup.speculation) or _asked_problem(setup.asked)


def _speculation_problem(speculation: Speculation | None) -> str | None:
    if speculation is None:
        return None
    if not 1 <= speculation.num_draft_tokens <= MOST_DRAFT_TOKENS:
        return (
            f"speculation.num_draft_tokens: expected 1 to {MOST_DRAFT_TOKENS:,}, got"
            f" {speculation.num_draft_tokens}"
        )
    digest = speculation.draft_sha256
    if digest is not None and not _SHA256.fullmatch(digest):
        return f"speculation.draft_sha256: expected 64 hex digits, got {short(digest)}"
    return None


def _asked_problem(asked: Asked) -> str | None:
    for key, digest in (
        ("prompts_sha256", asked.prompts_sha256),
        ("template_sha256", asked.template_sha256),
    ):
        if digest is not None and not _SHA256.fullmatch(digest):
            return f"asked.{key}: expected 64 hex digits, got {short(digest)}"
    for name, value, allowed in (
        ("max_new_tokens", asked.max_new_tokens, AT_LEAST_1),
        ("concurrency", asked.concurrency, AT_LEAST_1),
        ("num_warm_up", asked.num_warm_up, AT_LEAST_0),
        ("num_top_logprobs", asked.num_top_logprobs, AT_LEAST_0),
        ("top_k", asked.top_k, AT_LEAST_0),
        ("temperature", asked.temperature, AT_LEAST_0),
        ("top_p", asked.top_p, SHARE_OR_ALL),
    ):
        if problem := allowed.problem(value):
            return f"asked.{name}: {problem}"
    return None


def record_problem(record: RequestRecord, setup: Setup) -> str | None:
    """What a record says that cannot be of a measurement with this setup; None = nothing."""
    return (
        _prompt_problem(record)
        or _output_problem(record, setup.asked)
        or _rounds_problem(record, setup.speculation)
        or _logprob_problem(record, setup.asked.num_top_logprobs)
        or _time_problem(record)
    )


def _prompt_problem(record: RequestRecord) -> str | None:
    names = (("id", record.id), ("category", record.category), ("cluster", record.cluster or "-"))
    for key, name in names:
        if not is_printable_name(name):
            return f"{key}: expected 1 to 200 printable characters, got {short(name)}"
    if not _SHA256.fullmatch(record.prompt_sha256):
        return f"prompt_sha256: expected 64 hex digits, got {short(record.prompt_sha256)}"
    if record.num_prompt_tokens < 1:
        return f"num_prompt_tokens: expected at least 1, got {record.num_prompt_tokens}"
    return None


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


def _rounds_problem(record: RequestRecord, speculation: Speculation | None) -> str | None:
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
    return None if drafted is None else _drafted_problem(accepted, drafted, most)


def _drafted_problem(accepted: Sequence[int], drafted: Sequence[int], most: int) -> str | None:
    if len(drafted) != len(accepted):
        return f"drafted: expected {len(accepted)} verify steps, got {len(drafted)}"
    if not all(a <= d <= most for a, d in zip(accepted, drafted, strict=True)):
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
    seconds = (record.began, record.latency, 0.0 if first is None else first)
    if not all(0 <= value < math.inf for value in seconds):
        return f"began, latency, time_to_first_token: expected seconds, got {short(seconds)}"
    if first is not None and first > record.latency:
        return f"time_to_first_token: {first} seconds are more than the latency, {record.latency}"
    if record.num_attempts < 1:
        return f"num_attempts: expected at least 1, got {record.num_attempts}"
    return None
