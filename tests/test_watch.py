"""`watch`: fair bets, counters through restarts, and the verb with a server and a state."""

import dataclasses
import functools
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from counting_server import counting, prometheus_answer, vllm_page
from draftquant.scripts.cli import main
from draftquant.validate.errors import GoldenError, MeasureError, WatchError
from draftquant.validate.golden.golden import Golden
from draftquant.validate.golden.golden_file import golden_document
from draftquant.validate.golden.golden_sources import golden_of_replay
from draftquant.validate.measure.protocols.counters import Counters
from draftquant.validate.measure.protocols.engine_counters import ENGINE_COUNTERS
from draftquant.validate.monitoring.bets import limit_of
from draftquant.validate.monitoring.counter_stream import counted_since, where_they_stand
from draftquant.validate.monitoring.drift import Detectors, Drift, Reading
from draftquant.validate.monitoring.e_detector import DAY, Evidence, after
from draftquant.validate.monitoring.webhook import Webhook
from handmade_replays import replay

VLLM = ENGINE_COUNTERS["vllm"]
RNG = np.random.default_rng(0)
HISTOGRAMS = [tuple(map(int, RNG.multinomial(40, RNG.dirichlet([8, 4, 8])))) for _ in range(100)]
"""100 requests of 40 steps, K = 2; they differ more than their steps alone would make them."""


@functools.cache
def golden(categories: str = "a") -> Golden:
    return golden_of_replay(replay(HISTOGRAMS, categories=categories), draft_sha256="5" * 64)


def detectors(**given: str) -> Detectors:
    found = golden("ab" if "category_label" in given else "a")
    return Detectors.of(found, VLLM, max_drop=0.01, alpha=0.01, **given)


def test_each_bet_is_fair_for_the_requests_of_golden() -> None:
    limit = limit_of(golden().prompts, 0.01)
    assert [bet.stake for bet in limit.bets] == sorted(bet.stake for bet in limit.bets)
    steps = np.array([sum(one) for one in HISTOGRAMS])
    below = (limit.golden - 1) * steps - np.array([one[1] + 2 * one[2] for one in HISTOGRAMS])
    for bet in limit.bets:
        assert np.exp(bet.stake * below - bet.price * steps).mean() == pytest.approx(1)
    smallest = limit.bets[0]  # the bound of sub-Gaussian sums, where stakes are small
    assert smallest.price == pytest.approx(smallest.stake**2 * limit.variance / 2, rel=0.02)
    own = golden().all
    assert own.design_effect is not None
    assert limit.variance == pytest.approx(own.variance_of_step * own.design_effect)


def test_the_limit_is_below_what_golden_itself_does_not_know() -> None:
    limit, own = limit_of(golden().prompts, 0.01), golden().all
    assert own.standard_error is not None
    low = own.mean_acceptance_length - 1.96 * own.standard_error
    assert limit.lowest == pytest.approx(0.99 * low, rel=1e-5)
    assert limit.drop == pytest.approx(1 - 0.99 * low / own.mean_acceptance_length, rel=1e-3)


def test_golden_of_one_prompt_says_too_little() -> None:
    alone = golden_of_replay(replay(HISTOGRAMS[:1]), draft_sha256=None)
    alike = golden_of_replay(replay([(0, 0, 9), (0, 0, 9)]), draft_sha256=None)
    for found in (alone, alike):
        with pytest.raises(GoldenError, match="does not say how much requests differ"):
            limit_of(found.prompts, 0.01)


def test_without_a_change_the_mean_of_the_evidence_is_what_was_spent() -> None:
    """E[M] at any time is at most the weights so far: half at the beginning, and half a day."""
    limit = dataclasses.replace(
        limit_of(golden().prompts, 0.01), lowest=golden().all.mean_acceptance_length
    )
    few = dataclasses.replace(
        limit, bets=limit.bets[:4]
    )  # of larger stakes the mean needs more runs
    rng, found = np.random.default_rng(1), []
    for _ in range(200):
        evidence = Evidence.beginning(len(few.bets))
        for one in rng.integers(len(HISTOGRAMS), size=20):
            _, once, twice = HISTOGRAMS[one]
            accepted = once + 2 * twice
            evidence = after(evidence, few, verify_steps=40, accepted=accepted, seconds=DAY / 20)
        found.append(math.exp(evidence.log_mean))
    assert np.mean(found) == pytest.approx(1, abs=4 * np.std(found) / 200**0.5)


def _reads(
    found: Detectors, readings: Sequence[tuple[int, int, int]]
) -> tuple[Drift, list[Reading]]:
    """Readings of so many more steps and accepted tokens at both positions, a minute each."""
    total, seen = np.zeros(3), []
    drift = found.begin(where_they_stand(_page(total), VLLM, "page"), 0)
    for i, one in enumerate(readings):
        total += one
        drift, reading = found.read(drift, _page(total), 60 * (i + 1), "page")
        seen.append(reading)
    return drift, seen


def _page(total: Sequence[float] | np.ndarray, **labels: str) -> Counters:
    return Counters.parse(vllm_page(*total, **labels), "page")


def _as_golden(steps: int, change: float = 0.0) -> tuple[int, int, int]:
    """A reading with golden's mean, or with a change of it."""
    own = golden().all
    first, second = own.acceptance_rates
    less = -change * own.mean_acceptance_length * steps / 2
    return steps, round(first * steps - less), round(second * steps - less)


def test_a_fall_alarms_and_golden_does_not() -> None:
    drift, seen = _reads(detectors(), [_as_golden(4000)] * 30)
    assert not any(one.fallen for one in seen)
    assert seen[-1].categories[""].evidence < 1
    assert seen[-1].categories[""].all_verify_steps == 120_000
    drift, seen = _reads(detectors(), [*[_as_golden(4000)] * 10, *[_as_golden(4000, -0.06)] * 10])
    alarms = [i for i, one in enumerate(seen) if one.fallen]
    assert 10 <= alarms[0] < 17
    fall = seen[alarms[0]].categories[""].fall
    assert fall is not None
    assert fall.seconds == 60 * (alarms[0] - 9)  # since the reading in which it began
    assert fall.mean_acceptance_length == pytest.approx(
        0.94 * golden().all.mean_acceptance_length, rel=1e-3
    )
    assert drift.tallies[""].evidence.log_mean < math.log(detectors().alarm_at)  # it begins again
    assert seen[alarms[0]].categories[""].alarm_at == 100


def test_a_gain_and_an_idle_night_are_no_fall() -> None:
    _, seen = _reads(detectors(), [_as_golden(4000, 0.2)] * 5 + [(0, 0, 0)] * 5)
    assert not any(one.fallen for one in seen)
    assert seen[-1].categories[""].acceptance_length is None
    assert seen[-1].verify_steps == 0


def test_categories_share_the_false_alarms() -> None:
    found = detectors(category_label="job")
    assert (list(found.limits), found.alarm_at) == (["a", "b"], 200)
    pages = [
        Counters.parse(
            vllm_page(*a, job="a") + vllm_page(*b, job="b") + vllm_page(*other, job="x"), "page"
        )
        for a, b, other in [((0, 0, 0),) * 3, (_as_golden(9000), _as_golden(9000, -0.3), (7, 0, 0))]
    ]
    drift = found.begin(where_they_stand(pages[0], VLLM, "page"), 0)
    _, reading = found.read(drift, pages[1], 60, "page")
    assert list(reading.fallen) == ["b"]
    assert reading.problems == (
        "job='x' is no category of golden: its verify steps are not judged",
    )
    unnamed = replay(HISTOGRAMS[:2])
    nobody = [dataclasses.replace(one, category="") for one in unnamed.prompts]
    unnamed = dataclasses.replace(unnamed, prompts=tuple(nobody))
    with pytest.raises(GoldenError, match="golden has no categories"):
        Detectors.of(
            golden_of_replay(unnamed, draft_sha256=None),
            VLLM, category_label="job", max_drop=0.01, alpha=0.01,
        )  # fmt: skip


def test_a_server_that_begins_again_is_counted_from_0() -> None:
    before = where_they_stand(_page((100, 60, 30), engine="0"), VLLM, "page")
    again = counted_since(before, _page((20, 12, 31), engine="0"), VLLM, "page")
    assert VLLM.read(again.increments) is not None
    assert again.increments.total(VLLM.verify_steps.name) == 20
    assert again.increments.by_label(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"
    ) == {"0": 12, "1": 31}  # all of them, though one is above what it was
    assert again.fallen == ('page: counts from 0 again: {"engine": "0", "model_name": "m"}',)
    both = Counters.parse(
        vllm_page(110, 66, 33, engine="0") + vllm_page(500, 300, 100, engine="1"), "page"
    )
    found = counted_since(before, both, VLLM, "page")
    assert found.increments.total(VLLM.verify_steps.name) == 10  # the second one is new
    alone = counted_since(found.sources, _page((510, 300, 100), engine="1"), VLLM, "page")
    later = Counters.parse(
        vllm_page(115, 66, 33, engine="0") + vllm_page(50, 30, 10, engine="1"), "page"
    )
    back = counted_since(alone.sources, later, VLLM, "page")  # the first one was missing once
    assert [one.split(": ", 2)[2] for one in back.fallen] == ['{"engine": "1", "model_name": "m"}']
    assert back.increments.total(VLLM.verify_steps.name) == 5 + 50


def test_replicas_that_are_gone_are_forgotten_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftquant.validate.monitoring.counter_stream._MOST_MISSING", 3)
    sources = where_they_stand(_page((1, 1, 1), pod="0"), VLLM, "page")
    for pod in "12345":
        sources = counted_since(sources, _page((1, 1, 1), pod=pod), VLLM, "page").sources
    assert [json.loads(one)["pod"] for one in sources] == ["2", "3", "4", "5"]


@pytest.mark.parametrize("value", ["-1", "NaN", "+Inf"])
def test_what_is_no_count_is_refused(value: str) -> None:
    page = Counters.parse(f'vllm:spec_decode_num_drafts_total{{a="b"}} {value}\n', "page")
    with pytest.raises(MeasureError, match="expected a count of 0 or more"):
        where_they_stand(page, VLLM, "page")


def test_more_accepted_than_drafted_is_not_judged() -> None:
    _, (reading,) = _reads(detectors(), [(10, 30, 0)])
    assert "30 tokens accepted in 10 verify steps of K = 2 cannot be" in reading.problems[0]
    assert reading.verify_steps == 0


def test_a_server_with_another_k_is_refused() -> None:
    with pytest.raises(WatchError, match=r"drafts K = 3 tokens per verify step; .* K = 2"):
        detectors().check_positions(_page((9, 3, 2, 1)), "page")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "G.json"
    path.write_text(golden_document(golden()), encoding="utf-8")
    return path


def _watch(file: Path, url: str, *words: str) -> int:
    own = ["--golden", str(file), "--server", url, "--every", "0.001"]
    return main(["watch", *own, *([] if "--engine" in words else ["--engine", "vllm"]), *words])


FALLEN = [vllm_page(0, 0, 0), vllm_page(*_as_golden(20_000, -0.2))]


def test_the_command_ends_with_an_alarm(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with counting(*FALLEN) as server:
        assert _watch(file, server.url, "--until-alarm", "--json") == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["reading", "alarm", "end"]
    assert lines[0]["categories"][0]["verify_steps"] == 20_000
    assert lines[0]["categories"][0]["evidence"] > 100
    assert (lines[1]["category"], lines[1]["verify_steps"]) == ("", 20_000)
    assert lines[1]["change"] == pytest.approx(-0.2, abs=1e-3)
    assert lines[2] == {
        "event": "end", "outcome": "ALARM", "readings": 1, "missed": 0, "alarms": 1, "problem": ""
    }  # fmt: skip


def test_the_command_ends_after_its_time(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with counting(FALLEN[0], vllm_page(*_as_golden(20_000))) as server:
        assert _watch(file, server.url, "--for", "0.3s", "--every", "0.1") == 0
    out = capsys.readouterr().out
    assert "in 20,000 verify steps" in out
    assert out.endswith("NO ALARM\n")
    with counting(FALLEN[0]) as server:
        assert _watch(file, server.url, "--for", "0.3", "--every", "0.1") == 3
    assert "no verify step was counted between the readings" in capsys.readouterr().out


def test_a_watch_goes_on_from_its_state(file: Path, tmp_path: Path) -> None:
    state = tmp_path / "watch.json"
    words = ("--once", "--state", str(state), "--quiet")
    with counting(*FALLEN) as server:
        assert _watch(file, server.url, *words) == 3
        begun = json.loads(state.read_text(encoding="utf-8"))
        assert begun["drift"]["sources"] != {}
        assert _watch(file, server.url, *words) == 1
        assert _watch(file, server.url, *words) == 3  # nothing more was counted
    after_it = json.loads(state.read_text(encoding="utf-8"))
    assert after_it["drift"]["tallies"][""]["verify_steps"] == 20_000
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".json"] == []


@pytest.mark.slow
def test_a_watch_that_is_killed_at_any_moment_goes_on(file: Path, tmp_path: Path) -> None:
    """Six kills; the state is whole after each, and no verify step is lost or counted twice."""
    state, rng, total = tmp_path / "watch.json", np.random.default_rng(0), np.zeros(3)
    with counting(vllm_page(*total)) as server:
        assert _watch(file, server.url, "--once", "--state", str(state), "--quiet") == 3
        for _ in range(6):
            before = state.stat().st_mtime_ns
            process = subprocess.Popen(
                [sys.executable, "-m", "draftquant", "watch", "--golden", str(file),
                 "--server", server.url, "--engine", "vllm", "--every", "0.002",
                 "--state", str(state)],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            while state.stat().st_mtime_ns == before:
                assert process.poll() is None
                time.sleep(0.01)
            for _ in range(10):
                total += _as_golden(100)
                server.page = vllm_page(*total)
                time.sleep(0.02 * float(rng.random()))
            process.kill()
            process.wait()
            json.loads(state.read_text(encoding="utf-8"))
        _watch(file, server.url, "--once", "--state", str(state), "--quiet")
    tally = json.loads(state.read_text(encoding="utf-8"))["drift"]["tallies"][""]
    assert tally["verify_steps"] == total[0] == 6_000


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (None, ["--max-drop", "5%"], "limits is"),
        (None, ["--alpha", "0.5"], "alpha is '0.01' there, and '0.5' here"),
        (None, ["--model", "m"], "model is 'all' there, and 'm' here"),
        ("{}", [], "expected format 'draftquant watch', got None"),
        ("[", [], "is no state of a watch"),
    ],
)
def test_a_state_of_another_watch_is_refused(
    file: Path, tmp_path: Path, text: str | None, words: list[str], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    state = tmp_path / "watch.json"
    with counting(*FALLEN) as server:
        if text is None:
            assert _watch(file, server.url, "--once", "--state", str(state)) == 3
        else:
            state.write_text(text, encoding="utf-8")
        before = state.read_bytes()
        assert _watch(file, server.url, "--once", "--state", str(state), *words) == 2
    assert state.read_bytes() == before
    error = " ".join(capsys.readouterr().err.split())
    assert said in error
    assert "give a file that does not exist yet" in error


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("page", "words", "said"),
    [
        ("vllm:generation_tokens_total 3\n", [], "has no counter vllm:spec_decode_num_drafts"),
        ("<html>no</html>", [], "expected counters of Prometheus"),
        (vllm_page(-1, 0, 0), [], "expected a count of 0 or more"),
        (vllm_page(9, 1, 1, 1), [], "drafts K = 3 tokens per verify step"),
        (vllm_page(9, 1, 1), ["--model", "other"], "counts no verify step of 'other', but of m"),
        (vllm_page(9, 1, 1), ["--category", "x"], "golden has no category 'x'"),
        (vllm_page(9, 1, 1), ["--once"], "needs --state"),
        (vllm_page(9, 1, 1), ["--max-drop", "0"], "expected a share in (0, 1)"),
        (vllm_page(9, 1, 1), ["--once", "--state", "/nowhere/s.json"], "does not exist"),
    ],
)
def test_what_cannot_be_watched_is_named(
    file: Path, page: str, words: list[str], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with counting(page) as server:
        assert _watch(file, server.url, *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_server_that_does_not_answer_is_no_bad_input(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(_seconds: float) -> None:
        """No pause between attempts."""

    monkeypatch.setattr("asyncio.sleep", at_once)
    with counting("") as server:
        server.status = 503
        assert _watch(file, server.url, "--for", "1", "--json") == 3
    (end,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (end["outcome"], "503" in end["problem"]) == ("NOT ENOUGH", True)


def test_a_reading_that_is_missed_is_made_up_for(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with counting(FALLEN[0], "<html>restarting</html>", FALLEN[1]) as server:
        assert _watch(file, server.url, "--until-alarm", "--json") == 1
    found = capsys.readouterr()
    lines = [json.loads(line) for line in found.out.splitlines()]
    assert [line["event"] for line in lines] == ["missed", "reading", "alarm", "end"]
    assert "warning: no reading" in found.err
    assert lines[-1]["missed"] == 1


def _prometheus(file: Path, url: str, *words: str) -> int:
    own = ["--golden", str(file), "--prometheus", url, "--engine", "vllm", "--every", "0.001"]
    return main(["watch", *own, *words])


def test_counters_that_a_prometheus_scraped_are_watched_alike(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with counting(*map(prometheus_answer, FALLEN)) as server:
        words = ("--selector", ' job="vllm", zone=~"a|b", ', "--until-alarm", "--json")
        assert _prometheus(file, server.url, *words) == 1
        (first, _) = server.asked
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["reading", "alarm", "end"]
    assert lines[0]["categories"][0]["verify_steps"] == 20_000
    asked = parse_qs(urlsplit(first).query)["query"]
    assert urlsplit(first).path == "/api/v1/query"
    assert asked == ['{__name__=~"' + "|".join(VLLM.names) + '",job="vllm", zone=~"a|b"}']


@pytest.mark.parametrize(
    ("answer", "words", "said"),
    [
        ('{"status": "error", "error": "parse error"}', [], "expected an instant vector"),
        ('{"status": "success", "data": {"result": [{"metric": {}}]}}', [], "instant vector"),
        ('{"status": "success", "data": {"result": []}}', [], "has no counter vllm:spec_decode"),
        (prometheus_answer(FALLEN[1]), ["--selector", 'job="a"} or {x="y"'], "expected labels"),
        (prometheus_answer(FALLEN[1]), ["--selector", 'a="b", __name__="up"'], "has __name__"),
    ],
)
def test_what_is_no_prometheus_is_named(
    file: Path, answer: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with counting(answer) as server:
        assert _prometheus(file, server.url, "--for", "0.01", *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_alarm_is_posted_to_the_webhook(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with counting("") as hook, counting(*FALLEN) as server:
        url = f"{hook.url}/secret"
        assert _watch(file, server.url, "--until-alarm", "--json", "--webhook", url) == 1
        (posted,) = hook.posted
    found = capsys.readouterr()
    assert json.loads(posted) == json.loads(found.out.splitlines()[1])
    assert "warning" not in found.err


def test_a_webhook_that_takes_nothing_ends_no_watch() -> None:
    pauses: list[float] = []
    with counting("") as hook:
        hook.status = 500
        said = Webhook(f"{hook.url}/secret").send({"event": "alarm"}, pauses.append)
        assert len(hook.posted) == 3
    assert pauses == [2.0, 4.0]
    assert said == ("the webhook at 127.0.0.1 did not take the alarm, 3 attempts: status 500")
    gone = Webhook(f"{hook.url}/secret").send({}, pauses.append)
    assert gone is not None
    assert "secret" not in gone


def test_an_address_that_is_none_is_no_webhook(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _watch(file, "http://127.0.0.1:9", "--webhook", "chat.example/secret") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--webhook: expected an address that begins with http://" in said
    assert "secret)" in said
    assert "/secret" not in said


def test_the_engine_of_a_replay_must_be_named(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "--server", "http://127.0.0.1:9", "--golden", str(file)]) == 2
    assert "does not say whose counters" in " ".join(capsys.readouterr().err.split())
