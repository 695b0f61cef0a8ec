"""`quantize --recipe auto`: makes and replays the drafts that could win, and writes the chosen one.

What each draft accepted is kept by content, as the replay of the BF16 draft is: after a stop the
same command loses at most the draft that it was at.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from ...calibration.linear_inputs.plan_inputs import why_unused
from ...calibration.passes import OnTraces
from ...calibration.passes.loaded_drafts import load_for_replay
from ...calibration.passes.on_traces import open_for_drafts
from ...calibration.runs.quantize_run import quantize_as_asked
from ...calibration.traces.held_out import seen_prompts
from ...calibration.traces.sets import split_traces
from ...calibration.traces.trace_folder import TraceFolder
from ...quantize.asked import Quantizing
from ...quantize.files.provenance import ChosenAmong
from ...quantize.files.report_files import check_reports, write_reports
from ...quantize.files.result_cache import user_cache
from ...quantize.files.staging import check_output, staged_source
from ...quantize.inspection import open_draft
from ...quantize.making.quantize_draft import QuantizeReport
from ...quantize.planning.quantization_plan import NOTHING_MEASURED, Plan
from ...recipes.decode import encode
from ...recipes.errors import GateError, NoRecipeError, TraceError
from ...recipes.listener import Listener
from ...recipes.schema import RoundingChoice, recipe_sha256
from ...recipes.strict_json import JsonProblem, decode, parse_json
from ..comparison.recipe_contenders import contenders
from ..comparison.recipe_selection import Contender, Selection, page, rows, tried
from ..counting.draft_counts import DraftReplay
from ..counting.replay_cache import ReplayQuestion
from ..counting.replaying import replay_loaded
from ..judging.judgement import GateReport, judge
from ..judging.policy import POLICIES
from ..report import words
from .judging_asked import given

_RELEASE = POLICIES["release"]
_CALIBRATING = 0.3
"""Share of the prompts that calibrate; the others choose."""
_QUANTIZING: Mapping[RoundingChoice, int] = {"nearest": 10, "gptq": 480, "learned": 3600}
_REPLAYING = 90
_BYTES = 6.36e9
"""Seconds that a draft of so many bytes takes on two cores: to quantize, and to replay."""
_GPTQ_MEMORY = 1.9
"""Bytes that GPTQ holds for each byte of the draft."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ChosenReport(QuantizeReport):
    """A quantized draft whose recipe was chosen.

    Attributes:
        selection: the recipes whose drafts load, with what the prompts say of those that were made.
    """

    selection: Selection

    @override
    def to_mapping(self, seconds: Mapping[str, float]) -> dict[str, object]:
        plain: dict[str, object] = QuantizeReport.to_mapping(self, seconds)
        return plain | {"selection": self.selection.to_mapping()}


def choose_and_quantize(asked: Quantizing) -> ChosenReport:
    """Find the recipe and write its draft; NoRecipeError: every one is shown to fail."""
    assert asked.traces is not None  # settings were checked
    listener, out = asked.listener, Path(asked.out)
    pages = given({"html": asked.html})
    check_reports(pages)
    source, draft = open_draft(asked.draft, None, listener, asked.roles)
    check_output(out, source.folder)
    selection, plans = contenders(draft, asked)
    traces, _, warnings = open_for_drafts(asked.traces, [source.folder], listener)
    for warning in warnings:
        listener.warning(warning)
    listener.stage("choose")
    with staged_source(out) as folder:
        trial = _Trial.begin(asked, source.folder, traces, plans, folder)
        selection = trial.of(selection)
        write_reports(
            {path: page(selection, source.folder.resolve().name) for path in pages.values()}
        )
        chosen = _chosen(selection, listener)
        among = ChosenAmong(
            recipes=tuple(each.name for each in selection.contenders),
            num_prompts=selection.num_prompts,
            traces_sha256=traces.sha256,
            prompts=seen_prompts(traces),
        )
        report = quantize_as_asked(trial.asking(chosen.name, out, listener), among)
    fields = {each.name: getattr(report, each.name) for each in dataclasses.fields(report)}
    return ChosenReport(**fields, selection=selection)


def _chosen(selection: Selection, listener: Listener) -> Contender:
    chosen = selection.chosen
    if chosen is None:
        told = [f"{name}: {' '.join(filter(None, cells))}" for name, *cells in rows(selection)]
        fix = "serve the draft as it is, or record more prompts, which narrow the bounds"
        raise NoRecipeError("--recipe auto", selection.told, details=told, fix=fix)
    if chosen.verdict != "PASS":
        listener.warning(selection.told)
    if selection.speed(chosen) < selection.speed(selection.unquantized):
        listener.warning(
            f"by this estimate {chosen.name} is slower than the draft as it is, whose acceptance"
            " is longer: it saves memory, not time"
        )
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """The prompts in two parts, and what the unquantized draft does on those that choose."""

    asked: Quantizing
    plans: Mapping[str, Plan]
    folder: Path
    calibrating: TraceFolder
    choosing: TraceFolder
    baseline: DraftReplay
    question: Mapping[str, object]

    @classmethod
    def begin(
        cls,
        asked: Quantizing,
        draft: Path,
        traces: TraceFolder,
        plans: Mapping[str, Plan],
        folder: Path,
    ) -> "_Trial":
        """Split the traces, and replay the draft as it is; an error where it cannot be judged."""
        if len(traces) < (least := _recorded(_RELEASE.min_prompts)):
            raise TraceError(
                traces.folder,
                f"expected at least {least} prompts, of which {_CALIBRATING:.0%} calibrate and the"
                f" others choose, got {len(traces)}",
                fix="record more: draftquant record",
            )
        parts = folder / "calibrating", folder / "choosing"
        split = split_traces(traces, *parts, count=math.floor(_CALIBRATING * len(traces)))
        how = _how(asked, asked.listener)
        loaded = load_for_replay([draft], split.second, how)
        (baseline,) = replay_loaded(loaded, how)
        _check_baseline(baseline, traces)
        question = ReplayQuestion(
            draft=loaded.drafts[0],
            traces=split.second,
            batches=(),
            num_draft_tokens=baseline.num_draft_tokens,
            temperature=None,
        )
        return cls(
            asked=asked,
            plans=plans,
            folder=folder,
            calibrating=split.first,
            choosing=split.second,
            baseline=baseline,
            question=question.key,
        )

    def of(self, selection: Selection) -> Selection:
        length = self.baseline.counts.mean_acceptance_length
        selection = dataclasses.replace(
            selection, num_prompts=len(self.choosing), acceptance_length=length
        )
        seconds = {one.name: self._seconds(one.name) for one in selection.contenders}
        total, done = sum(seconds.values()), 0
        self.asked.listener.note(self._effort(len(seconds), total))
        with self.asked.listener.bar("choose", total, "work") as bar:

            def judged(one: Contender) -> GateReport:
                nonlocal total, done
                bar.label(f"choose: {one.name}")
                if (replay := self._kept(one.name)) is not None:
                    total -= seconds[one.name]  # it takes no time now
                else:
                    replay = self._made(one.name)
                    done += seconds[one.name]
                bar.set(done, total)
                return judge(self.baseline, replay, _RELEASE)

            return tried(selection, judged)

    def asking(self, name: str, out: Path, listener: Listener) -> Quantizing:
        """What is asked, by one recipe; with traces where that measures something."""
        plan = self.plans[name]
        traces = None if why_unused(plan, NOTHING_MEASURED) else self.calibrating.folder
        return dataclasses.replace(
            self.asked, recipe=plan.recipe, out=out, traces=traces, listener=listener
        )

    def _seconds(self, name: str) -> int:
        plan = self.plans[name]
        seconds = _QUANTIZING[plan.recipe.algorithm.rounding] + _REPLAYING
        return math.ceil(seconds * plan.bytes_before / _BYTES)

    def _effort(self, recipes: int, seconds: int) -> str:
        before = max(plan.bytes_before for plan in self.plans.values())
        return (
            f"{recipes} recipes load there: to try them all takes about"
            f" {math.ceil(seconds / 60):,} min on two cores, and GPTQ"
            f" {words.nbytes(_GPTQ_MEMORY * before)} of memory; what is done is kept, and the same"
            " command goes on after a stop"
        )

    def _kept(self, name: str) -> DraftReplay | None:
        cache = user_cache(self.asked.listener.warning)
        kept = cache and cache.read(self._key(name))
        with suppress(JsonProblem):  # of a build whose counts had other fields
            return decode(DraftReplay, parse_json(kept.decode())) if kept else None
        return None

    def _made(self, name: str) -> DraftReplay:
        out, muted = self.folder / name, _Muted()
        how = _how(self.asked, muted)
        quantize_as_asked(self.asking(name, out, muted))
        (replay,) = replay_loaded(load_for_replay([out], self.choosing, how), how)
        shutil.rmtree(out)
        if cache := user_cache(self.asked.listener.warning):
            cache.write(self._key(name), json.dumps(encode(replay)).encode())
        return replay

    def _key(self, name: str) -> dict[str, object]:
        """All that determines what the draft of a recipe accepts."""
        asked = self.asked
        return {
            **self.question,
            "what": "the draft of a recipe",
            "recipe": recipe_sha256(self.plans[name].recipe),
            "calibrating": self.calibrating.sha256,
            "settings": [asked.precise, asked.allow_zero_rows, asked.fix_config],
        }


def _recorded(choosing: int) -> int:
    """How many prompts to record so that so many choose."""
    return math.ceil(choosing / (1 - _CALIBRATING))


def _how(asked: Quantizing, listener: Listener) -> OnTraces:
    return OnTraces(
        num_draft_tokens=asked.num_draft_tokens,
        target=asked.target,
        device=asked.device,
        listener=listener,
    )


def _check_baseline(baseline: DraftReplay, traces: TraceFolder) -> None:
    """Beside itself the draft must pass: else the prompts are too few, or not its target's."""
    itself = judge(baseline, baseline, _RELEASE)
    if itself.verdict == "PASS":
        return
    fix = (itself.action or "").replace("\n", " ")
    if itself.verdict == "INCONCLUSIVE" and itself.change is not None:
        least = _recorded(itself.change.num_prompts_for(_RELEASE.min_prompts))
        fix = f"record about {least} prompts or more like these: draftquant record"
    raise GateError(traces.folder, f"its prompts choose no recipe: {itself.reason}", fix=fix)


class _Muted(Listener):
    """What the run of a recipe says is not heard: the run that writes the chosen draft says it."""

    @override
    def line(self, text: str) -> None: ...

    @override
    def warning(self, text: str) -> None: ...
