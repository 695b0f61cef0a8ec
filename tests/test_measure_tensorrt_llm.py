"""TensorRT-LLM's interface, spoken by a stand that really decodes: see tests/stand."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from draftquant.calibration.recording.decoding import Decoding
from draftquant.calibration.server_client import Event, Reply
from draftquant.recipes.errors import MeasureError, ServerError
from draftquant.validate.measure.measurement import record_problem
from draftquant.validate.measure.measurement_file import read_measurement
from draftquant.validate.measure.measuring import Plan, ServerAddress, measure
from draftquant.validate.measure.server_answers import AnswerProblem, Completion, get_protocol
from draftquant.validate.measure.tensorrt_llm_server import TensorRTLLMProtocol, read_answer
from stand.asking import (
    IMPATIENT,
    NUM_TOKENS,
    PROMPTS,
    Replayed,
    ask,
    broken,
    complete,
    identify,
    record_of,
    replayed,
    shared_decoder,
)
from stand.decoder import Decoder
from stand.server import Fault, Object, served
from stand.tensorrt_llm import TensorRTLLMStand

__all__ = ["replayed"]  # a fixture
Change = Callable[[list[Object]], list[Object]]
PROBE = 1  # POST requests of `identify` where K is seen in iterations


@pytest.fixture
def decoder() -> Decoder:
    return shared_decoder()


@pytest.fixture
def stand(decoder: Decoder, one_thread: None) -> Iterator[TensorRTLLMStand]:
    del one_thread
    made = TensorRTLLMStand(decoder=decoder)
    with served(made):
        yield made


def refused(stand: TensorRTLLMStand, asked: Any = None) -> str:
    """The error that the first prompt ends in."""
    with pytest.raises((MeasureError, ServerError)) as caught:
        complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1], asked)
    return str(caught.value)


def choices(number: int, **fields: Any) -> Change:
    """Other fields in the choice of one event; `...` = absent. The last holds the usage."""

    def change(events: list[Object]) -> list[Object]:
        (choice,) = events[number]["choices"]
        changed = {k: v for k, v in (choice | fields).items() if v is not ...}
        events[number]["choices"] = [changed]
        return events

    return change


def known(rounds: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Those at whose beginning four tokens stood still to be written, for K = 3."""
    begins = [1 + sum(rounds[:i]) + i for i in range(len(rounds))]
    return tuple(a for a, begin in zip(rounds, begins, strict=True) if begin + 4 <= num_tokens)


def test_a_server_says_who_it_is(stand: TensorRTLLMStand) -> None:
    identity, speculation = identify(TensorRTLLMProtocol(), stand.url)
    assert (identity.engine, identity.version) == ("tensorrt-llm", "1.3.0")
    assert identity.model == "target"
    assert identity.arguments["model.dtype"] == "bfloat16"
    assert identity.arguments["parallel.gpu_count"] == "1"
    assert speculation is not None
    assert (speculation.num_draft_tokens, speculation.method) == (3, "Eagle3")
    assert (speculation.draft, speculation.draft_quantization) == ("/models/draft", None)
    assert speculation.lossy == ()
    assert stand.asked == []
    assert TensorRTLLMProtocol().most_in_flight is None


def test_an_older_server_lets_see_how_many_tokens_it_drafts(stand: TensorRTLLMStand) -> None:
    stand.config_info = False
    identity, speculation = identify(TensorRTLLMProtocol(), stand.url)
    assert identity.arguments == {}
    assert speculation is not None
    assert (speculation.num_draft_tokens, speculation.method) == (3, None)
    assert len(stand.asked) == PROBE
    assert stand.asked[0]["ignore_eos"] is True


@pytest.mark.parametrize("config_info", [True, False])
def test_counts_are_those_of_replay(
    stand: TensorRTLLMStand, replayed: Replayed, config_info: bool
) -> None:
    stand.config_info = config_info
    answers = complete(TensorRTLLMProtocol(), stand.url)
    for answer, token_ids, rounds in zip(answers, replayed.token_ids, replayed.rounds, strict=True):
        assert answer.token_ids == token_ids
        # Replay knows one round more where exactly K tokens were left.
        assert answer.accepted == known(rounds, len(token_ids))
        assert len(rounds) - len(answer.accepted) <= 1
        assert 0 <= answer.num_cut_rounds <= 3
        assert answer.histogram == tuple(answer.accepted.count(j) for j in range(4))
        assert (answer.drafted, answer.num_draft_tokens) == (None, None)
    assert {a.ended for a in answers} == {"length"}
    assert "/perf_metrics" not in stand.got


def test_sums_of_the_engine_contain_the_rounds(stand: TensorRTLLMStand) -> None:
    """What it counts besides: the rounds that are left out here, cut or not."""
    (answer,) = complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1])
    sums = stand.performed[0]["perf_metrics"]["speculative_decoding"]
    assert answer.accepted is not None
    left = sums["total_draft_tokens"] - 3 * len(answer.accepted)
    assert 0 <= sums["total_accepted_draft_tokens"] - sum(answer.accepted) <= left <= 3 * 4


def test_others_read_the_metrics_and_the_server_starts_again(stand: TensorRTLLMStand) -> None:
    first = complete(TensorRTLLMProtocol(), stand.url)
    stand.get("/perf_metrics")
    stand.get("/metrics")
    stand.restart()
    second = complete(TensorRTLLMProtocol(), stand.url)
    assert [a.histogram for a in first] == [a.histogram for a in second]


def test_times_are_those_of_events(stand: TensorRTLLMStand) -> None:
    stand.faults[1] = Fault(seconds=0.05)
    (answer,) = complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1])
    assert answer.time_to_first_token is not None
    assert 0.05 <= answer.time_to_first_token <= answer.latency < 5
    assert answer.num_attempts == 1


def test_one_token_needs_no_round(stand: TensorRTLLMStand) -> None:
    (answer,) = complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1], ask(max_new_tokens=1))
    assert (answer.histogram, answer.accepted) == ((0, 0, 0, 0), ())
    assert len(answer.token_ids) == 1


@pytest.mark.parametrize("keeps_stop", [True, False])
def test_an_answer_ends_at_the_end_of_text(
    stand: TensorRTLLMStand, monkeypatch: pytest.MonkeyPatch, decoder: Decoder, keeps_stop: bool
) -> None:
    """Whatever token stands twentieth: the pair rarely writes its own end."""
    stand.keeps_stop = keeps_stop
    text = decoder.write(PROMPTS[0].token_ids, NUM_TOKENS, ignore_eos=True).token_ids
    end = next(t for t in text[12:] if text.index(t) > 11)
    monkeypatch.setattr("stand.decoder.END", end)
    (answer,) = complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1])
    assert answer.ended == "stop"
    assert answer.token_ids == text[: text.index(end) + keeps_stop]
    (longer,) = complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1], ask(ignore_eos=True))
    assert (longer.ended, longer.token_ids) == ("length", text)
    assert answer.accepted
    assert longer.accepted is not None
    assert longer.accepted[: len(answer.accepted)] == answer.accepted


@pytest.mark.parametrize("config_info", [True, False])
def test_a_server_without_a_draft_has_no_rounds(
    stand: TensorRTLLMStand, replayed: Replayed, config_info: bool
) -> None:
    stand.drafts, stand.config_info = False, config_info
    _, speculation = identify(TensorRTLLMProtocol(), stand.url)
    assert speculation is None
    answers = complete(TensorRTLLMProtocol(), stand.url)
    assert [a.token_ids for a in answers] == replayed.token_ids
    assert {(a.histogram, a.accepted) for a in answers} == {(None, None)}


def test_logprobs_of_a_server_without_a_draft(stand: TensorRTLLMStand, decoder: Decoder) -> None:
    stand.drafts = False
    asked = ask(decoding=Decoding(num_top_logprobs=2), max_new_tokens=8)
    (answer,) = complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1], asked)
    assert stand.asked[-1]["logprobs"] == 2
    top = decoder.logprobs(PROMPTS[0].token_ids, answer.token_ids).topk(2).values
    assert answer.token_logprob == pytest.approx(top[:, 0].tolist())
    assert answer.top_gap == pytest.approx((top[:, 0] - top[:, 1]).tolist())
    asked = ask(decoding=Decoding(num_top_logprobs=1), max_new_tokens=8)
    (answer,) = complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1], asked)
    assert stand.asked[-1]["logprobs"] == 1
    assert (answer.token_logprob is None, answer.top_gap) == (False, None)


def test_logprobs_are_not_kept_while_drafting(stand: TensorRTLLMStand) -> None:
    problem = refused(stand, ask(decoding=Decoding(num_top_logprobs=1)))
    assert "TensorRT-LLM keeps no log-probabilities while it drafts" in problem
    assert stand.asked == []


def test_everything_that_changes_tokens_is_said(stand: TensorRTLLMStand) -> None:
    complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1])
    assert stand.asked[0] == {
        "model": "target",
        "prompt": list(PROMPTS[0].token_ids),
        "max_tokens": NUM_TOKENS,
        "ignore_eos": False,
        "temperature": 0,
        "top_p": 1.0,
        "top_k": 1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "n": 1,
        "detokenize": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_draws_have_a_seed_of_the_prompt(stand: TensorRTLLMStand) -> None:
    asked = ask(decoding=Decoding(temperature=0.5, top_p=0.9, top_k=7))
    assert "this stand decodes greedily" in refused(stand, asked)
    body = stand.asked[0]
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.5, 0.9, 7)
    assert 0 <= body["seed"] < 2**60
    assert "logprobs" not in body


def test_rounds_that_come_together_are_refused(stand: TensorRTLLMStand) -> None:
    stand.stream_interval = 2
    problem = refused(stand)
    assert "one event of its stream tells of 2 rounds together" in problem
    assert "fix: start it with `stream_interval: 1`, the default" in problem


def test_a_server_whose_metrics_are_off(stand: TensorRTLLMStand) -> None:
    stand.config_info = stand.iteration_stats = False
    with pytest.raises(MeasureError, match="its metrics are off") as caught:
        identify(TensorRTLLMProtocol(), stand.url)
    assert "enable_iter_perf_stats: true" in str(caught.value)
    assert stand.got.count("/metrics") == 3


def test_a_server_that_drafts_without_statistics_of_it(
    stand: TensorRTLLMStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tokens in a step, but no iteration says that tokens were drafted."""
    stand.config_info = False
    monkeypatch.setattr(stand, "_specdec", lambda _accepted: None)
    with pytest.raises(MeasureError, match="it does not tell whether it drafts"):
        identify(TensorRTLLMProtocol(), stand.url)


@pytest.mark.parametrize(
    ("path", "answer", "what"),
    [
        ("/v1/models", {"data": [{"id": "m", "owned_by": "vllm"}]}, "not owned by tensorrt_llm"),
        ("/v1/models", {"data": []}, "not owned by tensorrt_llm"),
        ("/v1/models", {"data": 3}, "data: expected a list of objects, got 3"),
        ("/v1/models", {"data": [{"owned_by": "tensorrt_llm"}]}, "id: expected text, got None"),
        ("/version", {}, "version: expected text, got None"),
        ("/metrics", "nothing", "/metrics: not JSON"),
        ("/metrics", "[3]", "/metrics: expected a list of objects, got [3]"),
        ("/metrics", '[{"specDecodingStats": 3}]', "specDecodingStats: expected an object"),
        (
            "/metrics",
            '[{"specDecodingStats": {"numDraftTokens": 3, "numRequestsWithDraftTokens": 0}}]',
            "numRequestsWithDraftTokens: expected a whole number >= 1, got 0",
        ),
    ],
)
def test_servers_that_are_not_the_engines(
    stand: TensorRTLLMStand, monkeypatch: pytest.MonkeyPatch, path: str, answer: object, what: str
) -> None:
    stand.config_info, get = False, stand.get
    monkeypatch.setattr(stand, "get", lambda asked: answer if asked == path else get(asked))
    with pytest.raises(MeasureError) as caught:
        identify(TensorRTLLMProtocol(), stand.url)
    assert what in str(caught.value)
    assert stand.url in str(caught.value)


@pytest.mark.parametrize("told", [None, "", "three", "-3", "10000", "٣"])
def test_a_number_of_drafted_tokens_that_is_none(stand: TensorRTLLMStand, told: str | None) -> None:
    stand.labels = {"spec_num_tokens": told}
    with pytest.raises(MeasureError, match="spec_num_tokens: expected a number of tokens"):
        identify(TensorRTLLMProtocol(), stand.url)


@pytest.mark.parametrize("told", ["0", "1025"])
def test_a_number_that_nobody_drafts(stand: TensorRTLLMStand, told: str) -> None:
    stand.labels = {"spec_num_tokens": told}
    with pytest.raises(MeasureError, match="expected 1 to 1,024 drafted tokens"):
        identify(TensorRTLLMProtocol(), stand.url)


def test_labels_may_hold_anything(stand: TensorRTLLMStand) -> None:
    stand.labels = {"spec_draft_model": r"/models/{a} \"b\", c"}
    _, speculation = identify(TensorRTLLMProtocol(), stand.url)
    assert speculation is not None
    assert speculation.num_draft_tokens == 3


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            choices(2, avg_decoded_tokens_per_iter=None),
            "avg_decoded_tokens_per_iter: expected a number, got None",
        ),
        (choices(2, avg_decoded_tokens_per_iter=1.234), "1.234 is no average of"),
        (choices(2, avg_decoded_tokens_per_iter=0), "0.0 is no average of"),
        (choices(2, avg_decoded_tokens_per_iter=1e-320), "is no average of"),
        (choices(2, avg_decoded_tokens_per_iter=-1), "-1.0 is no average of"),
        (choices(2, token_ids=None), "token_ids: expected a list of whole numbers >= 0, got None"),
        (choices(-2, finish_reason=None), "finish_reason: expected stop or length, got None"),
        (choices(-2, finish_reason="odd"), "finish_reason: expected stop or length, got 'odd'"),
        (lambda events: events[-1:], "completion_tokens: 32, but 0 token_ids came"),
        (lambda events: [events[0], events[-1]], "completion_tokens: 32, but 1 token_ids came"),
        (lambda _events: [], "its stream has no token"),
        (lambda events: [*events, {"choices": []}], "usage: expected an object, got None"),
        (lambda _events: [{"choices": "?"}], "choices: expected a list of objects, got '?'"),
    ],
)
def test_answers_that_are_not_the_engines(
    stand: TensorRTLLMStand, change: Change, what: str
) -> None:
    stand.change = change
    problem = refused(stand)
    assert what in problem
    assert f"{stand.url}: prompt {PROMPTS[0].id}" in problem


def test_steps_that_are_larger_than_rounds(stand: TensorRTLLMStand) -> None:
    """It told of fewer drafted tokens than it drafts, or of none."""
    stand.labels = {"spec_num_tokens": "2"}
    assert "expected 1, then at most 3 each" in refused(stand)


def test_an_answer_that_the_context_cut_off(stand: TensorRTLLMStand) -> None:
    asked = ask(max_new_tokens=NUM_TOKENS - 5)
    events: list[Object] = []

    def keep(made: list[Object]) -> list[Object]:
        events[:] = made
        return made

    stand.change = keep
    complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1], asked)
    stand.change = lambda _events: list(events)
    assert f"cut off after {NUM_TOKENS - 5} of {NUM_TOKENS} tokens" in refused(stand)
    problem = refused(stand, dataclasses.replace(asked, max_new_tokens=3))
    assert f"token_ids: {NUM_TOKENS - 5}, but 3 were asked for" in problem


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"logprobs": None}, "token_logprobs: expected 1 values, got None"),
        ({"logprobs": {"token_logprobs": []}}, "token_logprobs: expected 1 values, got []"),
        ({"logprobs": {"token_logprobs": ["?"]}}, "token_logprobs: expected a number, got '?'"),
        (
            {"logprobs": {"token_logprobs": [-1.5], "top_logprobs": [None]}},
            "top_logprobs: expected objects, got None",
        ),
        (
            {"logprobs": {"token_logprobs": [-1.5], "top_logprobs": [{"a": -1.5}]}},
            "expected at least 2 most likely tokens, got 1",
        ),
    ],
)
def test_logprobs_that_are_not_the_answers(
    stand: TensorRTLLMStand, fields: Object, what: str
) -> None:
    stand.drafts, stand.change = False, choices(3, **fields)
    asked = ask(decoding=Decoding(num_top_logprobs=2), max_new_tokens=8)
    assert what in refused(stand, asked)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=429, headers={"Retry-After": "0"}),
        Fault(status=500),
        Fault(status=0),
        Fault(events=3),
        Fault(text="data: {half\n\n"),
    ],
)
def test_a_server_that_fails_is_asked_again(stand: TensorRTLLMStand, fault: Fault) -> None:
    (whole,) = complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1])
    stand.faults = {2: fault, 3: fault}
    (answer,) = complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1])
    assert (answer.histogram, answer.num_attempts) == (whole.histogram, 3)
    stand.faults = {n: fault for n in range(1, 99)}
    assert "no answer after 3 attempt(s)" in refused(stand)


@pytest.mark.parametrize("reason", ["timeout", "cancelled"])
def test_an_answer_that_was_given_up_is_asked_for_again(
    stand: TensorRTLLMStand, reason: str
) -> None:
    give_up = choices(-2, finish_reason=reason)
    stand.change = lambda events: give_up(events) if len(stand.asked) < 3 else events
    (answer,) = complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1])
    assert answer.num_attempts == 3
    stand.change = give_up
    assert f"its answer to /v1/completions ended by {reason}" in refused(stand)


def test_a_slow_server_is_given_up(stand: TensorRTLLMStand) -> None:
    stand.faults = {n: Fault(seconds=20) for n in range(1, 9)}
    patience = dataclasses.replace(IMPATIENT, attempts=2, seconds=0.1)
    with pytest.raises(ServerError, match=r"no whole answer within 0\.1 seconds"):
        complete(TensorRTLLMProtocol(), stand.url, PROMPTS[:1], patience=patience)


def test_a_refusal_is_quoted(stand: TensorRTLLMStand) -> None:
    stand.faults = {1: Fault(status=400)}
    assert "400 from /v1/completions" in refused(stand)


def test_a_run_goes_through_a_storm(
    stand: TensorRTLLMStand, replayed: Replayed, tmp_path: Path
) -> None:
    """Refused, cut off and killed between other answers: nothing is lost, nothing counted twice."""
    storm = (Fault(status=429), Fault(status=500), Fault(status=0), Fault(events=2))
    stand.faults = {2 * n + 3: fault for n, fault in enumerate(storm)}
    address = ServerAddress(url=stand.url, patience=IMPATIENT)
    plan = Plan(prompts=PROMPTS, ask=ask(), concurrency=3, num_warm_up=1)
    taken = measure(tmp_path / "run.jsonl", address, get_protocol("tensorrt-llm"), plan)
    assert len(stand.asked) == len(PROMPTS) + plan.num_warm_up + len(storm)
    assert read_measurement(tmp_path / "run.jsonl").records == taken.records
    for record, token_ids, rounds in zip(
        taken.records, replayed.token_ids, replayed.rounds, strict=True
    ):
        assert record.token_ids == token_ids
        assert record.accepted is not None
        assert record.accepted == known(rounds, NUM_TOKENS)
        written = 1 + sum(record.accepted) + len(record.accepted)
        assert (written < len(token_ids)) is (record.num_cut_rounds > 0)
        assert len(token_ids) - written <= 3
    for number in (-1, 4):
        cut = dataclasses.replace(taken.records[0], num_cut_rounds=number)
        problem = record_problem(cut, taken.setup)
        assert problem == f"num_cut_rounds: expected 0 to K, got {number}"


def test_a_server_that_is_started_otherwise_meanwhile(
    stand: TensorRTLLMStand, tmp_path: Path
) -> None:
    def other_k(_body: list[Object]) -> list[Object]:
        stand.labels = {"spec_num_tokens": "9"}
        return _body

    stand.change = other_k
    plan = Plan(prompts=PROMPTS[:2], ask=ask())
    address = ServerAddress(url=stand.url, patience=IMPATIENT)
    with pytest.raises(MeasureError, match="was changed while it was measured"):
        measure(tmp_path / "run.jsonl", address, get_protocol("tensorrt-llm"), plan)
    assert not (tmp_path / "run.jsonl").exists()


def test_no_value_breaks_the_reader(stand: TensorRTLLMStand) -> None:
    """Every field of a stream's events in turn, with every kind of value."""
    body = {
        "prompt": list(PROMPTS[0].token_ids),
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0,
        "detokenize": False,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 2,
    }
    asked = ask(max_new_tokens=8, decoding=Decoding(num_top_logprobs=2))
    made = stand.post("/v1/completions", body)
    good = [Event(0.1 * i, event) for i, event in enumerate(made, 1)]

    def read(events: Sequence[Event]) -> Completion:
        return read_answer(Reply(events=tuple(events), num_attempts=1), asked, 3, "here")

    assert read(good).accepted is not None
    for events in broken(good):
        with suppress(AnswerProblem, MeasureError):
            assert record_of(read(events)) is not None
