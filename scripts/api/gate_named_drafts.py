"""Drafts that are named beside measurements and parity: what was measured has to be of them.

A measurement says which draft its server ran by the hash of its tensors (`measure --draft`), and a
report of parity which drafts it looked at. Where nothing says it, two measurements alone do not
release a draft that is named: they could be of any other.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...validate.errors import GateError
from .gate_measured import Measured
from .gate_on_traces import GateOnTracesSettings, other_policy_warnings, recipes_to_try
from .references import folder_of

if TYPE_CHECKING:
    from ...validate.judging.anomalies import Background
    from ...validate.judging.candidate_origin import DraftFolder

_MEASURE_AGAIN = (
    "Measure each server with draftquant measure --draft, which records whose tensors it runs; or"
    " give traces of the target too (--traces), on which both drafts are replayed."
)


def named_folders(settings: GateOnTracesSettings) -> "tuple[DraftFolder, ...]":
    """The two drafts that are named without traces; none where none are.

    Raises:
        DraftQuantError: one of them cannot be read, or was edited after it was written.
    """
    from ...validate.judging.candidate_origin import DraftFolder

    if settings.traces is not None:
        return ()
    return tuple(DraftFolder.read(folder_of(name)) for name in settings.references)


def background_of_named(
    settings: GateOnTracesSettings,
    folders: "Sequence[DraftFolder]",
    measured: Measured,
    policy: str,
) -> "Background":
    """What is known of two drafts that are judged by measurements alone.

    Args:
        settings: which drafts are compared on purpose, and what is expected of the baseline.
        folders: baseline and candidate; none where none are named.
        measured: what their servers did.
        policy: name of the set of limits.

    Raises:
        GateError: the candidate was not quantized from the baseline, or one of the prompts made it.
    """
    from ...validate.judging.anomalies import Background
    from ...validate.judging.candidate_origin import check_folders
    from ...validate.judging.held_out import check_held_out_measured

    unrelated = settings.unrelated
    if not folders:
        return Background(expected_baseline=settings.expect_baseline, unrelated=unrelated)
    baseline, candidate = folders
    warnings = check_folders(baseline, candidate, unrelated=unrelated)
    if not unrelated and not candidate.is_recorded:
        warnings += (
            "without traces the candidate's weights are not compared with the baseline's"
            " (`draftquant verify QUANT --against BF16 --foreign` compares them)",
        )
    warnings += other_policy_warnings(candidate.quantized_by, policy)
    if isinstance(measured.runs, tuple):
        prompts = [(record.id, record.prompt_sha256) for record in measured.runs[1].records]
        warnings += check_held_out_measured(
            candidate.quantized_by, prompts, measured.runs[1].name, candidate.cuts
        )
    untied = tuple(not_tied(measured))
    return Background(
        baseline_sha256=baseline.sha256,
        candidate_sha256=candidate.sha256,
        expected_baseline=settings.expect_baseline,
        unrelated=unrelated,
        unrecorded=not unrelated and not candidate.is_recorded,
        recipes_to_try=recipes_to_try(candidate.quantized_by),
        cut=bool(candidate.cuts),
        quantized=candidate.quantized or not candidate.cuts,
        not_compared=untied,
        to_compare=(_MEASURE_AGAIN,) if untied else (),
        warnings=warnings,
    )


def not_tied(measured: Measured) -> Iterator[str]:
    """Measurements that may be of any draft."""
    from ...validate.served.served_gate import draft_sha256

    if measured.runs is None:
        return
    if isinstance(measured.runs, tuple):
        names = [one.name for one in measured.runs if draft_sha256(one) is None]
    else:
        names = [measured.runs.baseline.name, measured.runs.candidate.name]
    for name in names:
        yield f"whether the server of {name} ran the draft that is named ({name} does not say)"


def check_parity(measured: Measured, folders: "Sequence[DraftFolder]") -> tuple[str, ...]:
    """Each report of parity is of the drafts that are judged.

    Args:
        measured: the reports, and the measurements that are judged.
        folders: that are named: baseline and candidate.

    Returns:
        What nothing verifies, in sentences without a full stop.

    Raises:
        GateError: a report is of another draft.
    """
    from ...validate.served.served_gate import draft_sha256

    runs = measured.runs if isinstance(measured.runs, tuple) else ()
    known = {*map(draft_sha256, runs), *(folder.sha256 for folder in folders)}
    warnings = []
    for report in measured.parity:
        named = [digest for digest in report.drafts_sha256 if digest is not None]
        strange = [
            digest
            for digest in named
            if digest not in known and not any(one.is_identity(digest) for one in folders)
        ]
        # Where a measurement does not say whose it is, and no draft is named, it may be that one's.
        if strange and (folders or (runs and None not in known)):
            raise GateError(
                report.path,
                f"is of another draft than those that are judged (tensors {strange[0][:12]})",
                fix="give what 'draftquant parity --report' wrote of these drafts",
            )
        if strange or not named or len(named) < len(report.drafts_sha256):
            warnings.append(
                f"nothing shows that the findings of {report.path.name} are about the drafts that"
                " are judged: it, or a measurement, does not record whose it is"
            )
    return tuple(warnings)
