"""`accept`: may this draft be released? Every check that there is, in order, and one page."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...quantize.files.report_files import write_reports
from ...quantize.files.staging import replace_text
from . import reports
from .accept_inputs import Given, check_target, hash_of_all
from .accept_parity import PARITY
from .accept_settings import AcceptSettings
from .accept_step import Step
from .accept_steps import GATE, steps_of
from .card import CardSettings, card
from .verb import verb

if TYPE_CHECKING:
    from ...validate.acceptance.acceptance import Acceptance, StepFound
    from ...validate.acceptance.journal import Journal

_CARD = "card.md"


@verb(AcceptSettings)
def accept(settings: AcceptSettings) -> "reports.Acceptance":
    """Decide whether a quantized draft may be released, by every check that there is, in order.

    Each step is a verb of its own: check, verify, record or measure, gate, parity, card. Each
    leaves its output in the folder, so that the same call goes on with what an earlier one did.

    Returns:
        What each step found, and the worst verdict.

    Raises:
        DraftQuantError: a step cannot be carried out; what was done before stays. Or the folder
            belongs to something else, or holds results of other inputs.
    """
    from ...validate.acceptance.journal import Journal

    check_target(Path(settings.target))
    folder = Path(settings.out)
    journal = Journal(folder)
    given = Given(settings, folder)
    if settings.dry_run:
        return _acceptance(given, tuple(_looked_at(given, journal)), dry_run=True)
    with journal.writing():
        steps = _carry_out(given, journal)
        steps.append(_card(given, _acceptance(given, steps)))
        acceptance = _acceptance(given, steps)
        _report(acceptance, journal)
    return acceptance


def _looked_at(given: Given, journal: "Journal") -> Iterator["StepFound"]:
    """What is done already, and what is to do."""
    from ...validate.acceptance.acceptance import StepFound

    is_to_do = False
    for step in steps_of(given):
        # What a step that is to do will make is not known, and so not what the next ones need.
        is_to_do = is_to_do or not journal.is_done(step.output, step.inputs(), step.hash_of)
        if is_to_do:
            yield StepFound(name=step.name, outcome="NOT RUN", said=f"To do: {step.what}.")
        else:
            yield step.found(given.folder / step.output)


def _carry_out(given: Given, journal: "Journal") -> list["StepFound"]:
    """Every step, or what an earlier run made of it."""
    from ...validate.acceptance.acceptance import StepFound

    steps, done = tuple(steps_of(given)), list[StepFound]()
    ended: Step | None = None
    for number, step in enumerate(steps, start=1):
        if ended is not None:
            said = f"The draft did not get beyond {ended.name}."
            done.append(StepFound(name=step.name, outcome="NOT RUN", said=said))
            continue
        path, inputs = given.folder / step.output, step.inputs()
        is_done = journal.is_done(step.output, inputs, step.hash_of)
        says = f"step {number} of {len(steps)}, {step.name}"
        given.settings.listener.note(f"{says}: {'done before' if is_done else step.what}")
        if not is_done:
            journal.begin(step.output, inputs)
            step.run(path)
        journal.end(step.output, step.hash_of(path))
        done.append(step.found(path))
        if step.ends and done[-1].outcome == "FAIL":
            ended = step
    return done


def _acceptance(
    given: Given, steps: "Sequence[StepFound]", *, dry_run: bool = False
) -> "Acceptance":
    """What the steps found, with the report of the gate where there is one."""
    from ...validate.acceptance.acceptance import Acceptance, with_parity
    from ...validate.parity.finding import read_findings
    from ...validate.report.document import read_report

    made = {step.output for step in steps}
    findings = [
        one for name in PARITY if name in made for one in read_findings(given.folder / name)
    ]
    document = None
    if GATE in made:
        judged = [one for one in findings if one.threshold is not None]
        document = with_parity(read_report(given.folder / GATE), judged)
    return Acceptance(
        draft=_name(given.settings.draft),
        quantized=_name(given.settings.quantized),
        folder=given.folder,
        steps=tuple(steps),
        document=document,
        figures=tuple(one for one in findings if one.threshold is None),
        dry_run=dry_run,
    )


def _name(reference: str | Path) -> str:
    path = Path(reference)
    return path.resolve().name if path.is_dir() else str(reference)


def _card(given: Given, found: "Acceptance") -> "StepFound":
    """A card for a draft that passed, with the facts of the gate."""
    from ...validate.acceptance.acceptance import StepFound
    from ...validate.errors import CardError

    settings, out = given.settings, given.folder / _CARD
    if found.verdict != "PASS":
        said = "A card is written for a draft that passed."
        return StepFound(name="card", outcome="NOT RUN", said=said)
    asked = CardSettings(
        folder=settings.quantized,
        gate=given.folder / GATE,
        measured=given.measured[1:] if given.measured else (),
        base_model=settings.base_model,
        license=settings.license,
    )
    try:
        text = card.run(asked)
    except CardError as exc:  # a draft may be accepted that is not published
        said = f"No card: {exc.where}: {exc.what}."
        return StepFound(name="card", outcome="NOT RUN", said=said, details=(exc.fix,))
    replace_text(out, text)
    said = f"README.md for the Hub, to be copied into {found.quantized}."
    return StepFound(name="card", outcome="DONE", said=said, output=_CARD)


def _report(found: "Acceptance", journal: "Journal") -> None:
    """One page, again where anything is new."""
    from ...validate.acceptance.acceptance_page import FILES, acceptance_files

    said = json.dumps(found.to_mapping(), sort_keys=True)
    inputs = {"steps": hashlib.sha256(said.encode()).hexdigest()}
    files = [found.folder / name for name in FILES]
    if journal.is_current(FILES[-1], inputs, hash_of_all(files)):
        return
    journal.begin(FILES[-1], inputs)
    write_reports(acceptance_files(found), overwrite=True)
    journal.end(FILES[-1], hash_of_all(files))
