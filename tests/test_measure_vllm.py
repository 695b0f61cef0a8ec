"""vLLM's protocol: who answers, metrics of a request, counters around one, answers of others."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.recording.decoding import GREEDY, Decoding
from draftquant.calibration.server_client import Patience, ServerClient
from draftquant.recipes.errors import MeasureError
from draftquant.validate.measure import vllm_server as counted
from draftquant.validate.measure.measurement import ServerIdentity, Speculation
from draftquant.validate.measure.server_answers import Ask, Completion, Counters
from draftquant.validate.measure.vllm_server import VLLMProtocol
from vllm_server import VLLMServer, continued, rounds_of, served

PROMPT = Prompt(id="p", category="a", token_ids=(5, 6, 7))
ASK = Ask(decoding=GREEDY, max_new_tokens=12, ignore_eos=False)
PATIENCE = Patience(attempts=2, first_pause=0.01, seconds=60)
TEXT = continued([5, 6, 7], 12)
ROUNDS = rounds_of(TEXT, 3)
HISTOGRAM = tuple(ROUNDS.count(j) for j in range(4))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_POLL", 0.002), ("_PATIENCE", 20), ("_BETWEEN", 0.01)):
        monkeypatch.setattr(counted, name, value)


@pytest.fixture
def running() -> Iterator[VLLMServer]:
    with served(VLLMServer()) as found:
        yield found


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
    return ServerClient(running.url, key=None, most_in_flight=2, patience=PATIENCE)


# ---- who answers


def test_how_it_drafts_is_found_wherever_it_is_told(running: VLLMServer) -> None:
    metrics: Any
    for metrics, counts in (("none", True), ("summary", False), ("detailed", True)):
        running.metrics, running.counts = metrics, counts
        _, speculation, most = identify(running)
        assert speculation == Speculation(num_draft_tokens=3, acceptance_told=False)
        assert most == (1 if metrics == "none" else None)
    running.metrics, running.counts = "none", False
    with pytest.raises(MeasureError, match="whether it drafts, and what is accepted") as found:
        identify(running)
    assert "--per-request-spec-decode-metrics detailed" in found.value.fix
    assert "--disable-log-stats" in found.value.fix


def test_a_server_that_drafts_nothing(running: VLLMServer) -> None:
    running.num_draft_tokens = None
    assert identify(running)[1:] == (None, None)
    running.counts = False
    with pytest.raises(MeasureError, match="whether it drafts"):
        identify(running)
    running.config = {"vllm_config": {"speculative_config": None, "model_config": {}}}
    assert identify(running)[1:] == (None, None)


def test_a_draft_whose_rounds_cannot_be_counted_is_none_the_less_one(running: VLLMServer) -> None:
    running.metrics = "none"
    lines = running.get("/metrics").splitlines(keepends=True)
    text = "".join(line for line in lines if "per_pos" not in line)
    running.get = lambda path: text if path == "/metrics" else VLLMServer.get(running, path)  # type: ignore[method-assign]
    with pytest.raises(MeasureError, match="does not count by position what is accepted"):
        identify(running)
    text = "".join(lines).replace('position="2"', 'position="7"')
    with pytest.raises(MeasureError, match="counts odd positions"):
        identify(running)


def test_versions(running: VLLMServer) -> None:
    for version in ("0.10.2", "1.0", "dev", "0.33.1rc1.dev7+g0123abc"):
        running.version = version
        assert identify(running)[0].version == version
    given: Any
    for given in ("0.10.1.1", "0.9.2", None, "a\x1b"):
        running.version = given
        with pytest.raises(MeasureError, match=r"expected vLLM 0\.10\.2 or later|say its version"):
            identify(running)


def model(**changes: object) -> dict[str, object]:
    return {"data": [{"id": "m", "owned_by": "vllm"} | changes]}


def test_servers_of_another_kind(running: VLLMServer) -> None:
    models: dict[str, Any]
    for models, problem in (
        ({"data": []}, "serves no model"),
        ({"data": ["m"]}, "serves no model"),
        (model(owned_by="sglang"), "expected vLLM, but its model is owned by 'sglang'"),
        (model(id=""), "its model has no name, but ''"),
        (model(id="a\n"), "its model has no name"),
    ):
        running.models = models
        with pytest.raises(MeasureError, match=problem):
            identify(running)


def test_what_its_configuration_tells_is_plain(running: VLLMServer) -> None:
    running.config = {
        "vllm_config": {
            "model_config": {"dtype": ["x"], "quantization": "fp8", "enforce_eager": True},
            "cache_config": "none",
            "scheduler_config": {"max_num_seqs": float("nan")},
            "speculative_config": {"rejection_sample_method": "block", "model": 3},
        },
        "vllm_env": {"VLLM_BATCH_INVARIANT": True, "VLLM_OTHER": "x"},
    }
    server, speculation, _ = identify(running)
    told = {key: value for key, value in server.arguments.items() if "." in key}
    assert told == {
        "model_config.quantization": "fp8",
        "model_config.enforce_eager": True,
        "speculative_config.rejection_sample_method": "block",
        "vllm_env.VLLM_BATCH_INVARIANT": True,
    }
    assert speculation == Speculation(num_draft_tokens=3)


def test_lossy_settings(running: VLLMServer) -> None:
    method: Any
    for method, lossy in (
        ("standard", ()), ("strict", ()), ("probabilistic", ()),
        ("fly", ("rejection_sample_method = fly",)),
        (["odd"], ("rejection_sample_method = ['odd']",)),
    ):  # fmt: skip
        said = {"rejection_sample_method": method}
        running.config = {"vllm_config": {"speculative_config": said}}
        speculation = identify(running)[1]
        assert speculation is not None
        assert speculation.lossy == lossy


# ---- answers


Events = list[Any]


def change_last(**metrics: object) -> Callable[[Events], None]:
    def change(events: Events) -> None:
        events[-2]["metrics"]["speculative_decoding"] |= metrics

    return change


def change_choice(at: int, **changes: object) -> Callable[[Events], None]:
    return lambda events: events[at]["choices"][0].update(changes)


BROKEN: tuple[tuple[Callable[[Events], object], str | None], ...] = (
    (lambda events: events[0].pop("choices"), "KeyError: \"'choices'\""),
    (lambda events: events[0].update(choices=3), "TypeError"),
    (change_choice(0, token_ids=[True]), "token_ids: expected whole numbers"),
    (change_choice(-3, finish_reason=None), "to end with stop or length, got None"),
    (change_choice(-3, finish_reason="abort"), "stop or length, got 'abort'"),
    (change_choice(0, finish_reason="stop"), "tokens behind the end"),
    (change_choice(0, prompt_token_ids=[1]), "continues another prompt"),
    (change_choice(1, token_ids=[]), "completion_tokens: expected"),
    (lambda events: events[-2]["usage"].update(prompt_tokens=2), "prompt_tokens: expected 3, got"),
    (change_last(acceptance_histogram="x"), "acceptance_histogram: expected a list"),
    (change_last(num_spec_tokens=None), "num_spec_tokens: expected int"),
    (lambda events: events[-2].update(metrics=[1]), "AttributeError"),
    (change_choice(0, logprobs=None), ""),
    (change_choice(0, logprobs={"token_logprobs": [None], "top_logprobs": [{}]}), ""),
    (lambda events: events[-2].pop("metrics"), None),
)  # fmt: skip
"""What becomes of the events, and what is wrong then: "" = of log-probabilities, None = metrics."""


def test_answers_that_are_not_vllms(running: VLLMServer) -> None:
    for change, problem in BROKEN:
        probes = len(running.asked) + 1

        def changed(
            number: int, events: Events, change: Any = change, probes: int = probes
        ) -> Events:
            if number > probes:
                change(events)
            return events

        running.change = changed
        decoding = Decoding(num_top_logprobs=2) if problem == "" else GREEDY
        not_its = "prompt p: its answer is not vLLM's"
        match = "no metrics of speculation, as earlier" if problem is None else not_its
        with pytest.raises(MeasureError, match=match) as found:
            complete(running, Ask(decoding=decoding, max_new_tokens=12, ignore_eos=False))
        assert (problem or "") in found.value.what.replace("\\", "")


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
    for during, problem in (
        (moved(finished=1, tokens=5), r"moved by 2 request\(s\) and 17 tokens"),
        (moved(running=1), r"1 request\(s\) run there that are not ours"),
        (moved(tokens=1), r"moved by 1 request\(s\) and 13 tokens"),
        (moved(finished=-100, tokens=-1000), "its counters went back: it was started again"),
        (moved(finished=-1), "answered, but counts no finished request"),
    ):
        running.finished, running.tokens, running.metrics, running.running = 100, 1000, "none", 0
        running.asked.clear()
        running.during = during
        with pytest.raises(MeasureError, match=problem):
            complete(running)
    running.running = 1
    with pytest.raises(MeasureError, match=r"1 request\(s\) run there .*") as found:
        complete(running)
    assert "keep others away" in found.value.fix


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
