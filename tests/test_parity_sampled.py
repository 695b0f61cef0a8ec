"""Drawn output scored by its target: the real one, servers that answer well and badly, verdicts."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftquant.calibration.prompts.prompt_file import Prompt
from draftquant.calibration.server_client import Patience
from draftquant.recipes.errors import ParityError, TraceError
from draftquant.scripts.cli import main
from draftquant.validate.measure.measurement import Measurement
from draftquant.validate.measure.vllm_server import VLLMProtocol
from draftquant.validate.parity import sampled_findings as scored
from draftquant.validate.parity.finding import ParityFinding, limits
from draftquant.validate.parity.sampled_findings import (
    ScoringEngine,
    Text,
    check_sampled,
    sampled_finding,
    score_by_server,
    score_by_target,
    texts_of,
)
from handmade_measurements import written
from handmade_runs import SPECULATION, record, run
from scipy import stats
from stand.server import Object, Stand, served
from transformers import AutoModelForCausalLM
from vllm_server import VLLMServer

TARGET = Path(__file__).parent / "pairs" / "eagle3-llama" / "target"
CPU = torch.device("cpu")
TEXTS = [
    Text(id="a", prompt=(5, 6, 7), output=(8, 9, 10, 11)),
    Text(id="b", prompt=(3,), output=(4,)),
]
NOISE = [0.1 * (i % 3 - 1) for i in range(60)]

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the target itself


@pytest.mark.parametrize("max_logits", [1, 2**26])
def test_scores_are_log_probabilities_of_the_next_token(
    max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored, "_MAX_LOGITS", max_logits)
    seen: list[tuple[int, int]] = []
    shown: Any = {"device": CPU, "on_progress": lambda *at: seen.append(at)}
    found = score_by_target(TARGET, TEXTS, dtype=torch.float32, **shown)
    assert seen == [(done, len(TEXTS)) for done in range(1, len(TEXTS) + 1)]
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
class Scoring(Stand):
    """Scores token t of a prompt with -t / 100, in the form of vLLM or SGLang; is known as vLLM."""

    vllm: VLLMServer = field(default_factory=lambda: VLLMServer(num_draft_tokens=None))
    edit: Callable[[list[Any]], Any] = lambda _entries: None

    def get(self, path: str) -> object:
        answer = self.vllm.get(path)
        if answer is None:
            raise KeyError(path)
        return answer

    def post(self, path: str, body: Object) -> list[Object]:
        if body.get("stream"):
            return self.vllm.lines(path, body, 1)[:-1]
        if path == "/generate":
            assert body["logprob_start_len"] == 0
            entries: list[Any] = [[-t / 100, t, None] for t in body["input_ids"]]
            entries[0][0] = None
            self.edit(entries)
            return [{"meta_info": {"input_token_logprobs": entries}}]
        rest = {"999": {"logprob": -1}}
        entries = [{str(t): {"logprob": -t / 100, "rank": 1}} | rest for t in body["prompt"]]
        entries[0] = None
        self.edit(entries)
        return [{"choices": [{"prompt_logprobs": entries}]}]


@pytest.fixture(autouse=True)
def _identified_as_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers is the protocols' matter; here it is how SGLang is asked for scores."""
    monkeypatch.setattr(scored, "get_protocol", lambda _engine: VLLMProtocol())


ONCE = Patience(attempts=1, seconds=60)


def scores_of(stand: Stand, engine: ScoringEngine, count: int = 1, **options: Any) -> list[Any]:
    with served(stand):
        return score_by_server(stand.url, engine, TEXTS[:count], patience=ONCE, **options)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_scores_prompt_and_output_as_one_prompt(engine: ScoringEngine) -> None:
    done: list[tuple[int, int]] = []
    found = scores_of(Scoring(), engine, 2, on_progress=lambda *x: done.append(x))
    assert found == [(-0.08, -0.09, -0.1, -0.11), (-0.04,)]
    assert done == [(1, 2), (2, 2)]
    stand = Scoring(change=lambda events: events if len(events) > 1 else [{"choices": [{}]}])
    with pytest.raises(ParityError, match="of 7 tokens of the prompt, got None"):
        scores_of(stand, engine)


def test_answers_that_are_no_scores() -> None:
    """By the last entry of one; `...` = it is absent."""
    stand = Scoring()
    with served(stand):
        for engine, entry in (
            *(("vllm", entry) for entry in (None, {"12": {"logprob": -1}}, ...)),
            *(("vllm", {"11": {"logprob": value}}) for value in (-9999.0, 0.5, True, math.nan)),
            *(("sglang", entry) for entry in (..., [-0.1, 12, None], [-0.1], None)),
        ):
            stand.edit = lambda entries, entry=entry: (  # type: ignore[misc]
                entries.pop() and entries.extend([entry] * (entry is not ...))
            )
            with pytest.raises(ParityError):
                score_by_server(stand.url, engine, TEXTS[:1], patience=ONCE)


# ---- verdicts


def drawn(
    count: int, *, drafts: bool = False, told: float | None = None, **asked: Any
) -> Measurement:
    own = None if told is None else (told,) * 3
    records = [record(i, (1, 2, 3), token_logprob=own) for i in range(count)]
    speculation = SPECULATION if drafts else None
    return run(records, name="ql"[drafts], speculation=speculation, **{"temperature": 1.0} | asked)


def judge(
    changes: Sequence[float],
    limit: float | None,
    told: float | None = None,
    other: Measurement | None = None,
    **asked: Any,
) -> ParityFinding:
    """Each prompt's three tokens become so much more likely."""
    return sampled_finding(
        drawn(len(changes), told=told, **asked),
        other or drawn(len(changes), drafts=True, **asked),
        ([(-1.0, -2.0, -3.0)] * len(changes), [(-1.0 + x, -2.0 + x, -3.0 + x) for x in changes]),
        max_logprob_drop=limits("--max-logprob-drop", limit, least=-1, most=1),
        confidence=0.95,
    )


def test_the_change_is_paired_by_prompt() -> None:
    changes = [0.01 * (i % 5) - 0.03 for i in range(40)]
    found = judge(changes, 0.05)
    error = stats.t.ppf(0.95, 39) * stats.sem(changes)
    assert (found.lower, found.upper) == pytest.approx((-0.01 - error, -0.01 + error))
    assert (found.verdict, found.threshold) == ("PASS", -0.05)
    assert found.details[0]["plain"] == pytest.approx(-2.0)
    assert found.details[0]["speculative"] == pytest.approx(-2.01)
    for shift, limit, verdict in (
        (-1.5, 0.1, "FAIL"), (1.5, 0.1, "FAIL"), (-0.1, 0.1, "INCONCLUSIVE"), (0, 0.1, "PASS"),
        (0, None, "INCONCLUSIVE"),
    ):  # fmt: skip
        assert judge([x + shift for x in NOISE], limit).verdict == verdict
    assert judge(NOISE[:9], 0.1).verdict == "INCONCLUSIVE"


def test_a_scorer_that_is_not_the_server_is_doubted() -> None:
    assert judge(NOISE, 0.1, told=-2.0).verdict == "ANOMALOUS"
    assert judge(NOISE, 0.1, told=-2.0, top_p=0.9).verdict == "PASS"  # another distribution
    lossy = replace(SPECULATION, lossy=("threshold = 0.9",))
    relaxed = run(drawn(60).records, speculation=lossy, temperature=1.0)
    assert judge([0.0] * 60, 0.1, other=relaxed).verdict == "ANOMALOUS"


def test_prompts_without_output_and_copies() -> None:
    records = [record(0, (1,)), record(0, (2,), id="copy"), record(1, ()), record(2, (3,))]
    plain = run(records, temperature=1.0)
    other = run(records, speculation=SPECULATION, temperature=1.0)
    prompts = [Prompt(id=f"{i}", category="a", token_ids=(i,)) for i in range(3)]
    texts = [(text.id, text.prompt, text.output) for text in texts_of(plain, prompts)]
    assert texts == [("p0", (0,), (1,)), ("copy", (0,), (2,)), ("p2", (2,), (3,))]
    asked: dict[str, Any] = {"max_logprob_drop": limits("--x", None), "confidence": 0.95}
    scores = [(-1.0,), (-3.0,), (-1.0,)], [(-2.0,), (-2.0,), (-3.0,)]
    found = sampled_finding(plain, other, scores, **asked)
    assert (found.details[0]["prompts"], found.estimate) == (2, pytest.approx(-1.0))
    empty = run([record(0, ())], temperature=1.0)
    with pytest.raises(ParityError, match="no prompt has output in both runs"):
        sampled_finding(empty, empty, ([], []), **asked)
    with pytest.raises(ParityError, match="2 of its prompts are not in the prompt file"):
        texts_of(plain, prompts[1:])


def test_runs_that_cannot_be_compared() -> None:
    for plain, other in (
        (drawn(3), drawn(3, drafts=True, top_p=0.9)),
        (drawn(3, temperature=0), drawn(3, drafts=True, temperature=0)),
        (drawn(3), drawn(3)),
        (drawn(3, drafts=True), drawn(3)),
    ):
        with pytest.raises(ParityError):
            check_sampled(plain, other)


def test_the_command(tmp_path: Path) -> None:
    """Of equal outputs; the target scores them."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "category": "ab"[i % 2], "token_ids": [i]} for i in range(30)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    files = []
    for drafts in (False, True):
        made = drawn(30, drafts=drafts, max_new_tokens=3)
        steps = (2, 0, 0, 0) if drafts else None
        told = replace(made, records=tuple(replace(r, histogram=steps) for r in made.records))
        files.append(str(written(tmp_path / f"{drafts}.jsonl", told)))
    command = ["parity", "sampled", *files, "--prompts", str(prompts)]
    scoring = [*command, "--target", str(TARGET), "--max-logprob-drop"]
    assert main([*scoring, "0.1", "--json"]) == 0
    assert main([*scoring, "-1"]) == 2
    prompts.write_text('{"id": "p0", "category": "a", "text": "x"}\n', encoding="utf-8")
    assert main([*scoring, "0.1"]) == 2  # by the target's own tokenizer
    assert main(command) == 2
