"""Drawn output scored by its target: the real one, servers that answer well and badly, verdicts."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.server_client import Patience
from draftquant.recipes.errors import ParityError, TraceError
from draftquant.scripts.cli import main
from draftquant.validate.measure.measurement import Measurement
from draftquant.validate.measure.measurement_file import line_of
from draftquant.validate.measure.vllm_server import VLLMProtocol
from draftquant.validate.parity import sampled_findings as scored
from draftquant.validate.parity.finding import Finding, limits
from draftquant.validate.parity.sampled_findings import (
    Text,
    check_sampled,
    sampled_finding,
    score_by_server,
    score_by_target,
    texts_of,
)
from handmade_runs import SPECULATION, record, run
from local_http import listening
from scipy import stats
from transformers import AutoModelForCausalLM
from vllm_server import VLLMServer

TARGET = Path(__file__).parent / "pairs" / "eagle3-llama" / "target"
CPU = torch.device("cpu")
TEXTS = [
    Text(id="a", prompt=(5, 6, 7), output=(8, 9, 10, 11)),
    Text(id="b", prompt=(3,), output=(4,)),
]

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the target itself


@pytest.mark.parametrize("max_logits", [1, 2**26])
def test_scores_are_log_probabilities_of_the_next_token(
    max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored, "_MAX_LOGITS", max_logits)
    found = score_by_target(TARGET, TEXTS, dtype=torch.float32, device=CPU)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    for text, scores in zip(TEXTS, found, strict=True):
        for i, score in enumerate(scores):  # one call for each token
            before = torch.tensor([[*text.prompt, *text.output[:i]]])
            with torch.no_grad():
                logprobs = model(before).logits[0, -1].log_softmax(-1)
            assert score == pytest.approx(float(logprobs[text.output[i]]), abs=1e-4)


def test_targets_that_cannot_score(tmp_path: Path) -> None:
    strange = [Text(id="x", prompt=(1,), output=(5000,))]
    with pytest.raises(ParityError, match=r"prompt x: token 5000 is not of its 1,024"):
        score_by_target(TARGET, strange, dtype=torch.float32, device=CPU)
    with pytest.raises(TraceError, match="give the local folder of the target"):
        score_by_target(tmp_path, TEXTS, dtype=torch.float32, device=CPU)


# ---- servers


@dataclass
class ScoringServer:
    """A server that scores token t of a prompt with -t / 100, in the form of an engine.

    Attributes:
        change: of what it answers, before it is sent.
    """

    vllm: VLLMServer = field(default_factory=lambda: VLLMServer(num_draft_tokens=None))
    change: Callable[[Any], Any] = lambda answer: answer
    url: str = ""

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """Of one request that is not streamed."""
        if path == "/generate":
            ids = body["input_ids"]
            assert body["logprob_start_len"] == 0
            entries: list[Any] = [[-t / 100, t, None] for t in ids]
            return self.change(
                {"meta_info": {"input_token_logprobs": [[None, ids[0], None], *entries[1:]]}}
            )
        ids = body["prompt"]
        entries = [{str(t): {"logprob": -t / 100, "rank": 1}, "999": {"logprob": -1}} for t in ids]
        return self.change({"choices": [{"prompt_logprobs": [None, *entries[1:]]}]})


@contextmanager
def serving(server: ScoringServer) -> Iterator[ScoringServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = server.vllm.get(self.path)
            text = answer if isinstance(answer, str) else json.dumps(answer)
            self._send(404 if answer is None else 200, text)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body.get("stream"):
                events = server.vllm.events(body, 1)
                lines = [x if isinstance(x, str) else json.dumps(x) for x in events]
                self._send(200, "".join(f"data: {line}\n\n" for line in lines))
            else:
                self._send(200, json.dumps(server.answer(self.path, body)))

        def _send(self, status: int, text: str) -> None:
            self.send_response_only(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Quietly."""

    with listening(Handler) as server.url:
        yield server


HASTY = Patience(attempts=1, seconds=60)


def test_a_server_scores_prompt_and_output_as_one_prompt() -> None:
    done: list[tuple[int, int]] = []
    with serving(ScoringServer()) as server:
        found = score_by_server(
            server.url, "vllm", TEXTS, patience=HASTY, on_progress=lambda *x: done.append(x)
        )
    assert found == [(-0.08, -0.09, -0.1, -0.11), (-0.04,)]
    assert done == [(1, 2), (2, 2)]


@pytest.fixture
def _identified_as_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers is the protocols' matter; here it is how SGLang is asked for scores."""
    monkeypatch.setattr(scored, "get_protocol", lambda _engine: VLLMProtocol())


@pytest.mark.usefixtures("_identified_as_vllm")
def test_sglang_scores_by_its_native_interface() -> None:
    with serving(ScoringServer()) as server:
        found = score_by_server(server.url, "sglang", TEXTS, patience=HASTY)
    assert found == [(-0.08, -0.09, -0.1, -0.11), (-0.04,)]


@pytest.mark.usefixtures("_identified_as_vllm")
@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ([-0.1, 12, None], "log-probability of token 11, got -0.1"),
        ([None, 11, None], "log-probability of token 11, got None"),
        ([-0.1], "log-probability of token 11, got None"),
        (None, "log-probability of token 11, got None"),
    ],
)
def test_answers_of_sglang_that_are_no_scores(entry: object, what: str) -> None:
    def change(answer: Any) -> Any:
        answer["meta_info"]["input_token_logprobs"][-1] = entry
        return answer

    with serving(ScoringServer(change=change)) as server, pytest.raises(ParityError, match=what):
        score_by_server(server.url, "sglang", TEXTS[:1], patience=HASTY)
    empty = ScoringServer(change=lambda _: {"meta_info": {}})
    with serving(empty), pytest.raises(ParityError, match="of 7 tokens of the prompt, got None"):
        score_by_server(empty.url, "sglang", TEXTS[:1], patience=HASTY)


def test_no_server_is_asked_about_its_own_words() -> None:
    server = ScoringServer(vllm=VLLMServer(num_draft_tokens=3))
    with serving(server), pytest.raises(ParityError, match=r"uses a draft itself \(3 tokens\)"):
        score_by_server(server.url, "vllm", TEXTS, patience=HASTY)


def changed(edit: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
    """Edits the log-probabilities of an answer."""

    def change(answer: Any) -> Any:
        edit(answer["choices"][0]["prompt_logprobs"])
        return answer

    return change


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no choices": (lambda _: {}, "of 7 tokens of the prompt, got None"),
    "no logprobs": (lambda _: {"choices": [{}]}, "of 7 tokens of the prompt, got None"),
    "too few": (changed(lambda x: x.pop()), "of 7 tokens of the prompt, got 6"),
    "null": (changed(lambda x: x.__setitem__(-1, None)), "log-probability of token 11, got None"),
    "other token": (changed(lambda x: x.__setitem__(-1, {"12": {"logprob": -1}})),
                    "log-probability of token 11, got None"),
    "impossible": (changed(lambda x: x.__setitem__(-1, {"11": {"logprob": -9999.0}})),
                   "log-probability of token 11, got -9999.0"),
    "positive": (changed(lambda x: x.__setitem__(-1, {"11": {"logprob": 0.5}})), "got 0.5"),
    "true": (changed(lambda x: x.__setitem__(-1, {"11": {"logprob": True}})), "got True"),
    "nan": (changed(lambda x: x.__setitem__(-1, {"11": {"logprob": float("nan")}})), "got nan"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_answers_that_are_no_scores(case: str) -> None:
    change, what = BAD[case]
    with serving(ScoringServer(change=change)) as server, pytest.raises(ParityError, match=what):
        score_by_server(server.url, "vllm", TEXTS[:1], patience=HASTY)


# ---- verdicts


def drawn(
    count: int, *, drafts: bool = False, told: float | None = None, **asked: Any
) -> Measurement:
    records = [
        record(i, (1, 2, 3), token_logprob=None if told is None else (told,) * 3)
        for i in range(count)
    ]
    speculation = SPECULATION if drafts else None
    return run(records, name="ql"[drafts], speculation=speculation, **{"temperature": 1.0} | asked)


def judge(
    changes: Sequence[float], limit: float | None, told: float | None = None, **asked: Any
) -> Finding:
    """Each prompt's three tokens become so much more likely."""
    plain = [(-1.0, -2.0, -3.0)] * len(changes)
    speculative = [(-1.0 + x, -2.0 + x, -3.0 + x) for x in changes]
    return sampled_finding(
        drawn(len(changes), told=told, **asked),
        drawn(len(changes), drafts=True, **asked),
        (plain, speculative),
        max_logprob_drop=limits("--max-logprob-drop", limit, least=-1, most=1),
        confidence=0.95,
    )


def test_the_change_is_paired_by_prompt() -> None:
    changes = [0.01 * (i % 5) - 0.03 for i in range(40)]
    found = judge(changes, 0.05)
    error = stats.t.ppf(0.95, 39) * stats.sem(changes)
    assert found.estimate == pytest.approx(-0.01)
    assert found.lower == pytest.approx(-0.01 - error)
    assert found.upper == pytest.approx(-0.01 + error)
    assert (found.verdict, found.threshold) == ("PASS", -0.05)
    assert found.details[0]["plain"] == pytest.approx(-2.0)
    assert found.details[0]["speculative"] == pytest.approx(-2.01)


def test_neither_less_likely_nor_more() -> None:
    noise = [0.1 * (i % 3 - 1) for i in range(60)]
    assert judge([x - 1.5 for x in noise], 0.1).verdict == "FAIL"
    assert judge([x + 1.5 for x in noise], 0.1).verdict == "FAIL"
    assert judge([x - 0.1 for x in noise], 0.1).verdict == "INCONCLUSIVE"
    assert judge(noise, 0.1).verdict == "PASS"
    assert judge(noise, None).verdict == "INCONCLUSIVE"
    assert "no threshold was given (--max-logprob-drop)" in judge(noise, None).reason
    assert judge(noise[:9], 0.1).verdict == "INCONCLUSIVE"


def test_a_scorer_that_is_not_the_server_is_doubted() -> None:
    noise = [0.1 * (i % 3 - 1) for i in range(60)]
    assert judge(noise, 0.1, told=-2.0).verdict == "ANOMALOUS"  # 0.67 away
    assert "tokens differ by 0.67 nats on average" in judge(noise, 0.1, told=-2.0).reason
    assert judge(noise, 0.1, told=-2.0, top_p=0.9).verdict == "PASS"  # another distribution
    lossy = replace(SPECULATION, lossy=("threshold = 0.9",))
    plain = drawn(60)
    relaxed = run(plain.records, speculation=lossy, temperature=1.0)
    same = [(-1.0, -2.0, -3.0)] * 60
    found = sampled_finding(
        plain, relaxed, (same, same),
        max_logprob_drop=limits("--max-logprob-drop", 0.1, least=-1, most=1), confidence=0.95,
    )  # fmt: skip
    assert found.verdict == "ANOMALOUS"
    assert "threshold = 0.9" in found.reason


def test_prompts_without_output_and_copies() -> None:
    records = [record(0, (1,)), record(0, (2,), id="copy"), record(1, ()), record(2, (3,))]
    plain = run(records, temperature=1.0)
    other = run(records, speculation=SPECULATION, temperature=1.0)
    prompts = [Prompt(id=f"{i}", category="a", token_ids=(i,)) for i in range(3)]
    texts = texts_of(plain, prompts)
    assert [(text.id, text.prompt, text.output) for text in texts] == [
        ("p0", (0,), (1,)), ("copy", (0,), (2,)), ("p2", (2,), (3,)),
    ]  # fmt: skip
    found = sampled_finding(
        plain, other, ([(-1.0,), (-3.0,), (-1.0,)], [(-2.0,), (-2.0,), (-3.0,)]),
        max_logprob_drop=limits("--max-logprob-drop", None), confidence=0.95,
    )  # fmt: skip
    assert found.details[0]["prompts"] == 2
    assert found.estimate == pytest.approx(-1.0)
    empty = run([record(0, ())], temperature=1.0)
    with pytest.raises(ParityError, match="no prompt has output in both runs"):
        sampled_finding(
            empty, empty, ([], []), max_logprob_drop=limits("--x", None), confidence=0.95
        )
    with pytest.raises(ParityError, match="2 of its prompts are not in the prompt file"):
        texts_of(plain, prompts[1:2] + prompts[2:])


def test_runs_that_cannot_be_compared() -> None:
    for plain, other, what in (
        (drawn(3), drawn(3, drafts=True, top_p=0.9), "top-p: 1.0, 0.9"),
        (drawn(3, temperature=0), drawn(3, drafts=True, temperature=0), "chosen greedily"),
        (drawn(3), drawn(3), "drafts nothing"),
        (drawn(3, drafts=True), drawn(3), "uses a draft, but stands first"),
    ):
        with pytest.raises(ParityError, match=what):
            check_sampled(plain, other)


# ---- the command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of equal outputs; the target scores them."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "category": "ab"[i % 2], "token_ids": [i]} for i in range(30)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    files = []
    for drafts in (False, True):
        made = drawn(30, drafts=drafts, max_new_tokens=3)
        records = [replace(r, histogram=(2, 0, 0, 0) if drafts else None) for r in made.records]
        path = tmp_path / f"{drafts}.jsonl"
        path.write_text(line_of(made.setup) + "".join(map(line_of, records)), encoding="utf-8")
        files.append(str(path))
    command = ["parity", "sampled", *files, "--prompts", str(prompts)]
    scoring = [*command, "--target", str(TARGET)]
    assert main([*scoring, "--max-logprob-drop", "0.1", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["verdict"], found["estimate"]) == ("PASS", 0)
    assert main(scoring) == 3
    assert main([*command, "--score-server", "http://127.0.0.1:9", "--concurrency", "0"]) == 2
    assert "--concurrency: expected at least 1" in capsys.readouterr().err
    assert main([*scoring, "--max-logprob-drop", "-1"]) == 2
    capsys.readouterr()
    assert main(command) == 2
    assert (
        "--target: expected one who scores: --target or --score-server" in capsys.readouterr().err
    )
