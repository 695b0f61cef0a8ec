"""SGLang's interface, spoken by a stand that really decodes a shipped pair: see tests/stand."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from draftquant.calibration.prompts.prompt_file import read_prompts
from draftquant.calibration.recording.decoding import Decoding
from draftquant.calibration.server_client import Event, Reply
from draftquant.recipes.errors import MeasureError, ServerError
from draftquant.validate.measure.measurement_file import read_measurement
from draftquant.validate.measure.measuring import Plan, ServerAddress, measure
from draftquant.validate.measure.server_answers import AnswerProblem, Completion, get_protocol
from draftquant.validate.measure.sglang_server import SGLangProtocol, read_answer
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
from stand.decoder import END, PAIRS, Decoder
from stand.server import Fault, Object, served
from stand.sglang import SGLangStand

__all__ = ["replayed"]  # a fixture
Change = Callable[[list[Object]], list[Object]]


@pytest.fixture
def decoder() -> Decoder:
    return shared_decoder()


@pytest.fixture
def stand(decoder: Decoder, one_thread: None) -> Iterator[SGLangStand]:
    del one_thread
    made = SGLangStand(decoder=decoder)
    with served(made):
        yield made


def refused(stand: SGLangStand, asked: Any = None) -> str:
    """The error that the first prompt ends in."""
    with pytest.raises((MeasureError, ServerError)) as caught:
        complete(SGLangProtocol(), stand.url, PROMPTS[:1], asked)
    return str(caught.value)


def finished(**fields: Any) -> Change:
    """Other fields in the meta_info of the last event; `...` = absent."""

    def change(events: list[Object]) -> list[Object]:
        meta = events[-1]["meta_info"] | fields
        events[-1]["meta_info"] = {k: v for k, v in meta.items() if v is not ...}
        return events

    return change


def test_a_server_says_who_it_is(stand: SGLangStand) -> None:
    identity, speculation = identify(SGLangProtocol(), stand.url)
    assert (identity.engine, identity.version, identity.model) == ("sglang", "0.5.23", "target")
    assert identity.arguments["dtype"] == "bfloat16"
    assert "a secret" not in str(identity)
    assert speculation is not None
    assert (speculation.num_draft_tokens, speculation.method) == (3, "EAGLE3")
    assert (speculation.draft, speculation.draft_quantization) == ("/models/draft", "fp8")
    assert speculation.lossy == ()
    assert SGLangProtocol().most_in_flight is None


@pytest.mark.parametrize("incremental", [False, True])
def test_counts_are_those_of_replay(
    stand: SGLangStand, replayed: Replayed, incremental: bool
) -> None:
    stand.incremental = incremental
    answers = complete(SGLangProtocol(), stand.url)
    for answer, token_ids, rounds in zip(answers, replayed.token_ids, replayed.rounds, strict=True):
        assert answer.token_ids == token_ids
        assert answer.accepted is not None
        assert answer.histogram is not None
        assert answer.accepted[: len(rounds)] == rounds
        # What replay leaves out begins at most K tokens before the end.
        left = answer.accepted[len(rounds) :]
        assert 1 + sum(rounds) + len(rounds) + 3 > len(token_ids)
        assert len(left) <= 3
        assert answer.histogram == tuple(answer.accepted.count(j) for j in range(4))
        assert answer.num_draft_tokens == 3
        assert answer.drafted is None
    assert {a.ended for a in answers} == {"length"}
    assert {"/metrics", "/model_info"}.isdisjoint(stand.got)


def test_a_block_draft_is_counted_alike(one_thread: None, tmp_path: Path) -> None:
    """DFlash: eight tokens are verified in a round, seven of which are drafted."""
    del one_thread
    prompts = read_prompts(PAIRS / "dflash" / "prompts.jsonl")[:2]
    by_replay = Replayed(tmp_path, "dflash", prompts, 7)
    made = SGLangStand(
        decoder=Decoder("dflash", num_draft_tokens=7),
        info={"speculative_algorithm": "DFLASH", "speculative_num_steps": 1},
    )
    with served(made):
        _, speculation = identify(SGLangProtocol(), made.url)
        answers = complete(SGLangProtocol(), made.url, prompts)
    assert speculation is not None
    assert (speculation.num_draft_tokens, speculation.method) == (7, "DFLASH")
    for answer, ids, rounds in zip(answers, by_replay.token_ids, by_replay.rounds, strict=True):
        assert answer.token_ids == ids
        assert answer.accepted is not None
        assert answer.accepted[: len(rounds)] == rounds
        assert len(rounds) > 3


def test_gauges_lie_and_are_not_read(stand: SGLangStand) -> None:
    first = complete(SGLangProtocol(), stand.url)
    second = complete(SGLangProtocol(), stand.url)
    pooled = 1 + sum(sum(a.accepted or ()) for a in first) / sum(
        len(a.accepted or ()) for a in first
    )
    told = stand.get("/server_info")["internal_states"][0]["avg_spec_accept_length"]  # type: ignore[index]
    assert abs(told - pooled) > 0.1, "the stand's average has to mislead"
    stand.restart()
    third = complete(SGLangProtocol(), stand.url)
    assert [a.histogram for a in first] == [a.histogram for a in second]
    assert [a.histogram for a in first] == [a.histogram for a in third]


def test_rounds_that_nobody_fetched_apart_are_counted_but_not_told_apart(
    stand: SGLangStand,
) -> None:
    apart = complete(SGLangProtocol(), stand.url)
    stand.fetched = 3
    together = complete(SGLangProtocol(), stand.url)
    assert [a.histogram for a in together] == [a.histogram for a in apart]
    assert [a.token_ids for a in together] == [a.token_ids for a in apart]
    assert {a.accepted for a in together} == {None}


def test_times_are_those_of_events(stand: SGLangStand) -> None:
    stand.faults[1] = Fault(seconds=0.05)
    (answer,) = complete(SGLangProtocol(), stand.url, PROMPTS[:1])
    assert answer.time_to_first_token is not None
    assert 0.05 <= answer.time_to_first_token <= answer.latency < 5
    assert answer.num_attempts == 1


def test_names_of_older_versions(stand: SGLangStand) -> None:
    new = complete(SGLangProtocol(), stand.url)
    stand.old_names = True
    old = complete(SGLangProtocol(), stand.url)
    assert [a.histogram for a in old] == [a.histogram for a in new]


def test_one_token_needs_no_round(stand: SGLangStand) -> None:
    (answer,) = complete(SGLangProtocol(), stand.url, PROMPTS[:1], ask(max_new_tokens=1))
    assert answer.histogram == (0, 0, 0, 0)
    assert answer.accepted == ()
    assert (answer.num_draft_tokens, len(answer.token_ids)) == (None, 1)


def test_an_answer_ends_at_the_end_of_text(
    stand: SGLangStand, monkeypatch: pytest.MonkeyPatch, decoder: Decoder
) -> None:
    """Whatever token stands fifth: the pair rarely writes its own end."""
    end = decoder.write(PROMPTS[0].token_ids, 8, ignore_eos=True).token_ids[4]
    monkeypatch.setattr("stand.decoder.END", end)
    (answer,) = complete(SGLangProtocol(), stand.url, PROMPTS[:1])
    assert answer.ended == "stop"
    assert answer.token_ids.index(end) == len(answer.token_ids) - 1
    (longer,) = complete(SGLangProtocol(), stand.url, PROMPTS[:1], ask(ignore_eos=True))
    assert (longer.ended, len(longer.token_ids)) == ("length", NUM_TOKENS)
    assert longer.token_ids[: len(answer.token_ids)] == answer.token_ids
    assert END == 0


def test_a_server_without_a_draft_has_no_rounds(stand: SGLangStand, replayed: Replayed) -> None:
    stand.drafts = False
    _, speculation = identify(SGLangProtocol(), stand.url)
    assert speculation is None
    answers = complete(SGLangProtocol(), stand.url)
    assert [a.token_ids for a in answers] == replayed.token_ids
    assert {(a.histogram, a.accepted, a.num_draft_tokens) for a in answers} == {(None, None, None)}


def test_logprobs_come_with_a_whole_answer(stand: SGLangStand, decoder: Decoder) -> None:
    asked = ask(decoding=Decoding(num_top_logprobs=2), max_new_tokens=8)
    (answer,) = complete(SGLangProtocol(), stand.url, PROMPTS[:1], asked)
    assert "stream" not in stand.asked[-1]
    assert answer.time_to_first_token is None
    logprobs = decoder.logprobs(PROMPTS[0].token_ids, answer.token_ids)
    top = logprobs.topk(2).values
    assert answer.token_logprob == pytest.approx(top[:, 0].tolist())
    assert answer.top_gap == pytest.approx((top[:, 0] - top[:, 1]).tolist())
    assert answer.histogram is not None
    assert answer.accepted is None


def test_logprobs_of_the_tokens_alone(stand: SGLangStand) -> None:
    asked = ask(decoding=Decoding(num_top_logprobs=1), max_new_tokens=8)
    (answer,) = complete(SGLangProtocol(), stand.url, PROMPTS[:1], asked)
    assert answer.token_logprob is not None
    assert answer.top_gap is None


def test_long_answers_are_not_repeated_in_every_event(stand: SGLangStand) -> None:
    protocol, asked = SGLangProtocol(), ask(max_new_tokens=5000)
    stand.faults = {1: Fault(status=400), 2: Fault(status=400)}
    with pytest.raises(ServerError, match="400 from /generate"):
        complete(protocol, stand.url, PROMPTS[:1], asked)
    stand.incremental = True
    with pytest.raises(ServerError, match="400 from /generate"):
        complete(protocol, stand.url, PROMPTS[:1], asked)
    assert [body.get("stream", False) for body in stand.asked] == [False, True]


def test_everything_that_changes_tokens_is_said(stand: SGLangStand) -> None:
    complete(SGLangProtocol(), stand.url, PROMPTS[:1])
    assert stand.asked[0] == {
        "input_ids": list(PROMPTS[0].token_ids),
        "stream": True,
        "sampling_params": {
            "max_new_tokens": NUM_TOKENS,
            "ignore_eos": False,
            "temperature": 0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_new_tokens": 0,
            "n": 1,
        },
    }


def test_draws_have_a_seed_of_the_prompt(stand: SGLangStand) -> None:
    asked = ask(decoding=Decoding(temperature=0.5, top_p=0.9, top_k=7))
    stand.faults = {1: Fault(status=400)}  # the stand decodes greedily
    refused(stand, asked)
    sampling = stand.asked[0]["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.5, 0.9, 7)
    assert 0 <= sampling["sampling_seed"] < 2**60
    assert "return_logprob" not in stand.asked[0]


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"speculative_accept_threshold_single": 0.9}, ["accept_threshold_single = 0.9"]),
        ({"speculative_accept_threshold_acc": 0.5}, ["accept_threshold_acc = 0.5"]),
        (
            {"internal_states": [{"env_vars": {"SGLANG_SIMULATE_ACC_LEN": "3.5"}}, 7]},
            ["SGLANG_SIMULATE_ACC_LEN = '3.5'"],
        ),
        ({"internal_states": None, "speculative_accept_threshold_acc": 1}, []),
    ],
)
def test_lossy_settings_are_told(stand: SGLangStand, info: Object, told: list[str]) -> None:
    stand.info = info
    _, speculation = identify(SGLangProtocol(), stand.url)
    assert speculation is not None
    assert [name.removeprefix("speculative_") for name in speculation.lossy] == told


@pytest.mark.parametrize(
    ("info", "what"),
    [
        ({"version": None}, "its /server_info is not SGLang's: it has no version"),
        ({"speculative_eagle_topk": 4}, "it drafts trees (speculative_eagle_topk = 4)"),
        ({"speculative_adaptive": True}, "it changes the number of drafted tokens"),
        (
            {"speculative_num_draft_tokens": 1},
            "speculative_num_draft_tokens - 1: expected 1 to 1,024 drafted tokens, got 0",
        ),
        ({"speculative_num_draft_tokens": 10**9}, "expected 1 to 1,024 drafted tokens"),
        ({"speculative_draft_model_path": "a\x1b[2J"}, "speculative_draft_model_path: expected"),
        ({"speculative_algorithm": 3}, "speculative_algorithm: expected text, got 3"),
        ({"served_model_name": ""}, "served_model_name: expected text, got ''"),
        (
            {"speculative_accept_threshold_acc": "1"},
            "speculative_accept_threshold_acc: expected a number, got '1'",
        ),
    ],
)
def test_servers_that_cannot_be_measured(stand: SGLangStand, info: Object, what: str) -> None:
    stand.info = info
    with pytest.raises(MeasureError) as caught:
        identify(SGLangProtocol(), stand.url)
    assert what in str(caught.value)
    assert stand.url in str(caught.value)


@pytest.mark.parametrize(
    ("info", "refuses"),
    [
        ({"device": "cpu"}, True),
        ({"device": "xpu"}, True),
        ({"attention_backend": "aiter"}, True),
        ({"attention_backend": "aiter", "speculative_use_rejection_sampling": True}, False),
        ({}, False),
    ],
)
def test_draws_are_not_measured_where_verification_is_greedy(
    stand: SGLangStand, info: Object, refuses: bool
) -> None:
    stand.info = info
    problem = refused(stand, ask(decoding=Decoding(temperature=1)))
    assert ("verifies greedily at any temperature" in problem) is refuses
    assert ("this stand decodes greedily" in problem) is not refuses
    (answer,) = complete(SGLangProtocol(), stand.url, PROMPTS[:1])
    assert answer.histogram is not None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            finished(spec_correct_drafts_histogram=...),
            "the server drafts, but its answer has no spec_correct_drafts_histogram",
        ),
        (finished(spec_verify_ct=9999), "spec_verify_ct: 9999, but spec_correct_drafts_histogram"),
        (finished(spec_num_correct_drafts=-1), "spec_num_correct_drafts: expected a whole number"),
        (finished(spec_num_correct_drafts=...), "spec_num_correct_drafts: expected a whole number"),
        (finished(spec_num_proposed_drafts=1), "spec_num_proposed_drafts: 1, but"),
        (finished(spec_correct_drafts_histogram="9"), "expected a list of whole numbers"),
        (finished(completion_tokens=31), "completion_tokens: 31, but"),
        (finished(completion_tokens=None), "completion_tokens: expected a whole number >= 1"),
        (finished(finish_reason=None), "finish_reason: expected stop or length, got None"),
        (finished(finish_reason={"type": "odd"}), "expected stop or length, got {'type': 'odd'}"),
        (
            finished(finish_reason={"type": "abort", "message": "Aborted", "status_code": None}),
            "the server gave up: 'Aborted'",
        ),
        (lambda _events: [], "its stream has no event"),
        (lambda events: [*events[:-1], {"text": ""}], "meta_info: expected an object, got None"),
        (
            lambda events: [*events[:-1], events[-1] | {"output_ids": [1, "a"]}],
            "output_ids: expected a list of whole numbers >= 0",
        ),
    ],
)
def test_answers_that_are_not_the_engines(stand: SGLangStand, change: Change, what: str) -> None:
    stand.change = change
    problem = refused(stand)
    assert what in problem
    assert f"{stand.url}: prompt {PROMPTS[0].id}" in problem


def test_counts_that_cannot_have_written_the_tokens(stand: SGLangStand) -> None:
    """As of a server that counts what ran for a request after its end."""

    def with_dead_rounds(events: list[Object]) -> list[Object]:
        meta = events[-1]["meta_info"]
        histogram = meta["spec_correct_drafts_histogram"]
        rounds = meta["spec_verify_ct"] + 5
        return finished(
            spec_correct_drafts_histogram=[histogram[0] + 5, *histogram[1:]],
            spec_verify_ct=rounds,
            spec_num_proposed_drafts=3 * rounds,
        )(events)

    stand.change = with_dead_rounds
    assert f"cannot have written {NUM_TOKENS} tokens" in refused(stand)


def test_a_request_that_was_put_back_writes_a_token_without_a_round(stand: SGLangStand) -> None:
    """It reads its tokens again, as a prompt."""

    def one_fewer(events: list[Object]) -> list[Object]:
        """Rounds that wrote one token less than came."""
        meta = events[-1]["meta_info"]
        rounds = meta["spec_verify_ct"]
        fewer = NUM_TOKENS - 2 - rounds
        threes, rest = divmod(fewer, 3)
        histogram = [rounds - threes - (rest > 0), 0, 0, threes]
        histogram[rest] += rest > 0
        changed = finished(spec_correct_drafts_histogram=histogram, spec_num_correct_drafts=fewer)
        return changed(events)

    stand.change = one_fewer
    assert f"cannot have written {NUM_TOKENS} tokens" in refused(stand)
    stand.change = lambda events: finished(num_retractions=1)(one_fewer(events))
    (answer,) = complete(SGLangProtocol(), stand.url, PROMPTS[:1])
    assert answer.histogram is not None
    assert answer.accepted is None


def test_an_answer_that_the_context_cut_off(stand: SGLangStand) -> None:
    def cut(events: list[Object]) -> list[Object]:
        events[-1]["output_ids"].pop()
        return finished(completion_tokens=NUM_TOKENS - 1)(events)

    stand.change = cut
    assert f"its answer was cut off after {NUM_TOKENS - 1} of {NUM_TOKENS} tokens" in refused(stand)


def test_an_answer_that_is_longer_than_asked(stand: SGLangStand) -> None:
    def longer(events: list[Object]) -> list[Object]:
        events[-1]["output_ids"].append(7)
        return finished(completion_tokens=NUM_TOKENS + 1)(events)

    stand.change = longer
    assert f"output_ids: {NUM_TOKENS + 1}, but {NUM_TOKENS} were asked for" in refused(stand)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (finished(output_token_logprobs=...), "output_token_logprobs: expected a list, got None"),
        (finished(output_token_logprobs=[[-0.5, 3, None]]), "not those of output_ids"),
        (finished(output_token_logprobs=[[None, 3, None]]), "expected a number, got None"),
        (finished(output_token_logprobs=[[-0.5, 3]]), "expected [log-probability, id, text]"),
        (finished(output_token_logprobs=[[-0.5, True, None]]), "expected [log-probability, id, te"),
        (finished(output_top_logprobs=[]), "output_top_logprobs: expected 8 lists, got []"),
        (
            finished(output_top_logprobs=[None] * 8),
            "output_top_logprobs: expected a list, got None",
        ),
        (
            finished(output_top_logprobs=[[[-0.5, 3, None]]] * 8),
            "expected at least 2 most likely tokens, got 1",
        ),
    ],
)
def test_logprobs_that_are_not_the_answers(stand: SGLangStand, change: Change, what: str) -> None:
    stand.change = change
    asked = ask(decoding=Decoding(num_top_logprobs=2), max_new_tokens=8)
    assert what in refused(stand, asked)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=429, headers={"Retry-After": "0"}),
        Fault(status=500),
        Fault(status=503),
        Fault(status=0),
        Fault(events=3),
        Fault(events=0),
        Fault(text="data: {half\n\n"),
    ],
)
def test_a_server_that_fails_is_asked_again(stand: SGLangStand, fault: Fault) -> None:
    (whole,) = complete(SGLangProtocol(), stand.url, PROMPTS[:1])
    stand.faults = {2: fault, 3: fault}
    (answer,) = complete(SGLangProtocol(), stand.url, PROMPTS[:1])
    assert (answer.histogram, answer.num_attempts) == (whole.histogram, 3)
    stand.faults = {n: fault for n in range(1, 99)}
    assert "no answer after 3 attempt(s)" in refused(stand)


@pytest.mark.parametrize(
    "event",
    [
        {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "finish_reason": {
                    "type": "abort",
                    "message": "The request queue is full.",
                    "status_code": 503,
                    "err_type": None,
                }
            },
        },
        {"error": {"message": "busy", "code": 503, "retryable": True}},
    ],
)
def test_an_abort_inside_a_stream_is_asked_again(stand: SGLangStand, event: Object) -> None:
    def abort(events: list[Object]) -> list[Object]:
        return [event] if len(stand.asked) < 3 else events

    stand.change = abort
    (answer,) = complete(SGLangProtocol(), stand.url, PROMPTS[:1])
    assert answer.num_attempts == 3
    stand.change = lambda _events: [event]
    assert "no answer after 3 attempt(s): " in refused(stand)


def test_an_error_inside_a_stream_is_a_refusal(stand: SGLangStand) -> None:
    stand.change = lambda _events: [{"error": {"message": "too long", "code": 400}}]
    assert "its answer to /generate ends with {'code': 400, 'message': 'too long'}" in refused(
        stand
    )
    assert len(stand.asked) == 1


def test_a_slow_server_is_given_up(stand: SGLangStand) -> None:
    stand.faults = {n: Fault(seconds=20) for n in range(1, 9)}
    patience = dataclasses.replace(IMPATIENT, attempts=2, seconds=0.1)
    with pytest.raises(ServerError, match=r"no whole answer within 0\.1 seconds"):
        complete(SGLangProtocol(), stand.url, PROMPTS[:1], patience=patience)


def test_another_engine_answers(stand: SGLangStand, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_path: str) -> object:
        raise KeyError

    monkeypatch.setattr(stand, "get", missing)
    with pytest.raises(ServerError, match="404 from /server_info"):
        identify(SGLangProtocol(), stand.url)


def test_a_run_goes_through_a_storm(stand: SGLangStand, replayed: Replayed, tmp_path: Path) -> None:
    """Refused, cut off and killed between other answers: nothing is lost, nothing counted twice."""
    storm = (Fault(status=429), Fault(status=500), Fault(status=0), Fault(events=2))
    stand.faults = {2 * n + 3: fault for n, fault in enumerate(storm)}
    address = ServerAddress(url=stand.url, patience=IMPATIENT)
    plan = Plan(prompts=PROMPTS, ask=ask(), concurrency=3, num_warm_up=1)
    taken = measure(tmp_path / "run.jsonl", address, get_protocol("sglang"), plan)
    assert len(stand.asked) == len(PROMPTS) + plan.num_warm_up + len(storm)
    assert read_measurement(tmp_path / "run.jsonl").records == taken.records
    for record, token_ids, rounds in zip(
        taken.records, replayed.token_ids, replayed.rounds, strict=True
    ):
        assert record.token_ids == token_ids
        assert record.accepted is not None
        assert record.accepted[: len(rounds)] == rounds


def test_a_server_that_is_started_otherwise_meanwhile(stand: SGLangStand, tmp_path: Path) -> None:
    def other_k(_body: list[Object]) -> list[Object]:
        stand.info = {"speculative_num_draft_tokens": 9}
        return _body

    stand.change = other_k
    plan = Plan(prompts=PROMPTS[:2], ask=ask())
    address = ServerAddress(url=stand.url, patience=IMPATIENT)
    with pytest.raises(MeasureError, match="was changed while it was measured"):
        measure(tmp_path / "run.jsonl", address, get_protocol("sglang"), plan)
    assert not (tmp_path / "run.jsonl").exists()


def test_no_value_breaks_the_reader(stand: SGLangStand) -> None:
    """Every field of a stream's events in turn, with every kind of value."""
    body = {
        "input_ids": list(PROMPTS[0].token_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    asked = ask(max_new_tokens=8, decoding=Decoding(num_top_logprobs=2))
    good = [Event(0.1 * i, event) for i, event in enumerate(stand.post("/generate", body), 1)]

    def read(events: Sequence[Event]) -> Completion:
        reply = Reply(events=tuple(events), num_attempts=1)
        return read_answer(reply, asked, 3, "here", streamed=True)

    assert read(good).accepted is not None
    for events in broken(good):
        with suppress(AnswerProblem, MeasureError):
            assert record_of(read(events)) is not None
