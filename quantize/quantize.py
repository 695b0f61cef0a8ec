"""`quantize_draft`: plan in, published folder out. It appears whole and verified, or not at all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..recipes.schema import recipe_sha256
from ..recipes.seen_prompts import NO_PROMPTS, SeenPrompts
from .algorithms import FoundCodes, Statistics
from .algorithms.balance import balance_exponent
from .backends import get_backend
from .card import CardFacts, least_card
from .checks import (
    check_backends,
    check_retuning,
    check_source,
    check_tables,
    checked_scales,
)
from .engines.contract import EngineCheck
from .execute import Measured, execute
from .files.card import CARD_FILE, read_card
from .files.checkpoint import UNVERIFIED_CONFIG_FILE
from .files.command_line import recorded_argv
from .files.hub import DraftSource
from .files.provenance import (
    Method,
    QuantizedProvenance,
    SourceDraft,
    TensorBytes,
    package_version,
)
from .files.publish import check_faults, publish
from .files.retuning import Retuning, marked_card
from .files.side_files import config_and_index, json_texts
from .layouts import get_layout
from .lints import Lint, fixed_config, output_changes
from .lints.concat import half_ratios
from .plan import Plan, Step
from .verify.folder import VerifyReport, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport:
    """What a run wrote, and what verification found in it.

    Attributes:
        config_changes: dotted config.json key -> the value that a lint asked for.
        dropped: table of the draft -> the target's that it equals.
        balanced: see `balanced_norms`.
        few_inputs: see `Method`.
        loads: what each known engine does with the result on each of its GPUs; empty where nobody
            asked.
        lints: what was found in the source.
        warnings: what the command line says of this run on stderr.
    """

    out: Path
    plan: Plan
    verification: VerifyReport
    config_changes: Mapping[str, Any]
    dropped: Mapping[str, str]
    balanced: Mapping[str, int]
    few_inputs: Mapping[str, int]
    loads: tuple[EngineCheck, ...] = ()
    lints: tuple[Lint, ...] = ()
    warnings: tuple[str, ...] = ()


def quantize_draft(
    plan: Plan,
    out: Path,
    *,
    source: DraftSource,
    argv: Sequence[str] = (),
    input_scales: Mapping[str, float] | None = None,
    input_scale_origin: str | None = None,
    calibration_prompts: SeenPrompts = NO_PROMPTS,
    statistics: Statistics | None = None,
    found: FoundCodes | None = None,
    retuning: Retuning | None = None,
    allow_zero_rows: bool = False,
    fix_config: bool = False,
    target: Path | None = None,
    proven: Mapping[str, str] | None = None,
    on_progress: Callable[[Step], None] = lambda _step: None,
    on_stage: Callable[[str], None] = lambda _stage: None,
    on_verified: Callable[[int, int], None] | None = None,
) -> QuantizeReport:
    """Quantize a draft into a new folder: write, verify by re-reading, rename.

    Args:
        plan: from `make_plan`; its recipe names backend and layout.
        out: folder to create.
        source: where the draft came from, for provenance.
        argv: the command line, for provenance.
        input_scales: static activation scale per on-disk module name; needed exactly where the
            recipe's activations are static.
        input_scale_origin: where they came from, for provenance.
        calibration_prompts: behind scales and statistics, for provenance.
        statistics: of the inputs of linears, for algorithms that need them.
        found: codes and scales, for algorithms that need them.
        retuning: how the target taught them, exactly where the recipe says `rounding: retuned`;
            README.md then says it too.
        allow_zero_rows: store all-zero rows instead of refusing them.
        fix_config: change the output's config.json as the lints of the draft ask for.
        target: folder of the target, needed exactly where the recipe drops a table: that the target
            has the very same is shown first.
        proven: what `check_tables` gave for this plan and target; None = it is asked here.
        on_progress: called after each tensor written.
        on_stage: called with "start" (where a vendor's toolkit is loaded), "write", "sync" and
            "verify" when they begin.
        on_verified: called with bytes re-read and bytes to re-read, of both folders.

    Raises:
        DraftQuantError: of the stage that failed; nothing is left behind.
    """
    backend = get_backend(plan.recipe.backend, plan.recipe.algorithm)
    check_backends(plan.recipe)
    check_retuning(plan, retuning)
    scales = checked_scales(plan, input_scales)
    balanced = balanced_norms(plan)

    def few_inputs() -> dict[str, int]:
        """Known when everything is written: experts are measured stage by stage."""
        few = statistics.too_few if statistics is not None else {}
        modules = {s.row.canonical.removesuffix(".weight"): s.row.module for s in plan.quantized}
        return {modules[name]: count for name, count in sorted(few.items())}

    def method() -> Method:
        return Method(
            recipe=plan.recipe, input_scales=scales, balanced=balanced, few_inputs=few_inputs()
        )

    changes = output_changes(plan.draft, plan.remaining, fix_config=fix_config)
    checkpoint = plan.draft.checkpoint
    side_files = check_source(plan)
    dropped = check_tables(plan, target) if proven is None else proven
    documents = _documents(plan, changes)
    if retuning is not None:
        documents = {CARD_FILE: marked_card(checkpoint.folder, retuning)} | documents
        side_files = tuple(file for file in side_files if file != CARD_FILE)
    elif CARD_FILE not in side_files:
        facts = CardFacts.of_plan(plan, source, read_card(checkpoint.folder), balanced)
        documents = {CARD_FILE: least_card(facts)} | documents

    def write_tensors(staging: Path) -> None:
        if not backend.streams_rows:
            on_stage("start")
            backend.start()
            on_stage("write")
        execute(
            plan,
            staging,
            backend,
            measured=_measured(plan, scales, balanced, statistics, found),
            allow_zero_rows=allow_zero_rows,
            on_progress=on_progress,
            on_written=partial(on_stage, "sync"),
        )

    def verified(staging: Path) -> VerifyReport:
        report = verify(
            staging,
            checkpoint.folder,
            on_verified,
            method=method(),
            config_changes=changes,
            subtree=checkpoint.subtree,
            config_file=UNVERIFIED_CONFIG_FILE,
        )
        check_faults(
            out, report.faults, fix="report this with the recipe and the draft's config.json"
        )
        return report

    def provenance(report: VerifyReport) -> QuantizedProvenance:
        """No time stamp and no path, so that equal runs give equal files."""
        return QuantizedProvenance(
            draftquant=package_version("draftquant"),
            backend_versions=backend.versions(),
            argv=recorded_argv(argv),
            source=SourceDraft(
                hub_id=source.hub_id,
                revision=source.revision,
                family=plan.draft.family.name,
                tensor_sha256=report.source_sha256,
            ),
            recipe=plan.recipe,
            recipe_sha256=recipe_sha256(plan.recipe),
            tensor_sha256=report.output_sha256,
            tensor_bytes=TensorBytes(before=plan.bytes_before, after=plan.bytes_after),
            config_changes=changes,
            dropped=dropped,
            balanced=balanced,
            input_scales=scales,
            input_scale_origin=input_scale_origin if scales else "",
            few_inputs=few_inputs(),
            calibration_prompts=calibration_prompts.sha256,
            calibration_sketches=calibration_prompts.sketches,
            learned=found.origin if found else None,
            retuning=retuning,
            card=True,
        )

    report = publish(
        out,
        checkpoint,
        tensor_bytes=plan.bytes_after,
        write_tensors=write_tensors,
        side_files=side_files,
        documents=documents,
        verify=verified,
        provenance=provenance,
        on_stage=on_stage,
    )
    return QuantizeReport(
        out=out,
        plan=plan,
        verification=report,
        config_changes=changes,
        dropped=dropped,
        balanced=balanced,
        few_inputs=few_inputs(),
    )


def balanced_norms(plan: Plan) -> dict[str, int]:
    """The norms that balancing the concat input changes: tensor name -> k, divided by 2^k.

    Reads some rows of the linears behind them. Empty where the recipe does not ask for it, or where
    the halves are less than 4 apart.

    Raises:
        CheckpointError: a source file shrank.
    """
    if plan.balanced is None:
        return {}
    norm, _ = plan.balanced
    exponent = balance_exponent([ratio.ratio for ratio in half_ratios(plan.draft)])
    return {norm.row.tensor.name: exponent} if exponent else {}


def _measured(
    plan: Plan,
    input_scales: Mapping[str, float],
    balanced: Mapping[str, int],
    statistics: Statistics | None,
    found: FoundCodes | None,
) -> Measured:
    exponents = {name.removesuffix(".weight"): k for name, k in balanced.items()}
    if plan.balanced is not None and exponents:
        _, linears = plan.balanced
        exponents |= dict.fromkeys((step.row.module for step in linears), *exponents.values())
    return Measured(
        input_scales=input_scales, exponents=exponents, statistics=statistics, found=found
    )


def _documents(plan: Plan, changes: Mapping[str, Any]) -> dict[str, str]:
    """The layout's own files, the index, config.json with changes and the layout's declaration."""
    checkpoint = plan.draft.checkpoint
    layout, declared = get_layout(plan.recipe.layout), plan.declared()
    own = json_texts(layout.side_files(declared))
    config = {**fixed_config(checkpoint.config, changes), "quantization_config": declared}
    stored = {t.name: step.row.tensor.file for step in plan.steps for t in step.stored}
    return own | config_and_index(checkpoint, config, stored, plan.bytes_after)
