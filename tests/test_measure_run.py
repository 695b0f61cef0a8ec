"""Measuring a server: what is recorded, how much is asked at a time, what a run leaves behind."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.decoding import GREEDY, Decoding, prompt_seed
from draftquant.calibration.server_client import Patience, ServerClient
from draftquant.calibration.traces.prompt_trace import prompt_sha256
from draftquant.recipes.errors import MeasureError, OutputError, ServerError
from draftquant.validate.measure import vllm_server as counted
from draftquant.validate.measure.measurement import Measurement, ServerIdentity, Setup, Speculation
from draftquant.validate.measure.measurement_file import read_measurement
from draftquant.validate.measure.measuring import (
    DraftIdentity,
    MeasurePlan,
    Progress,
    ServerAddress,
    measure,
)
from draftquant.validate.measure.server_answers import Ask, Completion, Counters
from draftquant.validate.measure.vllm_server import VLLMProtocol
from vllm_server import VLLMServer, continued, rounds_of

PROMPTS = tuple(
    Prompt(id=f"p{i}", category="ab"[i % 2], token_ids=tuple(range(i, 2 * i + 2)), cluster=cluster)
    for i, cluster in enumerate(("document", None, None) * 3)
)
ASK = Ask(decoding=GREEDY, max_new_tokens=12, ignore_eos=False)
PLAN = MeasurePlan(prompts=PROMPTS, ask=ASK, concurrency=3, num_warm_up=0)
PATIENCE = Patience(attempts=3, first_pause=0.01, seconds=60)


def measured(
    running: VLLMServer, out: Path, plan: MeasurePlan = PLAN, **options: Any
) -> Measurement:
    address = ServerAddress(url=running.url, patience=PATIENCE)
    return measure(out, address, VLLMProtocol(), plan, **options)


def setup_of(running: VLLMServer, out: Path, plan: MeasurePlan) -> Setup:
    return measured(running, out, plan).setup


def test_records_hold_what_the_server_did(running: VLLMServer, tmp_path: Path) -> None:
    running.seconds = 0.03
    found = measured(running, tmp_path / "r")
    assert found == read_measurement(tmp_path / "r")
    assert [record.id for record in found.records] == [prompt.id for prompt in PROMPTS]
    for record, prompt in zip(found.records, PROMPTS, strict=True):
        text = continued(list(prompt.token_ids), 12)
        steps = rounds_of(text, 3)
        assert (record.category, record.cluster) == (prompt.category, prompt.cluster)
        assert record.prompt_sha256 == prompt_sha256(prompt.token_ids)
        assert record.num_prompt_tokens == len(prompt.token_ids)
        assert record.token_ids == tuple(text)
        assert record.ended == "length"
        assert record.accepted == tuple(steps)
        assert record.drafted == (3,) * len(steps)
        assert record.histogram == tuple(steps.count(j) for j in range(4))
        assert (record.token_logprob, record.top_gap) == (None, None)
        assert record.time_to_first_token is not None
        assert 0 < record.time_to_first_token < record.latency
        assert record.latency < 3  # whatever the clock of the server says
        assert record.num_attempts == 1
    begun = [record.began for record in found.records]
    assert begun == sorted(begun)
    assert [*tmp_path.iterdir()] == [tmp_path / "r"]


def test_the_setup_says_who_was_asked_for_what(running: VLLMServer, tmp_path: Path) -> None:
    running.config = {
        "vllm_config": {
            "model_config": {"dtype": "torch.bfloat16", "secret": "x"},
            "speculative_config": {
                "method": "eagle3",
                "model": "/drafts/a",
                "rejection_sample_method": "synthetic",
            },
        }
    }
    given = {"draft_quantization": "int4-channel", "served_as": "/drafts/a"}
    draft = DraftIdentity(draft="b", draft_sha256="0" * 64, **given)
    decoding = Decoding(temperature=0.5, top_p=0.9, top_k=4, seed=7, num_top_logprobs=2)
    ask = replace(ASK, decoding=decoding, ignore_eos=True)
    plan = replace(PLAN, ask=ask, template_sha256="1" * 64)
    setup = setup_of(running, tmp_path / "r", plan)
    seeds = {tuple(body["prompt"]): body["seed"] for body in running.asked[1:-1]}
    assert seeds == {p.token_ids: prompt_seed(7, p.token_ids) for p in PROMPTS}
    one_at_a_time: Any = SimpleNamespace(most_in_flight=1)
    alone = PLAN.setup(one_at_a_time, setup.server, setup.speculation).asked
    assert (PLAN.concurrency, alone.concurrency) == (3, 1)
    setup_of(running, tmp_path / "with-draft", replace(PLAN, draft=draft))


def test_no_more_requests_are_begun_than_are_allowed(running: VLLMServer, tmp_path: Path) -> None:
    address = ServerAddress(url=running.url, patience=PATIENCE, most_per_second=50)
    found = measure(tmp_path / "r", address, VLLMProtocol(), PLAN)
    begun = sorted(record.began for record in found.records)
    assert all(began >= number / 50 for number, began in enumerate(begun))


# ---- a run that ends early


SINGLE = replace(PLAN, concurrency=1)
"""So that it is certain what is answered when the server dies."""


def stops_at(number: int) -> Any:
    return lambda asked: 200 if asked < number else 0


def test_a_second_run_goes_on_where_the_server_died(running: VLLMServer, tmp_path: Path) -> None:
    running.status = stops_at(7)
    with pytest.raises(ServerError, match="the answers so far are kept"):
        measured(running, tmp_path / "r", SINGLE)
    assert not (tmp_path / "r").exists()
    path = tmp_path / "r.measuring"
    path.write_bytes(path.read_bytes()[:-10])  # of the fifth answer: the first was the probe's
    kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:-1]]
    end = max(record["began"] + record["latency"] for record in kept)
    running.status = stops_at(1000)
    running.asked.clear()
    told: list[Progress] = []
    found = measured(running, tmp_path / "r", SINGLE, on_progress=told.append)
    assert [each.num_done for each in told] == list(range(4, len(PROMPTS) + 1))
    assert told[0].dropped_line
    last = told[-1].counts
    assert last is not None
    assert last.num_steps == sum(sum(r.histogram or ()) for r in found.records)
    done = {record["id"] for record in kept}
    assert running.prompts == [p.token_ids for p in PROMPTS if p.id not in done]
    assert [record.id for record in found.records] == [prompt.id for prompt in PROMPTS]
    assert all(r.began >= end for r in found.records if r.id not in done)  # its clock goes on
    assert [*tmp_path.iterdir()] == [tmp_path / "r"]


@pytest.fixture
def kept(running: VLLMServer, tmp_path: Path) -> Path:
    """What a run leaves whose server died."""
    running.status = stops_at(2)
    with pytest.raises(ServerError):
        measured(running, tmp_path / "r", SINGLE)
    assert [*tmp_path.iterdir()] == []  # no answer
    (tmp_path / "mine").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match="already exists"):
        measured(running, tmp_path / "mine")
    running.asked.clear()
    running.status = stops_at(7)
    with pytest.raises(ServerError):
        measured(running, tmp_path / "r", SINGLE)
    running.status = stops_at(1000)
    return tmp_path / "r.measuring"


def test_no_other_plan_or_server_goes_on(running: VLLMServer, kept: Path, tmp_path: Path) -> None:
    before = kept.read_bytes()
    with pytest.raises(OutputError, match="max_new_tokens: it was 12, now it is 13"):
        measured(running, tmp_path / "r", replace(SINGLE, ask=replace(ASK, max_new_tokens=13)))
    running.version, running.num_draft_tokens = "0.33.0", 4
    with pytest.raises(OutputError, match=r"version: it was '0\.32\.0', now it is"):
        measured(running, tmp_path / "r", SINGLE)
    running.version, running.num_draft_tokens = "0.32.0", None
    with pytest.raises(OutputError, match=r"num_draft_tokens: it was 3, now it is None"):
        measured(running, tmp_path / "r", SINGLE)
    assert kept.read_bytes() == before


def test_what_is_kept_is_checked_first(running: VLLMServer, kept: Path, tmp_path: Path) -> None:
    head, first, *rest = kept.read_text(encoding="utf-8").splitlines()
    for lines in (
        [head, first, *rest, first],
        [head, "{}", first, *rest],
        ["[]", first, *rest],
        [head, first.replace('"p0', '"q0'), *rest],
        [head, first.replace('y": "a"', 'y": "b"'), *rest],
    ):
        kept.write_text("\n".join(lines) + "\n", encoding="utf-8")
        with pytest.raises(MeasureError):
            measured(running, tmp_path / "r", SINGLE)


# ---- vLLM's protocol: who answers, metrics of a request, counters around one

PROMPT = Prompt(id="p", category="a", token_ids=(5, 6, 7))
TWICE = Patience(attempts=2, first_pause=0.01, seconds=60)
TEXT = continued([5, 6, 7], 12)
ROUNDS = rounds_of(TEXT, 3)
HISTOGRAM = tuple(ROUNDS.count(j) for j in range(4))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_POLL", 0.002), ("_PATIENCE", 20), ("_BETWEEN", 0.01)):
        monkeypatch.setattr(counted, name, value)


Identified = tuple[ServerIdentity, Speculation | None, int | None]


def identify(running: VLLMServer) -> Identified:
    async def asked() -> Identified:
        protocol = VLLMProtocol()
        async with client(running) as found:
            server, speculation = await protocol.identify(found)
        return server, speculation, protocol.most_in_flight

    return asyncio.run(asked())


def complete(running: VLLMServer, ask: Ask = ASK) -> Completion:
    async def asked() -> Completion:
        protocol = VLLMProtocol()
        async with client(running) as found:
            await protocol.identify(found)
            return await protocol.complete(found, PROMPT, ask)

    return asyncio.run(asked())


def client(running: VLLMServer) -> ServerClient:
    return ServerClient(running.url, key=None, most_in_flight=2, patience=TWICE)


# ---- who answers


def test_how_it_drafts_is_found_wherever_it_is_told(running: VLLMServer) -> None:
    metrics: Any
    for metrics, counts in (("none", True), ("summary", False), ("detailed", True)):
        running.metrics, running.counts = metrics, counts
        _, speculation, most = identify(running)
        assert speculation == Speculation(num_draft_tokens=3, acceptance_told=False)
        assert most == (1 if metrics == "none" else None)
    running.metrics, running.counts = "none", False
    with pytest.raises(MeasureError, match="whether it drafts, and what is accepted"):
        identify(running)


def test_a_server_that_drafts_nothing(running: VLLMServer) -> None:
    running.num_draft_tokens = None
    assert identify(running)[1:] == (None, None)
    running.counts = False
    with pytest.raises(MeasureError, match="whether it drafts"):
        identify(running)
    running.config = {"vllm_config": {"speculative_config": None, "model_config": {}}}
    assert identify(running)[1:] == (None, None)


def model(**changes: object) -> dict[str, object]:
    return {"data": [{"id": "m", "owned_by": "vllm"} | changes]}


def test_servers_of_another_kind(running: VLLMServer) -> None:
    models: dict[str, Any]
    for models in (
        *({"data": []}, {"data": ["m"]}),
        *(model(owned_by="sglang"), model(id=""), model(id="a\n")),
    ):
        running.models = models
        with pytest.raises(MeasureError):
            identify(running)


def test_lossy_settings(running: VLLMServer) -> None:
    method: Any
    for method in ("standard", "strict", "probabilistic", "fly", ["odd"]):
        said = {"rejection_sample_method": method}
        running.config = {"vllm_config": {"speculative_config": said}}
        identify(running)


# ---- answers


Events = list[Any]


def change_last(**metrics: object) -> Callable[[Events], None]:
    def change(events: Events) -> None:
        events[-2]["metrics"]["speculative_decoding"] |= metrics

    return change


def change_choice(at: int, **changes: object) -> Callable[[Events], None]:
    return lambda events: events[at]["choices"][0].update(changes)


BROKEN: tuple[Callable[[Events], object], ...] = (
    lambda events: events[0].pop("choices"),
    lambda events: events[0].update(choices=3),
    change_choice(0, token_ids=[True]),
    change_choice(-3, finish_reason=None), change_choice(-3, finish_reason="abort"),
    change_choice(0, finish_reason="stop"),
    change_choice(0, prompt_token_ids=[1]), change_choice(1, token_ids=[]),
    lambda events: events[-2]["usage"].update(prompt_tokens=2),
    change_last(acceptance_histogram="x"), change_last(num_spec_tokens=None),
    lambda events: events[-2].update(metrics=[1]),
    lambda events: events[-2].pop("metrics"),
    change_choice(0, logprobs=None),
    change_choice(0, logprobs={"token_logprobs": [None], "top_logprobs": [{}]}),
)  # fmt: skip
"""What becomes of the events; that of the last two is wrong where log-probabilities are asked."""


def test_answers_that_are_not_vllms(running: VLLMServer) -> None:
    for change in BROKEN:
        probes = len(running.asked) + 1

        def changed(
            number: int, events: Events, change: Any = change, probes: int = probes
        ) -> Events:
            if number > probes:
                change(events)
            return events

        running.change = changed
        decoding = Decoding(num_top_logprobs=2) if change in BROKEN[-2:] else GREEDY
        with pytest.raises(MeasureError):
            complete(running, Ask(decoding=decoding, max_new_tokens=12, ignore_eos=False))


# ---- counters


def test_rounds_are_told_one_by_one_or_counted(running: VLLMServer) -> None:
    found = complete(running)
    assert (found.histogram, found.accepted) == (HISTOGRAM, tuple(ROUNDS))
    running.metrics = "summary"
    found = complete(running)
    assert (found.histogram, found.accepted, found.drafted) == (HISTOGRAM, None, None)
    running.metrics = "none"
    found = complete(running)
    assert (found.histogram, found.accepted, found.drafted) == (HISTOGRAM, None, None)
    assert found.num_draft_tokens == 3
    assert found.token_ids == tuple(TEXT)


def moved(**changes: int) -> Callable[[VLLMServer], None]:
    """What moves while the request runs, behind the probe."""

    def during(server: VLLMServer) -> None:
        if len(server.asked) > 1:
            for name, by in changes.items():
                setattr(server, name, getattr(server, name) + by)

    return during


def test_requests_of_others_and_new_starts_are_noticed(running: VLLMServer) -> None:
    more, anew = {"finished": 1, "tokens": 5}, {"finished": -100, "tokens": -1000}
    for changes in (more, {"running": 1}, {"tokens": 1}, anew, {"finished": -1}):
        running.finished, running.tokens, running.metrics, running.running = 100, 1000, "none", 0
        running.asked.clear()
        running.during = moved(**changes)
        with pytest.raises(MeasureError):
            complete(running)
    running.running = 1
    with pytest.raises(MeasureError, match=r"1 request\(s\) run there"):
        complete(running)


def test_a_repeated_request_is_counted_anew(running: VLLMServer) -> None:
    """Its first attempt has moved the counters too."""

    def broken(number: int, events: Events) -> Events:
        return events[:2] if number == 2 else events

    running.metrics = "none"
    running.change = broken
    assert complete(running).histogram == HISTOGRAM
    assert len(running.asked) == 4  # the probe, two attempts, and once more
    running.change = lambda number, events: events[: 2 if number % 2 == 0 else None]
    running.asked.clear()
    with pytest.raises(MeasureError, match="none of 5 requests was answered at the first attempt"):
        complete(running)


def test_exposition_text() -> None:
    found = Counters.parse(
        '# TYPE a counter\na 1\na{x="1",y="\\"}"} 2.0 1700000000\nb NaN\nc{x="2"} +Inf\n\n', "there"
    )
    assert found.total("a") == 3
    assert found.total("b") == found.total("c") == 0
    assert found.total("d") is None
    assert found.by_label("a", "x") == {"": 1, "1": 2}
    assert found.by_label("a", "y") == {"": 1, '"}': 2}  # as its writer had it, before escaping
    page = Counters.parse('a{b="say \\"x\\\\n\\"\\nand }",c="é"} 1\n', "page")
    ((labels, _),) = page.samples["a"]
    assert labels == {"b": 'say "x\\n"\nand }', "c": "é"}
    for line in ("<html>", "a", "a b", 'a{x="1"} 1 2 3', "a" * 20_000 + " 1"):
        with pytest.raises(MeasureError, match="there: expected counters of Prometheus"):
            Counters.parse(f"a 1\n{line}\n", "there")
