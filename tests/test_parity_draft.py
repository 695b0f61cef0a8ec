"""Draft parity on shipped pairs, against the whole of it computed in one expression."""

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from by_recipe import draft_of
from draftquant.calibration.passes.draft_inputs import first_hidden
from draftquant.calibration.prompts.prompt_file import read_prompts
from draftquant.calibration.recording.decoding import GREEDY, Decoding
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.drafts.forward import whole_rows
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes.errors import ParityError
from draftquant.scripts.cli import main
from draftquant.validate.parity import draft_findings as module
from draftquant.validate.parity.draft_findings import (
    PromptAgreement,
    Quantity,
    check_limits,
    draft_agreement,
    draft_findings,
)
from draftquant.validate.parity.finding import DraftLimits, ParityFinding
from recorded import record_traces
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRS = Path(__file__).parent / "pairs"
K = {"eagle3-llama": 3, "dflash": 4}
TOP = 4


class Pair:
    """A shipped draft, its INT4 form and traces of a few prompts."""

    def __init__(self, name: str, folder: Path) -> None:
        self.k, self.source, self.quant = K[name], PAIRS / name / "draft", folder / "int4"
        self.target = PAIRS / name / "target"
        arguments = ["--recipe", "int4-channel", "--backend", "torch", "--out", str(self.quant)]
        assert main(["quantize", str(self.source), *arguments]) == 0
        prompts = read_prompts(PAIRS / name / "prompts.jsonl")[:3]
        aux = draft_of(self.source).geometry.aux_layer_ids
        drawn = Decoding(temperature=0.8, top_p=0.9)
        decodings = {"greedy": GREEDY} if self.k == 3 else {"drawn": drawn}
        self.traces: dict[str, TraceFolder] = {
            kind: record_traces(
                self.target, prompts, folder / kind, max_new_tokens=16,
                decoding=decoding, aux_layer_ids=aux, table_ids=(0,),
            )
            for kind, decoding in decodings.items()
        }  # fmt: skip

    def drafts(self, kind: str) -> tuple[LoadedDraft, LoadedDraft]:
        shared = self.traces[kind].tables(None, torch.device("cpu"))
        return load_draft(self.source, shared=shared), load_draft(self.quant, shared=shared)


@pytest.fixture(scope="module", params=["eagle3-llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


def all_logits(draft: LoadedDraft, traces: TraceFolder, trace: Any, rows: range, k: int) -> Tensor:
    """[R, K, V]."""
    logits = torch.zeros(len(rows), k, draft.forward.num_logits)
    for one in draft.forward.passes(first_hidden(draft, traces, trace)[None], trace.token_ids[None],
        rows=rows, num_draft_tokens=k,
    ):  # fmt: skip
        at = slice(one.rows.start - rows.start, one.rows.stop - rows.start)
        with torch.no_grad():
            logits[at, one.depths.start : one.depths.stop] = draft.forward.logits(one.hidden[0])
    return logits.double()


def expected(pair: Pair, kind: str) -> list[dict[Quantity, Tensor]]:
    """Every quantity from whole distributions in float64."""
    traces, (bf16, int4) = pair.traces[kind], pair.drafts(kind)
    found: list[dict[Quantity, Tensor]] = []
    for trace in traces:
        rows = whole_rows(trace.num_tokens, pair.k, first_row=trace.prompt_length - 1)
        b, q = (all_logits(draft, traces, trace, rows, pair.k) for draft in (bf16, int4))
        tokens = torch.stack([trace.token_ids[r + 2 : r + 2 + pair.k] for r in rows])
        p, other = b.softmax(-1), q.softmax(-1)
        kl = F.kl_div(other.log(), p, reduction="none").sum(-1)
        shared = torch.tensor(
            [[len(set(x) & set(y)) / TOP for x, y in zip(*both, strict=True)]
             for both in zip(*[x.topk(TOP).indices.tolist() for x in (b, q)], strict=True)]
        )  # fmt: skip
        sums: dict[Quantity, Tensor] = {
            "rows": torch.full((pair.k,), float(len(rows))),
            "divergence": kl.sum(0),
            "same_first": (b.argmax(-1) == q.argmax(-1)).sum(0),
            "same_top": shared.sum(0),
            "overlap": (1 - 0.5 * (p - other).abs().sum(-1)).sum(0),
            "proposable": torch.full((pair.k,), float(len(rows))),
        }
        for side, logits in (("baseline", b), ("candidate", q)):
            nll = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
            sums[f"surprise_{side}"] = nll.view(tokens.shape).sum(0)  # type: ignore[index]
            sums[f"right_{side}"] = (logits.argmax(-1) == tokens).sum(0)  # type: ignore[index]
            if kind == "drawn":
                drawn = (logits / 0.8).softmax(-1).gather(-1, tokens[..., None])[..., 0]
                assert trace.token_logprob is not None
                target = torch.stack(
                    [trace.token_logprob[r + 2 - trace.prompt_length :][: pair.k] for r in rows]
                )
                ratio = (drawn / target.double().exp()).clamp(max=1)
                sums[f"accepted_{side}"] = ratio.sum(0)  # type: ignore[index]
        found.append(sums)
    return found


@pytest.mark.parametrize("pair", ["eagle3-llama", "dflash"], indirect=True)
def test_sums_are_those_of_whole_distributions(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain greedily in single rows, of a block drawn and whole."""
    kind = "greedy" if pair.k == 3 else "drawn"
    monkeypatch.setattr(module, "MAX_LOGITS", 1 if pair.k == 3 else 2**26)
    found = draft_agreement(*pair.drafts(kind), pair.traces[kind], num_draft_tokens=pair.k, top=TOP)
    wanted = expected(pair, kind)
    assert len(found) == len(wanted) == 3
    for prompt, sums in zip(found, wanted, strict=True):
        assert prompt.sums.keys() == sums.keys()
        for name, each in sums.items():
            own = prompt.sums[name]
            torch.testing.assert_close(own, each.double(), rtol=1e-4, atol=1e-4, msg=name)


# ---- findings of sums made by hand


def prompt(i: int, **sums: float) -> PromptAgreement:
    """Two steps of 10 rows; the quantity of the second is a tenth of the first."""
    given: dict[Any, Tensor] = {
        name: torch.tensor([value, value / 10], dtype=torch.float64) for name, value in sums.items()
    }
    names = ("divergence", "same_first", "same_top", "overlap", "right_baseline",
             "right_candidate", "surprise_baseline", "surprise_candidate")  # fmt: skip
    rows = torch.full((2,), 10.0, dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    whole = {"rows": rows, "proposable": rows, **dict.fromkeys(names, zero), **given}
    return PromptAgreement(category="ab"[i % 2], prompt_sha256=f"{i}", sums=whole)


def kl(values: list[float], **limits: float) -> ParityFinding:
    prompts = [prompt(i, divergence=value) for i, value in enumerate(values)]
    return draft_findings(prompts, DraftLimits(**limits), top=5, confidence=0.95)[0]


def test_limits_decide_by_bounds() -> None:
    values = [1.0, 2.0, 3.0, 2.0] * 10  # 0.11, bounds about 0.099 and 0.121
    assert kl(values).verdict == "INCONCLUSIVE"
    assert kl(values, max_kl=0.122).verdict == "PASS"
    assert kl(values, max_kl=0.11).verdict == "INCONCLUSIVE"
    found = kl(values, max_kl=0.098)
    assert (found.verdict, found.threshold) == ("FAIL", 0.098)
    spread = 1.684875 * 0.055 * (0.5 / 39) ** 0.5  # the quantile of t of 39 degrees of freedom
    assert found.upper == pytest.approx(0.11 + spread, rel=1e-6)
    steps = [row["estimate"] for row in found.details if "step" in row]
    assert steps == [pytest.approx(0.2), pytest.approx(0.02)]
    categories = {row["category"]: row["prompts"] for row in found.details if "category" in row}
    assert categories == {"a": 20, "b": 20}
    assert kl(values[:6], max_kl=0.122).verdict == "INCONCLUSIVE"


def test_changes_tell_both_sides() -> None:
    rose = [prompt(i, surprise_baseline=5.0, surprise_candidate=6.0 + i % 2) for i in range(40)]
    found = draft_findings(rose, DraftLimits(max_perplexity_rise=0.01), top=5, confidence=0.95)[-1]
    assert found.what.startswith("log perplexity")
    assert found.estimate == pytest.approx(1.5 * 1.1 / 20)
    assert (found.verdict, found.threshold) == ("FAIL", 0.01)
    assert found.details[0]["baseline"] == pytest.approx(0.5)
    assert found.details[0]["candidate"] == pytest.approx(0.65)
    sides = {row["category"]: row["candidate"] for row in found.details if "category" in row}
    assert sides == {"a": pytest.approx(0.33), "b": pytest.approx(0.385)}
    lost = [prompt(i, right_baseline=9.0, right_candidate=8.0 + i % 2) for i in range(40)]
    right = draft_findings(lost, DraftLimits(max_right_drop=0.01), top=5, confidence=0.95)[4]
    assert (right.verdict, right.threshold) == ("FAIL", -0.01)


def test_tokens_that_no_draft_can_propose() -> None:
    none = PromptAgreement(category="a", prompt_sha256="0", sums={
        **prompt(0).sums, "proposable": torch.zeros(2, dtype=torch.float64)})  # fmt: skip
    found = draft_findings([none], DraftLimits(), top=5, confidence=0.95)[-1]
    assert (found.estimate, found.verdict) == (None, "INCONCLUSIVE")


def test_copies_are_one_prompt_and_limits_are_shares() -> None:
    copies = [prompt(0, divergence=value) for value in (1.0, 2.0, 3.0)]
    found = draft_findings(copies, DraftLimits(), top=5, confidence=0.95)[0]
    assert found.estimate == pytest.approx(0.11)
    assert found.lower is None  # copies are one prompt, which has no spread
    limits = *(("max_kl", value) for value in (-1.0, math.nan, math.inf)), ("min_agreement", 1.01)
    for name, value in limits:
        with pytest.raises(ParityError):
            check_limits(DraftLimits(**{name: value}))


# ---- bad input, and the command


class _Shifted:
    """A forward whose tokens are called otherwise."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + 1

    @classmethod
    def of(cls, draft: LoadedDraft) -> LoadedDraft:
        return dataclasses.replace(draft, forward=cast(Any, cls(draft.forward)))


def test_drafts_that_cannot_be_compared(pair: Pair) -> None:
    bf16, int4 = pair.drafts("greedy")
    traces = pair.traces["greedy"]
    command = ["parity", "draft", str(pair.source), str(pair.quant), "--traces"]
    assert main([*command, str(traces.folder), "--max-kl", "9"]) == 3
    assert main([*command, str(traces.folder), "--confidence", "95"]) == 2
    for other, k, top in ((int4, 0, 5), (int4, 2, 1025), (int4, 16, 5), (_Shifted.of(int4), 2, 5)):
        with pytest.raises(ParityError):
            draft_agreement(bf16, other, traces, num_draft_tokens=k, top=top)
