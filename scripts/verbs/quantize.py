"""`quantize`: plan, write, verify, publish."""

import json
from collections.abc import Mapping

from ...quantize.asked import Quantizing
from ...quantize.estimate.draft_step import USUAL_CONTEXT
from ...quantize.files.card_text import CARD_FILE, is_ours, read_card
from ..frame import reports
from ..frame.console import OnTerminal, megabytes, print_table, stderr, stdout, table
from ..frame.verb import Command, verb


@verb(Quantizing, figures={"usual_context": str(USUAL_CONTEXT)})
def quantize(settings: Quantizing) -> "reports.QuantizeReport":
    """Quantize a draft into a new folder. The folder appears complete and verified, or not at all.

    Example:
        >>> report = dq.quantize("DRAFT", "int4-channel", "OUT")
        >>> report.verification.ok
        True
        >>> len(report.plan.quantized), report.plan.bytes_before > report.plan.bytes_after
        (7, True)

    Returns:
        The folder, the plan, what verification found, which engines load the result, lints of the
        source, how the vocabulary was cut, where that was asked for, and all warnings; with recipe
        "auto" also what each recipe is worth (`ChosenReport`). Each warning is a Python warning
        (`DraftQuantWarning`) too.

    Raises:
        DraftQuantError: a stage failed: reading, planning, computing, writing or verifying. Nothing
            is left behind.
    """
    if settings.is_auto:
        from ...validate.runs.auto_run import choose_and_quantize

        return choose_and_quantize(settings)
    from ...calibration.runs.quantize_run import quantize_as_asked

    return quantize_as_asked(settings)


def _say_beside(report: "reports.QuantizeReport", settings: Quantizing) -> None:
    for lint in report.lints if settings.fix_config else ():
        for key, value in lint.fix.items():
            stderr().line(f"config.json: {key} = {json.dumps(value)} ({lint.name})")
    if not is_ours(read_card(report.out)):
        card = report.out / CARD_FILE
        stderr().line(
            f"{CARD_FILE} is the source's; 'draftquant card {report.out} --out {card} --overwrite'"
            " puts the quantized draft's card in front of it"
        )


def _show(report: "reports.QuantizeReport", settings: Quantizing) -> None:
    from ...quantize.engines.plan_verdicts import verdict_lines

    plan, out = report.plan, stdout()
    if settings.is_auto:
        _show_choice(report)
    times = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in _seconds(settings).items())
    changed = len(plan.quantized) + len(report.balanced.keys() | report.learned_norms.keys())
    kept = len(plan.remaining.rows) - changed
    out.line(
        (str(report.out), "bold"),
        f": {len(plan.quantized)} linears quantized by {plan.recipe.backend}, "
        f"{kept} tensors kept byte for byte, "
        f"{megabytes(plan.bytes_before)} -> {megabytes(plan.bytes_after)}, verified ({times})",
    )
    for step in plan.dropped:
        name = step.row.tensor.name
        out.line(
            f"{name}: dropped, {megabytes(step.bytes_before)}; it equals the target's"
            f" {report.dropped[name]} byte for byte, which engines use instead"
        )
    if report.few_inputs:
        out.line(few_inputs_line(report.few_inputs))
    for norm, exponent in report.balanced.items():
        out.line(
            f"{norm}: divided by 2^{exponent}, the embedding columns behind it multiplied by it"
            " (balance_concat: the same network, both halves under one scale)"
        )
    if report.learned_norms:
        out.line(
            f"norms that learned: {', '.join(sorted(report.learned_norms))}; no element changed by"
            f" a factor of more than {max(report.learned_norms.values()):.4g}"
        )
    for line in verdict_lines(report.loads):
        out.line(line)


def _show_choice(report: "reports.QuantizeReport") -> None:
    from ...validate.comparison.recipe_selection import COLUMNS, rows
    from ...validate.runs.auto_run import ChosenReport

    assert isinstance(report, ChosenReport)
    choice, out = report.selection, stdout()
    heading = f"Recipes that {choice.engine} loads on {choice.gpu}"
    shown = table(heading, *COLUMNS)
    for cells in rows(choice):
        shown.row(*cells)
    print_table(shown)
    out.line((choice.told, "bold"))
    out.line(f"{choice.ordered_by} Judge the draft on other prompts: draftquant gate.")


def few_inputs_line(few: Mapping[str, int]) -> str:
    """What was not rounded by the recipe, since too few tokens were routed to it."""
    first, seen = min(few.items(), key=lambda item: item[1])
    return (
        f"{len(few)} linears of experts were rounded to nearest: the traces route too few tokens"
        f" to them (fewest: {seen} inputs of {first}; all of them in draftquant.json: few_inputs)"
    )


def _seconds(settings: Quantizing) -> Mapping[str, float]:
    """Stage -> wall seconds; the last stage ends here."""
    assert isinstance(settings.listener, OnTerminal)
    settings.listener.stage("")
    return settings.listener.spent


COMMAND = Command(
    quantize,
    _show,
    lambda report, settings: report.to_mapping(_seconds(settings)),
    beside=_say_beside,
)
