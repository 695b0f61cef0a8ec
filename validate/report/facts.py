"""What a report says of the drafts: which they are, what was quantized, what engines do.

Drafts are known by the hash of their tensors; names are for people.
"""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from ...quantize.drafts import Draft
from ...quantize.drafts.draft_cache import scale_origin
from ...quantize.drafts.geometry import vocabulary_share
from ...quantize.engines.contract import EngineCheck
from ...quantize.engines.engine import Serving
from ...quantize.engines.engine_check import check_checkpoint
from ...quantize.engines.versions import ENGINES
from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.provenance import QuantizedProvenance
from ...quantize.planning.claims import names_row
from ...quantize.stored.layouts import HF_QUANT_CONFIG
from ...quantize.stored.stored_declaration import declared_scheme
from ...quantize.stored.stored_draft import StoredDraft
from ...quantize.stored.stored_tables import EMBEDDING, HEAD
from ...recipes.errors import GateError
from ...recipes.formats import AS_STORED, ServedForm
from ...recipes.packages import package_version
from ..judging.candidate_origin import DraftFolder
from ..measure.measurement import Measurement

_EPOCH, _DATE = "SOURCE_DATE_EPOCH", "%Y-%m-%dT%H:%M:%SZ"
_MOST_DIGITS = 11  # of seconds: enough until the year 5138
_TABLES = (("embedding", EMBEDDING), ("head", HEAD))
PACKAGES = ("torch", "numpy", "scipy", "safetensors", "transformers")
"""Packages that figures of a replay depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFacts:
    """A rule of the recipe: for which tensors, what happened to them, and why they were kept."""

    tensors: str
    action: str
    why: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationFacts:
    """How a draft was quantized, from its draftquant.json; the recipe's own format first."""

    recipe: str
    recipe_sha256: str
    formats: tuple[str, ...]
    algorithm: str
    layout: str
    backend: str
    backend_versions: Mapping[str, str]
    rules: tuple[RuleFacts, ...]
    num_quantized: int
    num_kept: int
    bytes_before: int
    bytes_after: int
    num_calibration_prompts: int
    draftquant: str
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """One draft; None = not known, or its folder was unavailable because the draft was served.

    `hub_id` and `revision` are those of the draft that was quantized; `vocabulary` None = it can
    propose all of the target's tokens; `kv_cache` None = as it computes.
    """

    name: str
    sha256: str | None
    family: str | None = None
    num_bytes: int | None = None
    quantization: str | None = None
    quantized: QuantizationFacts | None = None
    hub_id: str | None = None
    revision: str | None = None
    vocabulary: str | None = None
    kv_cache: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What one engine does with the candidate on one GPU; fields as in `EngineCheck`."""

    engine: str
    version: str
    arch: str | None
    verdict: str
    evidence: str
    error: str | None
    remedy: str | None
    launch: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Which drafts were compared."""

    baseline: DraftFacts
    candidate: DraftFacts


def drafts_of(
    names: Sequence[str], folders: Sequence[DraftFolder], forms: Sequence[ServedForm]
) -> Drafts:
    """Facts of folders that were read, baseline first; `forms` is what an engine made of each."""
    baseline, candidate = map(folder_facts, names, folders, forms or [AS_STORED] * len(folders))
    return Drafts(baseline=baseline, candidate=candidate)


def folder_facts(name: str, folder: DraftFolder, form: ServedForm = AS_STORED) -> DraftFacts:
    """Facts of a folder whose tensors are hashed, named as the user gave it."""
    checkpoint = Checkpoint.open(folder.folder)
    record = folder.quantized_by
    declared = "of another tool" if folder.quantized else "none"
    given, stored = Path(name), StoredDraft.look(checkpoint, declared_scheme(checkpoint))
    cache = (None if stored.scheme is None else stored.scheme.kv_cache) or form.kv_cache
    scales = cache and (scale_origin(stored.served_cache(cache)) or "unit")
    return DraftFacts(
        name=given.resolve().name if given.is_dir() else name,
        sha256=folder.sha256,
        family=stored.draft.family.name,
        num_bytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        quantization=form.label(declared if record is None else record.recipe.name),
        quantized=None if record is None else _quantization(record, stored.draft),
        hub_id=None if record is None else record.source.hub_id,
        revision=None if record is None else record.source.revision,
        vocabulary=vocabulary_share(stored.draft.geometry),
        kv_cache=cache and f"{cache}, {scales} scales",
    )


def measured_facts(measurement: Measurement) -> DraftFacts:
    """Facts of the draft that a server had, as far as the measurement says."""
    speculation = measurement.setup.speculation
    if speculation is None:
        return DraftFacts(name=measurement.name, sha256=None)
    return DraftFacts(
        name=speculation.draft or measurement.name,
        sha256=speculation.draft_sha256,
        quantization=speculation.draft_quantization,
    )


def engine_checks(checkpoint: Checkpoint, name: str) -> Iterator[EngineCheck]:
    """What the newest version of every engine does with draft `name` on each GPU."""
    has_side_file = (checkpoint.folder / HF_QUANT_CONFIG).is_file()
    how = Serving(draft=name)
    for engine in ENGINES.values():
        for arch in engine.gpus:
            yield check_checkpoint(
                checkpoint, engine=engine.name, arch=arch, has_side_file=has_side_file, serving=how
            )


def engine_facts(folder: Path, name: str) -> tuple[EngineFacts, ...]:
    """The same in the form of a report, with commands where the draft may load."""
    names = [each.name for each in fields(EngineFacts)]
    facts = []
    for check in engine_checks(Checkpoint.open(folder), name):
        told = {each: getattr(check, each) for each in names}
        launch = check.launch if check.verdict in ("LOADS", "UNKNOWN") else None
        facts.append(EngineFacts(**told | {"launch": launch}))
    return tuple(facts)


def today() -> str:
    """The time in UTC, 2026-11-23T07:42:26Z, or SOURCE_DATE_EPOCH for repeatable builds."""
    asked = os.environ.get(_EPOCH, "")
    if not asked:
        return datetime.now(UTC).strftime(_DATE)
    plain = asked.isascii() and asked.isdigit() and len(asked) <= _MOST_DIGITS
    if not plain:
        raise GateError(
            f"${_EPOCH}",
            f"expected seconds since 1970, got {asked!r}",
            fix="unset it, or give for example the time of the commit: git log -1 --format=%ct",
        )
    return datetime.fromtimestamp(int(asked), UTC).strftime(_DATE)


def is_date(text: str) -> bool:
    """Whether a text has the form of `today`."""
    try:
        return datetime.strptime(text, _DATE).strftime(_DATE) == text
    except ValueError:
        return False


def environment() -> Mapping[str, str]:
    """Versions of Python and of the computing packages, as far as installed."""
    return {
        "python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
    }


def _rules(record: QuantizedProvenance, draft: Draft) -> Iterator[RuleFacts]:
    """The rules by which the draft has tensors, or had those that were dropped, and their roles."""
    roles: set[str] = {row.role for row in draft.rows}
    roles |= {"norm"} if roles & {"other", "router", "indexer"} else set()
    roles |= {role for name in record.dropped for role, of in _TABLES if name.endswith(of)}
    for rule in record.recipe.rules:
        held: list[str] = [role for role in rule.role if role in roles]
        held += rule.tensor if any(names_row(rule, row) for row in draft.rows) else ()
        if held:
            yield RuleFacts(tensors=", ".join(held), action=rule.action, why=rule.why)


def _quantization(record: QuantizedProvenance, draft: Draft) -> QuantizationFacts:
    recipe = record.recipe
    before, after = record.source.tensor_digests, record.tensor_digests
    changed = {name for name, digest in before.items() if after.get(name) != digest}
    quantized = changed - record.dropped.keys() - record.method.changed_norms
    return QuantizationFacts(
        recipe=recipe.name,
        recipe_sha256=record.recipe_sha256,
        formats=tuple(dict.fromkeys(map(str, recipe.formats))),
        algorithm=recipe.algorithm.name,
        layout=recipe.layout,
        backend=recipe.backend,
        backend_versions=record.backend_versions,
        rules=tuple(_rules(record, draft)),
        num_quantized=len(quantized),
        num_kept=len(before) - len(quantized) - len(record.dropped),
        bytes_before=record.tensor_bytes.before,
        bytes_after=record.tensor_bytes.after,
        num_calibration_prompts=len(record.calibration_prompts),
        draftquant=record.draftquant,
        argv=record.argv,
    )
