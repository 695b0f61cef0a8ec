"""`model_card`: README.md of a folder that we wrote, for people and for the Hub."""

import hashlib
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...quantize.files import provenance as records
from ...quantize.files.card_text import (
    CARD_FILE,
    around,
    card_text,
    code,
    code_block,
    prose,
    read_card,
    table,
)
from ...quantize.files.checkpoint import PROVENANCE_FILE, Checkpoint
from ...quantize.files.digests import tensor_digests, tensors_sha256
from ...quantize.files.hub import is_hub_id
from ...quantize.files.provenance_file import check_seal, quantization_of, read_provenance
from ...quantize.gpus import gpus_of
from ...quantize.making.folder_card import CardFacts, Making
from ...quantize.stored.stored_draft import StoredDraft
from ...recipes.errors import CardError, CheckpointError
from ...recipes.packages import package_version
from ...recipes.regular_file import open_stream
from ...recipes.schema import recipe_sha256
from ..judging.judgement import GateReport
from ..measure.measurement import Figures, Measurement, Speculation, all_figures, tokens_per_second
from ..measure.measurement_file import read_measurement
from . import CardRequest, words
from .document import Document, read_report
from .facts import engine_checks
from .report_texts import plain_text


def check_served(measurement: Measurement, candidate_sha256: str) -> Speculation:
    """How a server drafted with the draft of this identity, else CardError."""
    speculation = measurement.setup.speculation
    if speculation is None:
        what, fix = "the measured server used no draft", "give a measurement with this draft"
        raise CardError(measurement.name, what, fix=fix)
    other = speculation.draft_sha256
    if other is None:
        raise CardError(
            measurement.name,
            "does not know which draft was served: its draft_sha256 is null",
            fix="measure with --draft FOLDER, which names the draft by its tensors",
        )
    if other != candidate_sha256:
        what = f"is of a draft whose tensors are {other[:12]}, expected {candidate_sha256[:12]}"
        fix = "give a measurement of a server with this folder"
        raise CardError(measurement.name, what, fix=fix)
    return speculation


def _row(figures: Figures) -> tuple[str, ...]:
    length = figures.acceptance_length
    times = (figures.time_to_first_token, figures.time_per_output_token)
    return (
        prose(figures.category),
        f"{figures.num_requests:,}",
        f"{figures.num_output_tokens:,}",
        "" if length is None else f"{length:.4f}",
        *("" if seconds is None else f"{1000 * seconds:,.1f}" for seconds in times),
    )


def read_gate(path: Path, candidate_sha256: str) -> Document:
    """A report of the gate on the draft with this identity, else CardError."""
    document = read_report(path)
    for _, each in document.comparisons:
        known = each.background
        if each.served and each.served.of_one_draft:
            raise CardError(
                path,
                "judges one draft in two places, not a quantized draft against its BF16 draft",
                fix="give a report of 'gate BF16 QUANT'",
            )
        if known.candidate_sha256 is None or known.baseline_sha256 is None:
            raise CardError(
                path,
                "does not know which drafts it judges: a sha256 of their tensors is null",
                fix="run the gate on both folders, or on measurements that were taken with --draft",
            )
    judged = {each.background.candidate_sha256 for _, each in document.comparisons}
    if judged != {candidate_sha256}:
        (other,) = sorted(filter(None, judged - {candidate_sha256}))[:1]
        what = f"judges a draft whose tensors are {other[:12]}, expected {candidate_sha256[:12]}"
        raise CardError(path, what, fix="run the gate on this folder, and give its report")
    return document


def _table(report: GateReport) -> str:
    rows = []
    for row in words.rows(report):
        change = ("", "", "")
        if row.change is not None:
            change = row.change.in_percent(row.limit)
        rows.append(
            (prose(row.name or "all"), row.prompts, f"{row.before:.4f}",
             f"{row.after:.4f}", *change, words.limit(row.limit), row.outcome or "too few prompts")
        )  # fmt: skip
    head = ("category", "prompts", "unquantized", "this draft", "change", "lower bound",
            "upper bound", "limit", "outcome")  # fmt: skip
    return table(head, [*rows[1:], rows[0]])


HERE = "PATH_OF_THIS_FOLDER"
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}")


def model_card(folder: Path, request: CardRequest) -> str:
    """The text of README.md, with what others wrote around our part.

    Every tensor is read, and must be the recorded one.
    """
    checkpoint = Checkpoint.open(folder)
    recorded = read_provenance(folder)
    check_seal(folder, recorded)
    record = _making(folder, recorded)
    stored = StoredDraft.read(checkpoint)
    facts = CardFacts.of_folder(stored, record)
    front = _front_matter(facts, request)
    recorded_digests = recorded.tensor_digests if recorded is not None else {}
    digests = tensor_digests(checkpoint)
    if digests != recorded_digests:
        what = f"its tensors are not those that {PROVENANCE_FILE} records"
        fix = "'draftquant verify' says which differ; quantize the draft again"
        raise CheckpointError(folder, what, fix=fix)
    identity = tensors_sha256(digests)
    gate = None if request.gate is None else read_gate(Path(request.gate), identity)
    measured = map(read_measurement, map(Path, request.measured))
    served = [(measurement, check_served(measurement, identity)) for measurement in measured]
    before, behind = around(read_card(folder))
    engines, commands = _engines(checkpoint, request.name or HERE)
    maker = getattr(record, "made_by", None) or record
    versions = {"draftquant": maker.draftquant, **getattr(record, "backend_versions", {})}
    ours = section(
        "card.md.j2",
        facts=facts,
        record=record,
        gate=gate,
        served=served,
        engines=engines,
        commands=commands,
        maker=maker,
        versions=[(prose(name), prose(version)) for name, version in sorted(versions.items())],
        identity=identity,
        files=_files(checkpoint),
        dtypes=_by_dtype(checkpoint, stored),
    )
    return card_text(front, [ours], before=before, behind=behind)


def section(template: str, **values: Any) -> str:
    """A card, or a part of it, from its template."""
    return plain_text(
        template,
        {"prose": prose, "code": code, "code_block": code_block},
        **values,
        words=words,
        table=table,
        comparison=_table,
        figures=lambda measurement: list(map(_row, all_figures(measurement))),
        speed_of=tokens_per_second,
        shell=shlex.join,
        recipe_sha256=recipe_sha256,
        here=HERE,
        version=package_version("draftquant"),
    ).strip("\n")


def _making(folder: Path, recorded: records.Provenance | None) -> Making:
    """How it was quantized or, of plain weights, cut."""
    if isinstance(recorded, records.CutProvenance) and recorded.quantized_by is None:
        return recorded
    plain = isinstance(recorded, records.DequantizedProvenance)
    record = None if plain else quantization_of(recorded)
    if record is None:
        got = "no such file" if recorded is None else f"format {recorded.format!r}"
        raise CardError(
            folder / PROVENANCE_FILE,
            f"expected the record of a quantization or a cut, got {got}",
            fix="give a folder that `draftquant quantize` or `vocab` wrote",
        )
    return record


def _front_matter(facts: CardFacts, request: CardRequest) -> dict[str, object]:
    base = request.base_model or facts.hub_id
    for option, name in (("--base-model", base), ("--name", request.name)):
        if name is not None and (not is_hub_id(name) or "@" in name):
            raise CardError(
                option,
                f"expected a Hub id (owner/name), got {name!r}",
                fix="for example someone/eagle3-draft",
            )
    if base is None:
        what = f"{PROVENANCE_FILE} says that a local folder was {facts.kind}, and names no draft of"
        fix = "add --base-model OWNER/NAME, the source draft"
        raise CardError("--base-model", f"{what} the Hub", fix=fix)
    if request.license is None and "license" not in facts.inherited:
        raise CardError(
            "--license",
            f"neither {CARD_FILE} nor the command line names a licence",
            fix="add --license ID, that of the source draft, such as apache-2.0, mit or other",
        )
    if request.license is not None and not _LICENSE.fullmatch(request.license):
        raise CardError(
            "--license",
            f"expected a licence of the Hub, got {request.license!r}",
            fix="for example apache-2.0, mit or other",
        )
    return facts.front_matter(base_model=base, license=request.license)


def _engines(
    checkpoint: Checkpoint, name: str
) -> tuple[list[tuple[str, ...]], Mapping[str, Sequence[str]]]:
    rows: list[tuple[str, ...]] = []
    commands = defaultdict[str, list[str]](list)
    for check in engine_checks(checkpoint, name):
        arch = check.arch or ""
        names = gpus_of(arch)
        gpus = f"{names} ({arch})" if names not in ("", arch) else arch
        engine = f"{check.engine} {check.version}"
        rows.append((engine, gpus, check.verdict, prose(check.error or "")))
        if check.verdict == "LOADS" and check.launch:
            commands[check.launch].append(f"{engine} on {gpus}")
    return rows, commands


def _files(checkpoint: Checkpoint) -> list[tuple[str, str, str]]:
    rows = []
    for name in sorted(checkpoint.headers):
        path = checkpoint.folder / name
        with open_stream(path) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        rows.append((code(name), f"{path.stat().st_size:,}", code(digest)))
    return rows


def _by_dtype(checkpoint: Checkpoint, stored: StoredDraft) -> list[tuple[str, str, str, str]]:
    roles = {row.module: row.role for row in stored.draft.rows}
    counted: dict[tuple[str, str], list[int]] = defaultdict(list)
    for tensor in checkpoint.tensors.values():
        module = tensor.name.removesuffix(".weight")
        role = roles.get(module) or roles.get(tensor.name.rpartition(".")[0]) or "other"
        counted[role, tensor.dtype].append(tensor.nbytes)
    return [
        (prose(role), code(dtype), f"{len(sizes):,}", f"{sum(sizes):,}")
        for (role, dtype), sizes in sorted(counted.items())
    ]
