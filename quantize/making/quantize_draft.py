"""`quantize_draft`: plan in, published folder out. It appears whole and verified, or not at all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ...recipes.brief import Brief, megabytes
from ...recipes.packages import package_version
from ...recipes.schema import recipe_sha256
from ..backends import get_backend
from ..drafts.family import Lint
from ..drafts.geometry import vocabulary_share
from ..engines.contract import EngineCheck, loading_places
from ..engines.plan_verdicts import to_mapping
from ..files.card_text import CARD_FILE, around, is_ours, read_card
from ..files.checkpoint import UNVERIFIED_CONFIG_FILE
from ..files.hub import DraftSource, recorded_argv
from ..files.provenance import (
    ChosenAmong,
    Method,
    QuantizedProvenance,
    SourceDraft,
    TensorBytes,
    VocabularyCut,
)
from ..files.provenance_file import check_recorded, read_provenance
from ..files.publish import Rewrite, config_and_index, json_texts, publish
from ..layouts import get_layout
from ..lints.catalogue import fixed_config, output_changes
from ..planning.outputs import files_of, opened
from ..planning.quantization_plan import NOTHING_MEASURED, MeasuredInputs, Plan, Step
from ..verify import VerifyReport, check_faults, verify
from .folder_card import CardFacts, least_card
from .preparing import (
    balance_exponents,
    balanced_norms,
    check_backends,
    check_source,
    check_tables,
    checked_measured,
    learned_norms,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class QuantizeReport(Brief):
    """A quantized draft, and what verification found in it.

    Attributes:
        out: the folder that was written.
        plan: every tensor with its rule, its action and its bytes.
        verification: what reading the folder again found.
        config_changes: dotted key of config.json -> the value that a lint asked for.
        dropped: table of the draft that was left out -> the equal table of the target.
        balanced: name of a norm -> k, where the norm was divided by 2^k.
        learned_norms: name of a norm that learned -> the largest factor of an element.
        few_inputs: expert -> its inputs in the traces; too few, so it was rounded to nearest.
        damping: linear -> share of the mean of its inputs' second moments that GPTQ added to
            their diagonal, where it needed more than 0.01.
        cuts: earlier cuts of the source's vocabulary, the first one first; mostly none.
        loads: what each known engine does with the result, on each of its GPUs.
        lints: settings of the source that trainers and engines are known to read differently.
        warnings: what the command line prints as warnings.
    """

    out: Path
    plan: Plan
    verification: VerifyReport
    config_changes: Mapping[str, Any]
    dropped: Mapping[str, str]
    balanced: Mapping[str, int]
    learned_norms: Mapping[str, float]
    few_inputs: Mapping[str, int]
    damping: Mapping[str, float]
    cuts: tuple[VocabularyCut, ...]
    loads: tuple[EngineCheck, ...] = ()
    lints: tuple[Lint, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_mapping(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        """For JSON, with the seconds of each stage."""
        shown = ("config_changes", "dropped", "balanced", "learned_norms", "few_inputs", "damping")
        return {
            "out": str(self.out),
            "recipe": self.plan.recipe.name,
            "bytes_before": self.plan.bytes_before,
            "bytes_after": self.plan.bytes_after,
            "quantized": [step.row.tensor.name for step in self.plan.quantized],
            "cuts": [{"size": cut.size, "vocabulary": cut.vocabulary} for cut in self.cuts],
            **{name: dict(getattr(self, name)) for name in shown},
            "lints": [lint.name for lint in self.lints],
            "warnings": list(self.warnings),
            "seconds": seconds,
            "verification": self.verification.to_mapping(),
            "engines": to_mapping(self.loads),
        }

    @override
    def brief(self) -> Mapping[str, object]:
        plan = self.plan
        return {
            "verified": "verified" if self.verification.ok else "WRONG, not as its source",
            "out": self.out,
            "recipe": plan.recipe.name,
            "linears": len(plan.quantized),
            "head": vocabulary_share(plan.draft.geometry),
            "size": f"{megabytes(plan.bytes_before)} -> {megabytes(plan.bytes_after)}",
            "loads in": loading_places(self.loads),
            "warnings": len(self.warnings) or None,
        }


def quantize_draft(
    plan: Plan,
    out: Path,
    *,
    source: DraftSource,
    argv: Sequence[str] = (),
    measured: MeasuredInputs = NOTHING_MEASURED,
    allow_zero_rows: bool = False,
    fix_config: bool = False,
    target: Path | None = None,
    proven: Mapping[str, str] | None = None,
    chosen: ChosenAmong | None = None,
    on_progress: Callable[[Step], None] = lambda _step: None,
    on_stage: Callable[[str], None] = lambda _stage: None,
    on_verified: Callable[[int, int], None] | None = None,
    device: "Callable[[], torch.device] | None" = None,
) -> QuantizeReport:
    """Quantize a draft into a new folder: write, verify by re-reading, rename.

    Args:
        target: folder of the target, needed exactly where the recipe drops a table.
        proven: what `check_tables` returned for this plan and target; None = check now.
        chosen: how the recipe was chosen, for the record.
        on_stage: called with "start" (a vendor's toolkit is loaded), "write", "verify" and "sync".
        on_verified: called with bytes re-read and bytes to re-read, of both folders.
        device: returns where to compute quantized values, once torch is imported; None = the CPU.
    """
    # 1. Check that what is asked for can be done.
    if plan.recipe.backend != "torch":  # torch is installed, and takes a second to import
        check_backends(plan.recipe)
    scales, cache_scales = checked_measured(plan, measured)
    # 2. Find what changes beside the quantized weights.
    balanced = balanced_norms(plan)
    method = Method(
        recipe=plan.recipe,
        input_scales=scales,
        balanced=balanced,
        learned_norms=learned_norms(plan, measured.found, balanced),
        cache_scales=cache_scales,
        roles=plan.draft.checkpoint.roles,
    )
    changes = output_changes(plan.draft, plan.remaining, fix_config=fix_config)
    side_files, cuts = check_source(plan)
    dropped = check_tables(plan, target) if proven is None else proven
    card, folder = {}, plan.draft.checkpoint.folder
    of_source = read_card(folder)
    if CARD_FILE not in side_files or is_ours(of_source):
        facts = CardFacts.of_plan(plan, source, of_source, method)
        before, behind = around(of_source)
        card = {CARD_FILE: least_card(facts, before=before, behind=behind)}
    # 3. Write, verify, publish.
    quantization = _Quantization(
        out=out,
        folder=folder,
        tensor_bytes=plan.bytes_after,
        side_files=[file for file in side_files if file not in card],
        documents=card | _documents(plan, changes),
        plan=plan,
        source=source,
        argv=argv,
        measured=replace(measured, input_scales=scales),
        method=method,
        changes=changes,
        dropped=dropped,
        cuts=cuts,
        chosen=chosen,
        allow_zero_rows=allow_zero_rows,
        on_progress=on_progress,
        on_stage=on_stage,
        on_verified=on_verified,
        device=device,
    )
    return quantization.report(publish(quantization, on_stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantization(Rewrite[VerifyReport]):
    plan: Plan
    source: DraftSource
    argv: Sequence[str]
    measured: MeasuredInputs
    method: Method
    changes: Mapping[str, Any]
    dropped: Mapping[str, str]
    cuts: tuple[VocabularyCut, ...]
    chosen: ChosenAmong | None
    allow_zero_rows: bool
    on_progress: Callable[[Step], None]
    on_stage: Callable[[str], None]
    on_verified: Callable[[int, int], None] | None
    device: "Callable[[], torch.device] | None"

    @override
    def write_tensors(self, staging: Path) -> None:
        plan, changed = self.plan, self.method.changed_norms
        rest = (step for step in plan.steps if step.action not in ("quantize", "drop"))
        kept = [step for step in rest if step.row.tensor.name not in changed]
        sides = plan.draft.checkpoint, staging
        with opened(*sides, plan.outputs, kept=kept) as run:
            import torch  # while the kernel copies

            from .execute import CPU, execute

            check_backends(plan.recipe)
            backend = get_backend(plan.recipe.backend, plan.recipe.algorithm)
            if not backend.streams_rows:
                self.on_stage("start")
                backend.start()
                self.on_stage("write")
            execute(
                plan,
                run,
                backend,
                measured=self.measured,
                exponents=balance_exponents(plan, self.method.balanced),
                allow_zero_rows=self.allow_zero_rows,
                device=CPU if self.device is None else self.device(),
                on_progress=self.on_progress,
            )
            cached = [(each.row.tensor.file, t) for each in plan.cache for t in each.stored]
            scales = self.method.cache_scales.values()
            for (file, tensor), scale in zip(cached, scales, strict=True):
                run.files[file].write(tensor.name, torch.full(tensor.shape, scale))

    @override
    def verify(self, staging: Path) -> VerifyReport:
        report = verify(
            staging,
            self.folder,
            self.on_verified,
            method=self.found_method(),
            config_changes=self.changes,
            subtree=self.plan.draft.checkpoint.subtree,
            config_file=UNVERIFIED_CONFIG_FILE,
        )
        fix = "report this with the recipe and the draft's config.json"
        check_faults(self.out, self.folder, report.faults, fix=fix)
        return report

    @override
    def provenance(self, verification: VerifyReport) -> QuantizedProvenance:
        if self.cuts:
            record = read_provenance(self.folder)
            recorded = record.tensor_digests if record else {}
            check_recorded(self.folder, recorded, verification.source_digests)
        plan, measured = self.plan, self.measured
        return QuantizedProvenance(
            draftquant=package_version("draftquant"),
            backend_versions=get_backend(plan.recipe.backend, plan.recipe.algorithm).versions(),
            argv=recorded_argv(self.argv),
            source=SourceDraft(
                hub_id=self.source.hub_id,
                revision=self.source.revision,
                family=plan.draft.family.name,
                tensor_digests=verification.source_digests,
            ),
            recipe_sha256=recipe_sha256(plan.recipe),
            tensor_digests=verification.output_digests,
            tensor_bytes=TensorBytes(before=plan.bytes_before, after=plan.bytes_after),
            config_changes=self.changes,
            dropped=self.dropped,
            **self.found_method().keys,
            input_scale_origin=measured.input_scale_origin if measured.input_scales else "",
            calibration_prompts=measured.prompts.sha256,
            calibration_sketches=measured.prompts.sketches,
            calibration_target=measured.prompts.target,
            gptq=measured.statistics.factors if measured.statistics else None,
            learned=measured.found.origin if measured.found else None,
            cuts=self.cuts,
            chosen=self.chosen,
            card=True,
        )

    def found_method(self) -> Method:
        """The method, complete once everything is written: experts are measured stage by stage."""
        statistics = self.measured.statistics
        few = statistics.too_few if statistics is not None else {}
        modules = {s.row.canonical_module: s.row.module for s in self.plan.quantized}
        few_inputs = {modules[name]: count for name, count in sorted(few.items())}
        return replace(self.method, few_inputs=few_inputs)

    def report(self, verification: VerifyReport) -> QuantizeReport:
        """The report on what was written, with what verification found."""
        statistics, method = self.measured.statistics, self.found_method()
        return QuantizeReport(
            out=self.out,
            plan=self.plan,
            verification=replace(verification, output=str(self.out)),
            config_changes=self.changes,
            dropped=self.dropped,
            balanced=method.balanced,
            learned_norms=method.learned_norms,
            few_inputs=method.few_inputs,
            damping=statistics.factors.damping if statistics else {},
            cuts=self.cuts,
        )


def _documents(plan: Plan, changes: Mapping[str, Any]) -> dict[str, str]:
    checkpoint = plan.draft.checkpoint
    layout, declared = get_layout(plan.recipe.layout), plan.declared()
    beside = json_texts(layout.side_files(declared))
    config = {**fixed_config(checkpoint.config, changes), "quantization_config": declared}
    return beside | config_and_index(checkpoint, config, files_of(plan.outputs), plan.bytes_after)
