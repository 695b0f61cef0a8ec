"""SGLang and TensorRT-LLM, spoken by stands that really decode a shipped pair: see tests/stand."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from draftquant.calibration.recording.decoding import Decoding
from draftquant.calibration.server_client import Event, Reply
from draftquant.recipes.errors import MeasureError, ServerError
from draftquant.validate.measure import sglang_server, tensorrt_llm_server
from draftquant.validate.measure.measurement import record_problem
from draftquant.validate.measure.measurement_file import read_measurement
from draftquant.validate.measure.measuring import MeasurePlan, ServerAddress, measure
from draftquant.validate.measure.server_answers import AnswerProblem, get_protocol
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
from stand.server import Fault, Object, Stand, served
from stand.sglang import SGLangStand
from stand.tensorrt_llm import TensorRTLLMStand

__all__ = ["replayed"]  # a fixture
Change = Callable[[list[Object]], list[Object]]
Setting = dict[str, Any]
FIRST = PROMPTS[:1]
TOP_2 = ask(decoding=Decoding(num_top_logprobs=2), max_new_tokens=8)


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    """Replay and decoder compute alike."""


@pytest.fixture
def sglang() -> Iterator[SGLangStand]:
    with served(SGLangStand(decoder=shared_decoder())) as found:
        assert isinstance(found, SGLangStand)
        yield found


@pytest.fixture
def trtllm() -> Iterator[TensorRTLLMStand]:
    with served(TensorRTLLMStand(decoder=shared_decoder())) as found:
        assert isinstance(found, TensorRTLLMStand)
        yield found


Engine = SGLangStand | TensorRTLLMStand


@pytest.fixture(params=["sglang", "trtllm"])
def stand(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


def refused(stand: Stand, asked: Any = None) -> str:
    """The error that the first prompt ends in."""
    with pytest.raises((MeasureError, ServerError)) as caught:
        complete(stand, FIRST, asked)
    return str(caught.value)


def known(stand: Stand, rounds: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """TensorRT-LLM's: at whose beginning four tokens stood still to be written, for K = 3."""
    begins = [1 + sum(rounds[:i]) + i for i in range(len(rounds))]
    least = 4 if stand.engine == "tensorrt-llm" else 0
    return tuple(a for a, begin in zip(rounds, begins, strict=True) if begin + least <= num_tokens)


# ---- both engines


def test_a_server_says_who_it_is(stand: Engine) -> None:
    assert "a secret" not in str(identify(stand))
    assert stand.asked == []
    assert get_protocol(stand.engine).most_in_flight is None


@pytest.mark.parametrize("usual", [True, False])
def test_counts_are_those_of_replay(stand: Engine, replayed: Replayed, usual: bool) -> None:
    """Whether an SGLang repeats all in every event, and whether a TensorRT-LLM tells its K."""
    if isinstance(stand, SGLangStand):
        stand.incremental = not usual
    else:
        stand.config_info = usual
    answers = complete(stand)
    for answer, token_ids, rounds in zip(answers, replayed.token_ids, replayed.rounds, strict=True):
        assert (answer.token_ids, answer.ended) == (token_ids, "length")
        expected = known(stand, rounds, len(token_ids))
        assert len(rounds) - len(expected) <= 1
        assert answer.accepted is not None
        assert answer.accepted[: len(expected)] == expected
        # What replay leaves out begins at most K tokens before the end.
        assert len(answer.accepted[len(expected) :]) <= (3 if stand.engine == "sglang" else 0)
        assert answer.histogram == tuple(answer.accepted.count(j) for j in range(4))
        assert 0 <= answer.num_cut_rounds <= (0 if stand.engine == "sglang" else 3)
        assert 0 < (answer.time_to_first_token or 0) <= answer.latency
    probes = int(not usual and stand.engine == "tensorrt-llm")
    assert len(stand.asked) == len(PROMPTS) + probes
    assert {"/perf_metrics", "/model_info"}.isdisjoint(stand.got)
    assert stand.got.count("/metrics") == probes  # SGLang's gauges lie


@pytest.mark.parametrize("keeps_stop", [True, False])
def test_an_answer_ends_at_the_end_of_text(
    stand: Engine, monkeypatch: pytest.MonkeyPatch, keeps_stop: bool
) -> None:
    """Some token within a late round: the pair rarely writes its own end."""
    if isinstance(stand, SGLangStand):
        keeps_stop = True
    else:
        stand.keeps_stop = keeps_stop
    whole = shared_decoder().write(PROMPTS[0].token_ids, NUM_TOKENS, ignore_eos=True)
    text, begins = whole.token_ids, itertools.accumulate(map(len, whole.chunks), initial=1)
    rounds = [(c[1], n + 1) for c, n in zip(whole.chunks, begins, strict=False) if len(c) > 2]
    end = next(token for token, place in rounds if text.index(token) == place > 11)
    monkeypatch.setattr("stand.decoder.END", end)
    (answer,) = complete(stand, FIRST)
    assert (answer.ended, answer.token_ids) == ("stop", text[: text.index(end) + keeps_stop])
    (longer,) = complete(stand, FIRST, ask(ignore_eos=True))
    assert (longer.ended, longer.token_ids) == ("length", text)
    assert answer.accepted
    assert longer.accepted is not None
    if stand.engine == "tensorrt-llm":  # of SGLang the last round tells what it dropped
        assert longer.accepted[: len(answer.accepted)] == answer.accepted


def test_a_server_without_a_draft_has_no_rounds(stand: Engine, replayed: Replayed) -> None:
    stand.drafts = False
    assert identify(stand)[1] is None
    answers = complete(stand)
    assert [a.token_ids for a in answers] == replayed.token_ids
    assert {(a.histogram, a.accepted, a.num_draft_tokens) for a in answers} == {(None, None, None)}


def test_draws_have_a_seed_of_the_prompt(stand: Engine) -> None:
    asked = ask(decoding=Decoding(temperature=0.5, top_p=0.9, top_k=7))
    assert "this stand decodes greedily" in refused(stand, asked)
    sampling = stand.asked[0].get("sampling_params", stand.asked[0])
    assert 0 <= sampling.get("sampling_seed", sampling.get("seed")) < 2**60


@pytest.mark.untold
def test_a_run_goes_through_a_storm(stand: Engine, replayed: Replayed, tmp_path: Path) -> None:
    """Refused, cut off and killed between other answers: nothing is lost, nothing counted twice."""
    storm = (Fault(status=429), Fault(status=500), Fault(status=0), Fault(events=2))
    stand.faults = {2 * n + 3: fault for n, fault in enumerate(storm)}
    patient = dataclasses.replace(IMPATIENT, attempts=len(storm) + 1)  # one may meet them all
    address = ServerAddress(url=stand.url, patience=patient)
    plan = MeasurePlan(prompts=PROMPTS, ask=ask(), concurrency=3, num_warm_up=1)
    taken = measure(tmp_path / "run.jsonl", address, get_protocol(stand.engine), plan)
    assert len(stand.asked) == len(PROMPTS) + plan.num_warm_up + len(storm)
    assert read_measurement(tmp_path / "run.jsonl").records == taken.records
    assert [one.token_ids for one in taken.records] == replayed.token_ids
    for one, rounds in zip(taken.records, replayed.rounds, strict=True):
        expected = known(stand, rounds, NUM_TOKENS)
        assert (one.accepted or ())[: len(expected)] == expected
    for number in (-1, 4):
        cut = dataclasses.replace(taken.records[0], num_cut_rounds=number)
        assert "num_cut_rounds: expected 0 to K" in (record_problem(cut, taken.setup) or "")


@pytest.mark.untold  # log probabilities differ between CPUs
def test_no_value_breaks_a_reader(stand: Engine) -> None:
    """Every field of a stream's events in turn, with every nineteenth of all values."""
    prompt, asked = {"input_ids": [1, 2]}, {"temperature": 0, "ignore_eos": True}
    if stand.engine == "sglang":
        body = {**prompt, "sampling_params": asked | {"max_new_tokens": 8}, "stream": True,
                "return_logprob": True, "top_logprobs_num": 2}  # fmt: skip
        made = stand.post("/generate", body)
    else:
        body = {"prompt": [1, 2], "max_tokens": 8, **asked, "detokenize": False, "stream": True,
                "stream_options": {"include_usage": True}, "logprobs": 2}  # fmt: skip
        made = stand.post("/v1/completions", body)
    good = [Event(0.1 * i, event) for i, event in enumerate(made, 1)]
    for events in itertools.chain([good], itertools.islice(broken(good), 0, None, 19)):
        reply = Reply(events=tuple(events), num_attempts=1)
        with suppress(*() if events is good else (AnswerProblem, MeasureError)):
            if stand.engine == "sglang":
                read = sglang_server.read_answer(reply, TOP_2, 3, "here", streamed=True)
            else:
                read = tensorrt_llm_server.read_answer(reply, TOP_2, 3, "here")
            assert record_of(read) is not None


# ---- what is no answer of an engine, or one that cannot be counted


def finished(**fields: Any) -> Change:
    """Other fields in the meta_info of SGLang's last event; `...` = absent."""

    def change(events: list[Object]) -> list[Object]:
        meta = events[-1]["meta_info"] | fields
        events[-1]["meta_info"] = {k: v for k, v in meta.items() if v is not ...}
        return events

    return change


def choices(number: int, **fields: Any) -> Change:
    """Other fields in the choice of one event of TensorRT-LLM, whose last holds the usage."""

    def change(events: list[Object]) -> list[Object]:
        (choice,) = events[number]["choices"]
        events[number]["choices"] = [choice | fields]
        return events

    return change


def one_token_fewer(events: list[Object]) -> list[Object]:
    """Rounds that wrote one token less than came."""
    rounds = events[-1]["meta_info"]["spec_verify_ct"]
    fewer = NUM_TOKENS - 2 - rounds
    threes, rest = divmod(fewer, 3)
    histogram = [rounds - threes - (rest > 0), 0, 0, threes]
    histogram[rest] += rest > 0
    told = {"spec_correct_drafts_histogram": histogram, "spec_num_correct_drafts": fewer}
    return finished(**told)(events)


def of_other_length(by: int) -> Change:
    def change(events: list[Object]) -> list[Object]:
        ids = events[-1]["output_ids"]
        events[-1]["output_ids"] = [*ids, 7] if by > 0 else ids[:by]
        return finished(completion_tokens=NUM_TOKENS + by)(events)

    return change


NOT_SGLANGS: tuple[Change, ...] = (
    finished(spec_correct_drafts_histogram=...), finished(spec_verify_ct=9999),
    finished(spec_num_correct_drafts=-1), finished(spec_num_proposed_drafts=1),
    finished(completion_tokens=31), finished(finish_reason={"type": "odd"}),
    finished(finish_reason={"type": "abort", "message": "Aborted"}), lambda _events: [],
    lambda events: [events[-1] | {"output_ids": [1, "a"]}], one_token_fewer, of_other_length(-1),
    of_other_length(1),
)  # fmt: skip
"""What each is told is kept in told/measure_engines.txt, as for the tables below."""


def refuses_each(stand: Stand, changes: tuple[Change, ...]) -> None:
    for change in changes:
        stand.change = change
        assert f"{stand.url}: prompt {PROMPTS[0].id}" in refused(stand)


def test_answers_that_are_not_sglangs(sglang: SGLangStand) -> None:
    refuses_each(sglang, NOT_SGLANGS)


def test_answers_that_are_not_tensorrt_llms(trtllm: TensorRTLLMStand) -> None:
    refuses_each(trtllm, (
        choices(2, avg_decoded_tokens_per_iter=None), choices(2, avg_decoded_tokens_per_iter=1.234),
        choices(2, avg_decoded_tokens_per_iter=1e-320), choices(2, token_ids=None),
        choices(-2, finish_reason="odd"), lambda events: [events[0], events[-1]],
        lambda _events: [], lambda events: [*events, {"choices": []}],
    ))  # fmt: skip


def top(**fields: Any) -> Change:
    return choices(3, logprobs={"token_logprobs": [-1.5], **fields})


def test_logprobs_that_are_not_the_answers(sglang: SGLangStand, trtllm: TensorRTLLMStand) -> None:
    trtllm.drafts = False
    stands: dict[str, Engine] = {"sglang": sglang, "trtllm": trtllm}
    for name, changes in {
        "sglang": (
            finished(output_token_logprobs=...), finished(output_token_logprobs=[[-0.5, 3, None]]),
            finished(output_token_logprobs=[[None, 3, None]]),
            finished(output_token_logprobs=[[-0.5, True, None]]), finished(output_top_logprobs=[]),
            finished(output_top_logprobs=[[[-0.5, 3, None]]] * 8),
        ),
        "trtllm": (
            choices(3, logprobs=None), top(token_logprobs=[-1.5, -1.5]), top(token_logprobs=["?"]),
            top(top_logprobs=[None]), top(top_logprobs=[{"a": -1.5}]),
        ),
    }.items():  # fmt: skip
        for change in changes:
            stands[name].change = change
            assert "fix: " in refused(stands[name], TOP_2)


MODEL = {"id": "m", "owned_by": "tensorrt_llm"}

NOT_MEASURED: dict[str, tuple[Setting, ...]] = {
    "sglang": (
        {"version": None}, {"speculative_eagle_topk": 4}, {"speculative_adaptive": True},
        {"speculative_num_draft_tokens": 1}, {"speculative_num_draft_tokens": 10**9},
        {"speculative_draft_model_path": "a\x1b"}, {"served_model_name": ""},
        {"speculative_accept_threshold_acc": "1"},
    ),
    "trtllm": (
        {"/v1/models": {"data": [MODEL | {"owned_by": "vllm"}]}}, {"/v1/models": {"data": 3}},
        {"/v1/models": {"data": [MODEL | {"id": None}]}}, {"/version": {}},
        {"/metrics": "nothing"}, {"/metrics": "[3]"}, {"/metrics": '[{"specDecodingStats": 3}]'},
        {"/metrics": '[{"specDecodingStats": {"numDraftTokens": 3,'
                     ' "numRequestsWithDraftTokens": 0}}]'},
        {"/metrics": "[]"}, {"/metrics": '[{"iter": 1}]'},
    ),
}  # fmt: skip


def test_servers_that_cannot_be_measured(sglang: SGLangStand, trtllm: TensorRTLLMStand) -> None:
    trtllm.config_info = False
    stands: dict[str, Engine] = {"sglang": sglang, "trtllm": trtllm}
    for name, settings in NOT_MEASURED.items():
        for setting in settings:
            sglang.info = trtllm.paths = setting
            with pytest.raises(MeasureError) as caught:
                identify(stands[name])
            assert stands[name].url in str(caught.value)


# ---- SGLang alone


def test_counts_by_older_names_and_of_rounds_that_nobody_fetched_apart(sglang: SGLangStand) -> None:
    apart = complete(sglang)
    sglang.old_names, sglang.fetched = True, 3
    together = complete(sglang)
    assert [a.histogram for a in together] == [a.histogram for a in apart]
    assert [a.token_ids for a in together] == [a.token_ids for a in apart]
    assert {a.accepted for a in together} == {None}


def test_lossy_settings_are_told(sglang: SGLangStand) -> None:
    for info, lossy in (
        ({"speculative_accept_threshold_single": 0.9}, True),
        ({"internal_states": [{"env_vars": {"SGLANG_SIMULATE_ACC_LEN": "3.5"}}, 7]}, True),
        ({"internal_states": None, "speculative_accept_threshold_acc": 1}, False),
    ):
        sglang.info = info
        _, speculation = identify(sglang)
        assert bool(getattr(speculation, "lossy", None)) == lossy


def test_draws_are_not_measured_where_verification_is_greedy(sglang: SGLangStand) -> None:
    aiter = {"attention_backend": "aiter"}
    for info, refuses in (
        ({"device": "cpu"}, True), ({"device": "xpu"}, True), (aiter, True),
        (aiter | {"speculative_use_rejection_sampling": True}, False),
    ):  # fmt: skip
        sglang.info = info
        problem = refused(sglang, ask(decoding=Decoding(temperature=1)))
        assert ("verifies greedily at any temperature" in problem) is refuses
        assert ("this stand decodes greedily" in problem) is not refuses


# ---- TensorRT-LLM alone


def test_a_number_of_drafted_tokens_that_is_none(trtllm: TensorRTLLMStand) -> None:
    for told in (None, "three", "٣", "10000", "0", "1025"):
        trtllm.labels = {"spec_num_tokens": told, "spec_draft_model": r"/models/{a} \"b\", c"}
        with pytest.raises(MeasureError, match="spec_num_tokens: expected"):
            identify(trtllm)


def test_rounds_that_cannot_be_told_apart(trtllm: TensorRTLLMStand) -> None:
    trtllm.stream_interval = 2
    assert "fix: start it with `stream_interval: 1`, the default" in refused(trtllm)
    trtllm.stream_interval, trtllm.labels = 1, {"spec_num_tokens": "2"}
    assert "expected 1, then at most 3 each" in refused(trtllm)
