"""`watch` and `canary` of servers and states that are out of order: each fault has a name."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from counting_server import counting, prometheus_answer, vllm_page
from draftquant.scripts.cli import main
from draftquant.validate.errors import MeasureError
from draftquant.validate.measure.protocols.counters import Counters
from draftquant.validate.measure.protocols.engine_counters import ENGINE_COUNTERS
from draftquant.validate.monitoring.bets import limit_of
from draftquant.validate.monitoring.counter_stream import counted_since, where_they_stand
from draftquant.validate.monitoring.drift import Drift
from draftquant.validate.monitoring.e_detector import DAY, Evidence, after
from test_canary import BEGIN, LOST, MANY, _canary
from test_canary import file as file
from test_watch import FALLEN, VLLM, _as_golden, _page, _prometheus, _watch, detectors, golden

SGLANG = ENGINE_COUNTERS["sglang"]
DRAFTS = 'vllm:spec_decode_num_drafts_total{model_name="m"} %s\n'


def _said(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        DRAFTS % "1e300",
        DRAFTS % "9007199254740994",
        DRAFTS % "1e308" * 2 + 'vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 1',
        f'{DRAFTS % 5}vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 1e308\n'
        * 2,
    ],
)
def test_a_number_that_no_server_counts_to_is_refused(
    file: Path, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with counting(page) as server, counting(BEGIN) as other:
        assert _watch(file, server.url, "--for", "0.01") == 2
        assert "expected a count of 0 or more (2^53 at most)" in _said(capsys)
        assert _canary(file, server.url, other.url, "--for", "0.01") == 2
    assert "expected a count of 0 or more (2^53 at most)" in _said(capsys)


@pytest.mark.parametrize("position", ["9" * 5000, "1" * 9])
def test_a_position_of_many_digits_is_no_memory(position: str) -> None:
    page = vllm_page(9, 4).replace('position="0"', f'position="{position}"')
    found = VLLM.read(Counters.parse(page, "page"))
    assert found is not None
    assert (found.accepted, sum(found.accepted_at or ())) == (4, 0)


@pytest.mark.parametrize("pages", [(DRAFTS % 0, DRAFTS % 20_000), (BEGIN, DRAFTS % 20_000)])
def test_steps_without_what_they_accepted_are_no_fall(
    file: Path, pages: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A relabelling that keeps the steps alone; of the baseline it would have made a PASS."""
    said = "but no vllm:spec_decode_num_accepted_tokens_total"
    with counting(*pages) as server:
        assert _watch(file, server.url, "--for", "0.05") in (2, 3)
        assert said in _said(capsys)
    with counting(*pages) as server, counting(BEGIN, LOST) as other:
        assert _canary(file, server.url, other.url, "--for", "0.05") in (2, 3)
    assert said in _said(capsys)


def test_a_counter_that_is_missing_once_goes_on_where_it_was() -> None:
    before = where_they_stand(_page((100, 60, 30)), VLLM, "page")
    lines = vllm_page(110, 66, 33).splitlines(keepends=True)
    alone = "".join(line for line in lines if 'position="1"' not in line)
    missing = counted_since(before, Counters.parse(alone, "page"), VLLM, "page")
    back = counted_since(missing.sources, _page((120, 70, 35)), VLLM, "page")
    at = back.increments.by_label("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert at == {"0": 4, "1": 5}


def _sglang(steps: int, **streams: tuple[int, int]) -> Counters:
    """Verify steps, and tokens and requests by the value of `is_streaming`."""
    parts = [
        f'sglang:generation_tokens_total{{model_name="m",is_streaming="{key}"}} {tokens}\n'
        f'sglang:num_requests_total{{model_name="m",is_streaming="{key}"}} {requests}\n'
        for key, (tokens, requests) in streams.items()
    ]
    page = f'sglang:spec_verify_calls_total{{model_name="m"}} {steps}\n{"".join(parts)}'
    return Counters.parse(page, "page")


def test_the_first_requests_without_a_stream_are_no_fall() -> None:
    """SGLang 0.5.23, observe_one_finished_request: steps are not divided by `is_streaming`."""
    before = where_they_stand(_sglang(40, true=(82, 2)), SGLANG, "page")
    since = counted_since(before, _sglang(80, true=(82, 2), false=(82, 2)), SGLANG, "page")
    found = SGLANG.read(since.increments)
    assert found is not None
    assert (found.verify_steps, found.accepted) == (40, 82 - 2 - 40)
    with pytest.raises(MeasureError, match="no sglang:generation_tokens_total"):
        where_they_stand(_sglang(80), SGLANG, "page")


def test_counters_that_fall_a_little_are_of_several_servers(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted from 0 again, the whole history would be judged a second time."""
    pages = [vllm_page(1_000_000, 600_000, 300_000), vllm_page(999_999, 600_000, 300_000)]
    with counting(*pages) as server:
        assert _watch(file, server.url, "--for", "0.05") == 3
    said = _said(capsys)
    assert "fell by less than a tenth, which no restart explains" in said
    assert "or none that can be judged: see the warnings" in said


def test_two_targets_of_one_server_need_a_name(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [page + page.replace('"m"', '"n"') for page in (BEGIN, FALLEN[1])]
    with counting(*pages) as server:
        assert _watch(file, server.url, "--for", "0.05") == 2
    said = "counts verify steps of 2 targets, and golden acceptance is of one: m, n"
    assert said in _said(capsys)
    with counting(*pages) as server:
        assert _watch(file, server.url, "--until-alarm", "--model", "n") == 1


@pytest.mark.slow
def test_a_server_with_fewer_draft_tokens_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with counting(vllm_page(0, 0), vllm_page(20_000, 12_000)) as server:
        assert _watch(file, server.url, "--for", "0.05") == 2
    assert "drafts K = 1 tokens per verify step; golden acceptance is of K = 2" in _said(capsys)


def test_labels_are_as_they_were_before_the_page_wrote_them() -> None:
    page = Counters.parse('a{b="say \\"x\\\\n\\"\\nand }",c="é"} 1\n', "page")
    ((labels, _),) = page.samples["a"]
    assert labels == {"b": 'say "x\\n"\nand }', "c": "é"}


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--server", "--prometheus"])
def test_an_address_that_is_none_is_bad_input(
    file: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "--golden", str(file), "--engine", "vllm", option, "chat.example"]) == 2
    assert f"{option}: expected an address, got 'chat.example'" in _said(capsys)


@pytest.mark.slow
def test_a_refusal_of_the_server_is_bad_input(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with counting("secret") as server:
        server.status = 401
        assert _watch(file, server.url, "--for", "1") == 2
        assert "set DRAFTQUANT_SERVER_KEY" in _said(capsys)


@pytest.mark.slow
def test_warnings_of_a_prometheus_are_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial = json.loads(prometheus_answer(FALLEN[1])) | {"warnings": ["store X is down"]}
    with counting(prometheus_answer(BEGIN), json.dumps(partial)) as server:
        assert _prometheus(file, server.url, "--until-alarm") == 1
    assert "the Prometheus warns of 'store X is down'" in _said(capsys)


def test_an_idle_server_never_alarms() -> None:
    """Beginnings of a change are counted where verify steps are, and at most a day's at once."""
    limit = limit_of(golden().prompts, 0.01)
    idle = Evidence.beginning(len(limit.bets))
    for _ in range(3):
        idle = after(idle, limit, verify_steps=0, accepted=0, seconds=1000 * DAY)
    assert idle.log_mean == pytest.approx(Evidence.beginning(len(limit.bets)).log_mean)
    once = after(idle, limit, verify_steps=1, accepted=1, seconds=DAY)
    later = after(idle, limit, verify_steps=1, accepted=1, seconds=1000 * DAY)
    assert later.log_mean == once.log_mean


def _read_at(*times: float) -> Drift:
    """A watch that read at these times, 4,000 steps like golden's each."""
    found, total = detectors(), [0, 0, 0]
    drift = found.begin(where_they_stand(_page(total), VLLM, "page"), times[0])
    for now in times[1:]:
        total = [a + b for a, b in zip(total, _as_golden(4000), strict=True)]
        drift, _ = found.read(drift, _page(total), now, "page")
    return drift


def test_a_clock_that_was_wrong_once_does_not_blind_a_watch() -> None:
    """A year ahead, and back: else no time would pass, and no change begin, for a year."""
    year = 365 * DAY
    assert _read_at(0, year, 60).read_at == 60
    right, wrong = _read_at(0, 30, 60, 120), _read_at(0, year, 60, 120)
    assert wrong.tallies[""].evidence.log_mean >= right.tallies[""].evidence.log_mean


def _key(*keys: str, to: Any) -> Callable[[dict[str, Any]], object]:
    def edit(state: dict[str, Any]) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = to

    return edit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_key("drift", "tallies", to={}), "expected evidence of all, got"),
        (
            _key("drift", "tallies", "", "verify_steps", to=-20_000),
            "verify_steps: -20000 cannot be",
        ),
        (_key("drift", "tallies", "", "accepted", to=1e20), "accepted: 1e+20 cannot be"),
        (_key("drift", "tallies", "", "evidence", "log_sums", to=[1e20] * 7), "log_sums: 1e+20"),
        (_key("drift", "read_at", to=-1e9), "read_at: -1e+09 cannot be"),
        (_key("drift", "sources", to={"{}": {"a": -3}}), "a: -3 cannot be"),
    ],
)
def test_a_state_that_cannot_be_is_refused(
    file: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    state = tmp_path / "watch.json"
    with counting(BEGIN, MANY) as server:
        words = ("--once", "--state", str(state))
        assert [_watch(file, server.url, *words) for _ in range(2)] == [3, 0]
        found = json.loads(state.read_text(encoding="utf-8"))
        edit(found)
        state.write_text(json.dumps(found), encoding="utf-8")
        capsys.readouterr()
        assert _watch(file, server.url, *words) == 2
    assert said in _said(capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_key("information", to=0), "2 blocks cannot know 0"),
        (_key("weighted", to=1e200), "weighted: 1e+200 cannot be"),
        (_key("candidate", "verify_steps", to=-5), "verify_steps: -5 cannot be"),
        (_key("blocks", to=0), "0 blocks cannot know"),
    ],
)
def test_a_state_of_a_canary_that_cannot_be_is_refused(
    file: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    state = tmp_path / "canary.json"
    pages = [vllm_page(*_as_golden(steps)) for steps in (0, 1000, 2000)]
    others = [vllm_page(*_as_golden(steps)) for steps in (0, 1001, 2001)]
    with counting(*pages) as baseline, counting(*others) as candidate:
        words = ("--once", "--state", str(state))
        codes = [_canary(file, baseline.url, candidate.url, *words) for _ in range(3)]
        assert codes == [3, 3, 3]
        found = json.loads(state.read_text(encoding="utf-8"))
        edit(found["canary"]["comparison"])
        state.write_text(json.dumps(found), encoding="utf-8")
        capsys.readouterr()
        assert _canary(file, baseline.url, candidate.url, *words) == 2
    assert said in _said(capsys)


@pytest.mark.slow
def test_a_webhook_that_never_ends_its_answer_holds_no_watch(file: Path) -> None:
    """The status says all; the rest of the answer is not waited for."""
    began = time.process_time()
    with counting("") as hook, counting(*FALLEN) as server:
        hook.endless = True
        assert _watch(file, server.url, "--until-alarm", "--webhook", hook.url) == 1
        assert len(hook.posted) == 1
    assert time.process_time() - began < 60


@pytest.mark.slow
@pytest.mark.parametrize("other", ["/v1", "/v1/", "/"])
def test_one_server_is_no_canary_however_it_is_written(
    file: Path, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "http://127.0.0.1:9"
    assert _canary(file, url, url.upper().replace("HTTP", "http") + other) == 2
    assert "is the same server as --server" in _said(capsys)


def test_one_server_under_two_names_is_found_by_its_counters(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with counting(BEGIN, BEGIN, MANY) as server:
        other = server.url.replace("127.0.0.1", "localhost")
        assert _canary(file, server.url, other, "--for", "5") == 2
    assert "it is the same server, or answers copies of its requests" in _said(capsys)


@pytest.mark.slow
def test_a_counter_that_is_none_ends_no_canary(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = BEGIN.replace(" 0\n", " NaN\n")
    with counting(BEGIN, MANY) as baseline, counting(BEGIN, none, LOST) as candidate:
        assert _canary(file, baseline.url, candidate.url, "--for", "5") == 1
    assert "no reading: http" in _said(capsys)
