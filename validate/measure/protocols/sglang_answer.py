"""An answer of SGLang's /generate: its tokens, its rounds, its log-probabilities.

Read in the sources of 0.5.23 (paths below `sglang/srt`), the fields also in those of 0.5.6 to
0.5.15:

- A finished answer's `meta_info` has `spec_verify_ct` (rounds), `spec_num_correct_drafts`,
  `spec_num_proposed_drafts` and `spec_correct_drafts_histogram`
  (managers/tokenizer_manager.py:3138-3210). All are absent where no round was needed, and from a
  server that drafts nothing. Up to 0.5.10 they are called `spec_accept_token_num`,
  `spec_draft_token_num` and `spec_accept_histogram`; 0.5.9 is the first with a histogram.
- The histogram ends at the largest number seen, not at K (managers/schedule_batch.py:1566). It
  holds every round of the request alone, with what the last one accepted beyond the end
  (managers/scheduler_components/batch_result_processor.py:829-836). `spec_accept_length` is
  completion_tokens / rounds, which is not 1 + accepted / rounds (tokenizer_manager.py:3165).
- A stream's events repeat everything from the beginning, or with --incremental-streaming-output
  what is new (tokenizer_manager.py:2627-2671); events that nobody fetched become one (:1966-1979).
  `meta_info.completion_tokens` is the sum in both. So rounds are told apart only if events are as
  many as rounds.
- Log-probabilities are after temperature, before top-k and top-p; greedy ones are raw
  (layers/logprob_processor.py:416-427; otherwise with SGLANG_RETURN_ORIGINAL_LOGPROB).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from ....calibration.server_client import Event, Reply
from ....recipes.errors import short
from ...errors import MeasureError
from .answer_fields import AnswerProblem, Fields, gap, number, object_, whole, wholes
from .protocol import Ask, Completion

OLDEST = "0.5.9"
_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_ACCEPTED = ("spec_num_correct_drafts", "spec_accept_token_num")
_PROPOSED = ("spec_num_proposed_drafts", "spec_draft_token_num")


def read_answer(
    reply: Reply, ask: Ask, num_draft_tokens: int | None, where: str, *, streamed: bool
) -> Completion:
    """What a prompt got.

    Args:
        reply: events of a stream, or the whole answer.
        num_draft_tokens: K; None = the server drafts nothing.
        where: server and prompt, for errors.
        streamed: whether events tell when tokens came.

    Raises:
        AnswerProblem: it is not SGLang's.
        MeasureError: the server gave up, cut the answer off, or does not say what it accepted.
    """
    if not reply.events:
        raise AnswerProblem("its stream has no event")
    events, last = reply.events, reply.events[-1]
    meta = object_(last.data, "meta_info")
    ended = _ended(meta, where)
    token_ids = _token_ids(events, whole(meta, "completion_tokens", least=1))
    if len(token_ids) > ask.max_new_tokens:
        raise AnswerProblem(
            f"output_ids: {len(token_ids)}, but {ask.max_new_tokens} were asked for"
        )
    if ended == "length" and len(token_ids) < ask.max_new_tokens:
        raise MeasureError(
            where,
            f"its answer was cut off after {len(token_ids)} of {ask.max_new_tokens} tokens",
            fix="start the server with a longer --context-length, or ask for fewer tokens",
        )
    histogram = None
    if num_draft_tokens is not None:
        histogram = _histogram(meta, len(token_ids), num_draft_tokens, where)
    num_top = ask.decoding.num_top_logprobs
    return Completion(
        token_ids=token_ids,
        ended=ended,
        histogram=histogram,
        accepted=_told_apart(events, histogram) if streamed else None,
        drafted=None,
        num_draft_tokens=num_draft_tokens if histogram and any(histogram) else None,
        token_logprob=_logprobs(meta, token_ids) if num_top else None,
        top_gap=_gaps(meta, len(token_ids)) if num_top > 1 else None,
        time_to_first_token=events[0].seconds if streamed else None,
        latency=last.seconds,
        num_attempts=reply.num_attempts,
    )


def _ended(meta: Fields, where: str) -> Literal["stop", "length"]:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else None
    if kind == "stop":
        return "stop"
    if kind == "length":
        return "length"
    if kind == "abort" and isinstance(reason, Mapping):
        raise MeasureError(where, f"the server gave up: {short(reason.get('message'))}",
                           fix="see the server's own messages")  # fmt: skip
    raise AnswerProblem(f"finish_reason: expected stop or length, got {short(reason)}")


def _token_ids(events: Sequence[Event], num_tokens: int) -> tuple[int, ...]:
    """Of the last event if it repeats all, else of all events together."""
    last = wholes(events[-1].data, "output_ids")
    if len(last) == num_tokens:
        return last
    ids = tuple(itertools.chain.from_iterable(wholes(e.data, "output_ids") for e in events))
    if len(ids) != num_tokens:
        raise AnswerProblem(f"completion_tokens: {num_tokens}, but {len(ids)} output_ids came")
    return ids


def _histogram(meta: Fields, num_tokens: int, num_draft_tokens: int, where: str) -> tuple[int, ...]:
    """[K + 1], checked against all else that is told of the rounds."""
    empty = (0,) * (num_draft_tokens + 1)
    if num_tokens == 1:  # prefill wrote it
        return empty
    key = next((key for key in _HISTOGRAMS if key in meta), None)
    if key is None:
        raise MeasureError(
            where,
            "the server drafts, but its answer has no spec_correct_drafts_histogram",
            fix=f"use SGLang {OLDEST} or later, and its Python server",
        )
    counts = wholes(meta, key)
    rounds = sum(counts)
    accepted = sum(j * count for j, count in enumerate(counts))
    expected = {"spec_verify_ct": rounds}
    expected |= {_first(meta, _ACCEPTED): accepted}
    expected |= {_first(meta, _PROPOSED): rounds * num_draft_tokens}
    for name, value in expected.items():
        if whole(meta, name) != value:
            raise AnswerProblem(f"{name}: {meta[name]}, but {key} gives {value}: {list(counts)}")
    # Each round writes what it accepted and one more, the last up to K less than that; a request
    # that was put back once more reads its tokens again, which writes one without a round.
    written = 1 + rounds + accepted
    again = whole({"num_retractions": 0, **meta}, "num_retractions")
    fits = written - num_draft_tokens <= num_tokens <= written + again
    if len(counts) > len(empty) or not fits:
        raise AnswerProblem(
            f"{key}: {list(counts)} with K = {num_draft_tokens} cannot have written"
            f" {num_tokens} tokens"
        )
    return counts + empty[len(counts) :]


def _first(meta: Fields, names: Sequence[str]) -> str:
    return next((name for name in names if name in meta), names[0])


def _told_apart(
    events: Sequence[Event], histogram: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Accepted tokens round by round, if the stream had an event for each; else None."""
    if histogram is None or len(events) != sum(histogram) + 1:
        return None
    totals = [whole(object_(e.data, "meta_info"), "completion_tokens") for e in events]
    seen = [after - before - 1 for before, after in itertools.pairwise(totals)]
    # The last round may have accepted more than was written.
    left = sum(j * count for j, count in enumerate(histogram)) - sum(seen[:-1])
    accepted = (*seen[:-1], left) if seen else ()
    counted = tuple(accepted.count(j) for j in range(len(histogram)))
    return accepted if counted == histogram else None


def _logprobs(meta: Fields, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """Of the tokens; an entry is [log-probability, id, text or null]."""
    entries = _entries(meta.get("output_token_logprobs"), "output_token_logprobs")
    if tuple(token for _, token in entries) != token_ids:
        raise AnswerProblem("output_token_logprobs: not those of output_ids")
    return tuple(logprob for logprob, _ in entries)


def _gaps(meta: Fields, num_tokens: int) -> tuple[float, ...]:
    places = meta.get("output_top_logprobs")
    if not isinstance(places, list) or len(places) != num_tokens:
        raise AnswerProblem(
            f"output_top_logprobs: expected {num_tokens} lists, got {short(places)}"
        )
    return tuple(gap([p for p, _ in _entries(v, "output_top_logprobs")]) for v in places)


def _entries(values: object, where: str) -> list[tuple[float, int]]:
    if not isinstance(values, list):
        raise AnswerProblem(f"{where}: expected a list, got {short(values)}")
    found = []
    for value in values:
        if not isinstance(value, list) or len(value) != 3 or type(value[1]) is not int:
            raise AnswerProblem(
                f"{where}: expected [log-probability, id, text], got {short(value)}"
            )
        found.append((number(value[0], where), value[1]))
    return found
