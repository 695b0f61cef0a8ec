"""Does mixed precision pay? What each group of linears loses in each format, and the best mix.

`.venv/bin/python experiments/mixed.py WORK PAIR [PAIR ...]` prints the tables of `mixed.md`.
WORK/PAIR has the BF16 `draft` and three trace folders: `seen` calibrates GPTQ, `choosing` measures
groups and chooses, `fresh` judges. What a draft accepted is kept there.

Moments are those of the BF16 draft, so GPTQ gives a linear nearly the same values whatever is done
to the others. A quantized draft for each format therefore holds every mix, which is put together in
memory. What is chosen is quantized by its recipe, and judged from the folder.
"""

import dataclasses
import itertools
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from draftquant.calibration.runs.quantize_run import quantize_as_asked
from draftquant.calibration.traces.trace_folder import TraceFolder
from draftquant.quantize.asked import Estimating, Quantizing
from draftquant.quantize.engines.plan_verdicts import planned_verdicts
from draftquant.quantize.estimate.draft_step import checked_num_draft_tokens
from draftquant.quantize.estimate.estimate_report import candidates_of
from draftquant.quantize.estimate.work import VerifyStep
from draftquant.quantize.estimated import plans_that_fit
from draftquant.quantize.inspection import open_draft
from draftquant.quantize.planning.quantization_plan import Plan, make_plan
from draftquant.quantize.stored.loading import LoadedDraft, load_draft
from draftquant.recipes import Algorithm, Expectation, Format, Recipe, Rule, load_recipe
from draftquant.recipes.decode import encode
from draftquant.recipes.errors import DraftQuantWarning
from draftquant.recipes.strict_json import decode, parse_json
from draftquant.validate.counting.draft_counts import DraftReplay
from draftquant.validate.counting.paired_change import pseudo_values, sums_without, t_quantile
from draftquant.validate.counting.trace_replay import replay_drafts
from draftquant.validate.judging.judgement import GateReport, judge
from draftquant.validate.judging.policy import POLICIES
from numpy.typing import NDArray
from torch import Tensor

GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("*.[qkv]_proj.weight", "*.q_a_proj.weight", "*.kv_a_proj_with_mqa.weight"),
    "q_b": ("*.q_b_proj.weight",), "o": ("*.o_proj.weight",),
    "gate_up": ("*.gate_proj.weight", "*.up_proj.weight"), "down": ("*.down_proj.weight",),
    "fc": ("*fc.weight",), "head": ("lm_head.weight",),
}  # fmt: skip
"""What engines multiply at once, and must have one format."""
_OF = {"fp8": "fp8-ptpc", "int4": "int4-channel", "mxfp4": "mxfp4-weights",
       "nvfp4": "nvfp4-weights", "nvfp4-inputs": "blackwell-nvfp4"}  # fmt: skip
FORMATS = {
    form: Format(weights=recipe.weights, activations=recipe.activations)
    for form, recipe in ((form, load_recipe(name)) for form, name in _OF.items())
}
"""All but FP8 are rounded by GPTQ."""
ENGINES, GPUS = {"vllm", "sglang"}, {"H200": "sm90", "B200": "sm100"}
"""A mix counts where both engines load it."""
MOST_MADE = 8
"""Mixes that are tried on a GPU, the smallest first."""
RELEASE = POLICIES["release"]
Mix = Mapping[str, str]
"""Group -> format; the other groups stay in BF16."""
Load = Callable[[TraceFolder], LoadedDraft]


def title_of(mix: Mix) -> str:
    return ",".join(f"{group}={form}" for group, form in mix.items())


def loaded(folder: Path, traces: TraceFolder) -> LoadedDraft:
    return load_draft(folder, compact=True, shared=traces.tables(None))


def in_percent(change: float, lower: float, upper: float) -> str:
    return f"{100 * change:+.2f} ({100 * lower:+.2f}, {100 * upper:+.2f})"


def told(report: GateReport) -> str:
    assert report.change is not None
    change = in_percent(report.change.relative_change, *report.change.relative_bounds)
    return f"{change} {report.verdict}"


def logs(replay: DraftReplay) -> NDArray[np.float64]:
    """[1 + N] logarithms of the acceptance length: of all prompts, and without each one."""
    steps = np.array([prompt.counts.histogram for prompt in replay.prompts], dtype=np.float64)
    sums = np.stack([steps @ np.arange(1, steps.shape[1] + 1), steps.sum(1)])
    tokens, rows = np.concatenate([sums.sum(1, keepdims=True), sums_without(sums)], 1)
    return np.asarray(np.log(tokens / rows))


def loads(plan: Plan, gpu: str) -> bool:
    said = planned_verdicts(plan, arch=GPUS[gpu], fix_config=True)
    return {check.engine for check in said if check.verdict == "LOADS"} >= ENGINES


class Pair:
    """A draft with its traces: what any mix accepts and reads."""

    def __init__(self, work: Path) -> None:
        self.work = work
        _, self.draft = open_draft(work / "draft")
        self.depth = checked_num_draft_tokens(self.draft.geometry, None)
        names = [row.canonical for row in self.draft.rows]
        found = {g: [n for n in names for p in GROUPS[g] if fnmatch(n, p)] for g in GROUPS}
        self.groups = {group: those for group, those in found.items() if those}
        self.plain_bytes = self.nbytes()

    def nbytes(self, *plans: Plan) -> int:
        """What drafting for a verify step reads, but for the KV cache: BF16, or of a plan."""
        served = VerifyStep(self.depth, context=1)
        return candidates_of(self.draft, plans, served)[-1].round.nbytes(1)

    def plan(self, mix: Mix) -> Plan:
        base, used = load_recipe("fp8-ptpc"), list(dict.fromkeys(mix.values()))
        own = next((form for form in used if form != "fp8"), "fp8")
        named = {form: tuple(p for g in mix if mix[g] == form for p in GROUPS[g]) for form in used}
        rules = [
            Rule(tensor=those, action="quantize", format=None if form == own else FORMATS[form])
            for form, those in named.items()
        ]
        kept = [dataclasses.replace(r, optional=True, action="keep", why="-") for r in base.rules]
        in_layer = [n for group in mix for n in self.groups[group] if n.startswith("layers.0.")]
        algorithm = Algorithm(
            scale="mse" if "int4" in used else "absmax",
            rounding="nearest" if own == "fp8" else "gptq",
        )
        recipe = dataclasses.replace(
            base, name=title_of(mix), loads_on=(), algorithm=algorithm, rules=(*rules, *kept),
            weights=FORMATS[own].weights, activations=FORMATS[own].activations,
            expect=Expectation(quantized_per_layer=len(in_layer)),
        )  # fmt: skip
        return make_plan(recipe, self.draft)

    def made(self, recipe: Recipe) -> Path:
        """The draft quantized by a recipe."""
        out = self.work / "made" / recipe.name
        if not out.exists():
            out.parent.mkdir(exist_ok=True)
            asked = Quantizing(self.work / "draft", recipe, out=out, traces=self.work / "seen")
            quantize_as_asked(asked)
        return out

    @cached_property
    def parts(self) -> Mapping[str, LoadedDraft]:
        """The BF16 draft under "", and each format's with all groups in it."""
        traces = TraceFolder.open(self.work / "choosing")
        whole = {form: self.plan(dict.fromkeys(self.groups, form)).recipe for form in FORMATS}
        made = {form: loaded(self.made(recipe), traces) for form, recipe in whole.items()}
        return {"": loaded(self.work / "draft", traces), **made}

    def mixed(self, mix: Mix) -> LoadedDraft:
        plain, names = self.parts[""], {n: mix[group] for group in mix for n in self.groups[group]}
        weights = {name: self.parts[names.get(name, "")].weights[name] for name in plain.weights}

        def rounded(module: str, x: Tensor) -> Tensor:
            form = names.get(f"{module}.weight")
            return x if form is None else self.parts[form].forward.on_input(module, x)

        forward = plain.family.forward(plain.geometry, weights, rounded)
        return dataclasses.replace(plain, name=title_of(mix), weights=weights, forward=forward)

    def replay(self, traces: str, name: str, load: Load) -> DraftReplay:
        """What a draft accepts, kept under its name."""
        kept = self.work / "replays" / f"{traces}.{name}.json"
        if not kept.exists():
            opened = TraceFolder.open(self.work / traces)
            (found,) = replay_drafts([load(opened)], opened, num_draft_tokens=self.depth)
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps(encode(found)), encoding="utf-8")
        return decode(DraftReplay, parse_json(kept.read_text(encoding="utf-8")))

    def of_folder(self, traces: str, folder: Path) -> DraftReplay:
        return self.replay(traces, folder.name, partial(loaded, folder))

    def of_mix(self, mix: Mix) -> DraftReplay:
        return self.replay("choosing", title_of(mix), lambda _: self.mixed(mix))

    def judged(self, candidate: DraftReplay, traces: str = "choosing") -> GateReport:
        return judge(self.of_folder(traces, self.work / "draft"), candidate, RELEASE)

    def of_recipe(self, traces: str, recipe: Recipe) -> GateReport:
        return self.judged(self.of_folder(traces, self.made(recipe)), traces)

    def groups_table(self) -> Iterator[str]:
        """Change of each group in each format, of all together, and that less the sum."""
        yield f"`{self.work.name}` | " + " | ".join(FORMATS)
        rows: dict[str, list[str]] = {}
        plain = logs(self.of_folder("choosing", self.work / "draft"))
        for form in FORMATS:
            alone = {group: self.of_mix({group: form}) for group in self.groups}
            together = self.of_mix(dict.fromkeys(self.groups, form))
            for title, replay in {**alone, "all together": together}.items():
                rows.setdefault(title, []).append(told(self.judged(replay)))
            rest = logs(together) - plain - sum(logs(each) - plain for each in alone.values())
            psi = pseudo_values(rest[:1], rest[1:])
            error = t_quantile(0.95, len(psi) - 1) * psi.std(ddof=1) / math.sqrt(len(psi))
            cell = in_percent(rest[0], rest[0] - error, rest[0] + error)
            rows.setdefault("all together less the sum", []).append(cell)
        yield from (f"{title} | " + " | ".join(cells) for title, cells in rows.items())

    def recipes(self, gpu: str) -> Iterator[Recipe]:
        """The built-in ones that load there, those of fewest bytes first."""
        fitting, _ = plans_that_fit(self.draft, Estimating(self.work / "draft"))
        tried = [plan for plan in fitting if plan.recipe.algorithm.rounding != "learned"]
        tried.sort(key=lambda plan: (self.nbytes(plan), plan.recipe.algorithm.rounding))
        return (plan.recipe for plan in tried if loads(plan, gpu))

    def sizes(self, gpu: str) -> str:
        """The smallest recipes, and each group in its smallest format, whatever they accept."""
        small: dict[str, str] = {}
        for group in self.groups:
            alone = {form: self.plan({group: form}) for form in FORMATS}
            sizes = {form: self.nbytes(plan) for form, plan in alone.items() if loads(plan, gpu)}
            if sizes:
                small[group] = min(sizes, key=sizes.__getitem__)
        mix = self.plan(small)
        plans = [make_plan(recipe, self.draft) for recipe in itertools.islice(self.recipes(gpu), 3)]
        plans += [mix] if loads(mix, gpu) else []
        cells = (f"{plan.recipe.name} {self.nbytes(plan):,}" for plan in plans)
        return " | ".join([f"{self.work.name}, {gpu}", *cells])

    def mixes(self, gpu: str, most_bytes: int) -> Iterator[Mix]:
        """Those that load there and should stay within the limit, the smallest first."""
        options: list[dict[int, tuple[str, str, float]]] = []
        for group in self.groups:
            options.append({0: (group, "", 0.0)})
            for form in FORMATS:  # of two forms with equal bytes the first
                plan = self.plan({group: form})
                if loads(plan, gpu):
                    change = self.judged(self.of_mix({group: form})).change
                    found = (group, form, change.log_ratio if change else -math.inf)
                    options[-1].setdefault(self.plain_bytes - self.nbytes(plan), found)
        every = [(sum(saved), saved) for saved in itertools.product(*options)]
        for total, saved in sorted(every, reverse=True):
            if self.plain_bytes - total >= most_bytes:
                return
            chosen = [each[key] for each, key in zip(options, saved, strict=True)]
            mix = {group: form for group, form, _ in chosen if form}
            expected = sum(change for *_, change in chosen)
            within = expected > math.log1p(-RELEASE.max_relative_drop)
            if within and loads(self.plan(mix), gpu):
                yield mix

    def gpu_row(self, gpu: str) -> str:
        """The best recipe and the best mix of a GPU, on the prompts that judge."""
        passing = (r for r in self.recipes(gpu) if self.of_recipe("choosing", r).verdict == "PASS")
        recipe = next(passing)
        most = self.nbytes(make_plan(recipe, self.draft))
        cells = [f"{self.work.name}, {gpu}", recipe.name, f"{most:,}"]
        cells.append(told(self.of_recipe("fresh", recipe)))
        for mix in itertools.islice(self.mixes(gpu, most), MOST_MADE):
            if self.judged(self.of_mix(mix)).verdict == "PASS":
                plan = self.plan(mix)
                cells += [title_of(mix), f"{1 - self.nbytes(plan) / most:.1%}"]
                cells.append(told(self.of_recipe("fresh", plan.recipe)))
                break
        return " | ".join(cells)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter(
        "ignore", DraftQuantWarning
    )  # unused traces, and whole drafts that nothing loads
    for name in sys.argv[2:]:
        pair = Pair(Path(sys.argv[1]) / name)
        tables = map(pair.sizes, GPUS), pair.groups_table(), map(pair.gpu_row, GPUS)
        for line in itertools.chain(*tables):
            print(line, flush=True)
