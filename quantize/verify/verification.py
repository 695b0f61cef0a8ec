"""Verification of a quantized folder, of a cut one, and of a target with a layer in it.

A quantized folder is read byte by byte with a separate decoder: nothing that wrote the folder is
used here, nor torch, so that an error of the writer cannot hide in a shared helper.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from typing_extensions import override

from ...recipes.brief import Brief
from ...recipes.errors import CheckpointError, VerifyError
from ...recipes.regular_file import optional_path
from ..asked import Verifying
from ..drafts import Draft, Family, read_draft
from ..drafts.recognition import refuse_other_kinds
from ..drafts.unknown_family import recorded_roles
from ..files import provenance as records
from ..files.checkpoint import CONFIG_FILE, PROVENANCE_FILE, Checkpoint
from ..files.digests import tensor_digest
from ..files.hub import DraftSource, resolve_draft
from ..files.provenance_file import read_provenance
from ..files.safetensors_header import TensorInfo
from ..stored.layouts.scheme import DeclaredScheme
from ..stored.stored_declaration import declared_scheme, looks_quantized
from ..stored.stored_draft import StoredDraft
from . import demands
from .changed_values import ChangedNorms, cache_scale_faults, cache_scale_names, config_faults
from .codes import compare_linear
from .comparison import (
    BytesRead,
    Compared,
    Fault,
    Sides,
    VerifyReport,
    compare_all,
    compare_kept,
    hash_the_rest,
)
from .cut_view import cut_between, cut_of, quantized_record, verify_cut
from .folder_faults import (
    check_is_checkpoint,
    exclude_faults,
    file_faults,
    fused_faults,
    sort_tensors,
)
from .foreign_rules import about_matrix_scale_faults
from .graft_verification import GraftVerification, verify_graft
from .scales import CodeRule, Demand, companion_faults, rule_of

OnProgress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read), from one thread at a time."""


def verify(
    output: Path,
    source: Path,
    on_progress: OnProgress | None = None,
    *,
    method: records.Method | None = None,
    config_changes: Mapping[str, object] = MappingProxyType({}),
    foreign: bool = False,
    target: Path | None = None,
    subtree: str | None = None,
    config_file: str = CONFIG_FILE,
) -> VerifyReport:
    """Check every byte of a quantized folder against the draft that it was made from.

    Every source tensor must be in the output, either with the same bytes or, for linears, as codes
    and scales stored exactly as declared, unless the recipe drops it; nothing else may be in
    the output, tensor or file. Its config.json is the source's with the changes that the run
    recorded, none of which changes what the draft computes.

    Args:
        method: of the run that wrote the folder and has recorded nothing yet; None = as its
            draftquant.json says.
        config_changes: those of that run: dotted config.json key -> value.
        target: has the tables that the recipe drops; they are compared again.

    Raises:
        CheckpointError: `source` is not an unquantized draft, or holds files that must not be
            copied; `output` is not a quantized checkpoint; `target` lacks these tables.
    """
    of_source = Checkpoint.open(source, subtree=subtree)
    roles = method.roles if method is not None else _roles_of(output)
    of_source = replace(of_source, roles=roles)
    if method is None and (cut := cut_of(output, of_source)) is not None:
        return verify_cut(output, StoredDraft.read(of_source), cut, target=target)
    draft = read_draft(of_source)
    check_is_checkpoint(output, config_file)
    try:
        checkpoint = Checkpoint.open(output, config_file=config_file)
        scheme = declared_scheme(checkpoint)
        record = read_provenance(output)
        assert not isinstance(record, records.DequantizedProvenance | records.GraftedProvenance)
        made = quantized_record(record)
        run = method
        if run is None and isinstance(made, records.QuantizedProvenance):
            run = made.method
        rule = rule_of(run, regrouped=demands.is_regrouped(made, scheme))
    except (CheckpointError, VerifyError) as exc:
        fault = Fault(exc.where, "readable headers and declaration", exc.what)
        return VerifyReport(output=str(output), source=str(source), faults=(fault,))
    with cut_between(draft, checkpoint, record, target) as (draft, made, faults):
        changes: Mapping[str, object] | None = config_changes
        if method is None:  # without a method, another tool wrote config.json
            changes = made.config_changes if isinstance(made, records.QuantizedProvenance) else None
        report = _Comparison(
            draft=draft, output=checkpoint, scheme=scheme, record=made, method=run, rule=rule,
            changes=changes, target=target, on_progress=on_progress,
        ).report()  # fmt: skip
    if made is None and method is None and not foreign:
        faults = (demands.NO_RECORD, *faults)
    return replace(report, faults=(*faults, *report.faults))


@dataclass(kw_only=True)
class _Comparison:
    """One run: header checks, then all tensors in threads, then what depends on the hashes."""

    draft: Draft
    output: Checkpoint
    scheme: DeclaredScheme | None
    record: demands.Record | None
    method: records.Method | None
    rule: CodeRule
    changes: Mapping[str, object] | None
    target: Path | None
    on_progress: OnProgress | None

    def __post_init__(self) -> None:
        draft, output, method = self.draft, self.output, self.method
        self.source, record = draft.checkpoint, self.record
        self.dropped = demands.dropped_rows(method.recipe, draft) if method else ()
        self.demands = demands.demands_of(draft, self.scheme, method, record)
        left = demands.remaining(draft, self.dropped)
        beside = cache_scale_names(left, output)
        self.sorting = sort_tensors(left, output, self.demands, beside)
        quantized = self.sorting.quantized
        if method is None and self.scheme is None and not quantized:
            raise CheckpointError(
                output.folder,
                "there is nothing to verify: it declares no quantization and stores no quantized"
                " linear",
                fix="give the quantized folder first, and its source behind --against",
            )
        self.norms = ChangedNorms.of(method, draft, quantized) if method else ChangedNorms()
        total, tell = draft.checkpoint.nbytes + output.nbytes, self.on_progress
        self.progress = BytesRead(lambda _: tell(self.progress.done, total) if tell else None)
        self.sides = Sides(self.source, output, self.progress.add)

    def report(self) -> VerifyReport:
        sorting = self.sorting
        quantized, exponents = sorting.quantized, self.norms.exponents
        whole_of = demands.whole_demands(self.draft, self.demands, quantized, exponents)
        linears = {row.tensor.name: (row, parts) for row, parts in sorting.linears}

        def compare(tensor: TensorInfo) -> Compared:
            if tensor.name not in linears:
                changed = self.norms.changes(tensor)
                return (self.norms.compare if changed else compare_kept)(self.sides, tensor)
            row, parts = linears[tensor.name]
            return self._compare_linear(tensor, whole_of[row.module], parts)

        rows = (*sorting.kept, *(row for row, _ in sorting.linears))
        whole = compare_all((row.tensor for row in rows), compare)
        faults = [*self._header_faults(), *whole.faults]
        faults += self._foreign_matrix_scale_faults(whole.absmax)
        # Tensors that are dropped, or that a fault kept from being compared.
        faults += hash_the_rest(self.sides, whole)
        if self.record is not None:
            faults += demands.record_faults(self.record, self.draft, self.output, whole)
        demanded = [self.demands[m].rule for m in sorted(quantized & self.demands.keys())]
        return VerifyReport(
            output=str(self.output.folder),
            source=str(self.source.folder),
            scheme=str(self.scheme) if self.scheme else None,
            rule="; ".join(dict.fromkeys(map(str, demanded or [self.rule]))),
            kept=len(sorting.kept) - len(self.norms.factors),
            quantized=len(sorting.linears),
            bytes_compared=self.progress.done,
            linears=tuple(whole.linears),
            faults=tuple(faults),
            dropped=tuple(row.tensor.name for row in self.dropped),
            dropped_shown=bool(self.dropped) and self.target is not None,
            learned_norms=self.norms.factors,
            **whole.digests,
        )

    def _header_faults(self) -> Iterator[Fault]:
        sorting, scheme, method = self.sorting, self.scheme, self.method
        record = self.record if isinstance(self.record, records.QuantizedProvenance) else None
        ours = method is not None
        yield from sorting.faults
        if scheme is not None:
            left = demands.remaining(self.draft, self.dropped)
            yield from exclude_faults(left, scheme, sorting.quantized, all_listed=ours)
        sides = self.draft, self.output
        yield from fused_faults(*sides, scheme, sorting.quantized, sorting.complete)
        yield from config_faults(*sides, self.changes)
        side_file = scheme.layout.side_file if scheme else None
        if side_file and not (self.output.folder / side_file.name).is_file():
            yield Fault(side_file.name, side_file.what, "none")
        yield from cache_scale_faults(*sides, scheme, method)
        yield from file_faults(self.source, self.output, scheme, foreign=not ours, recorded=record)
        if method is None:
            return
        recipe = method.recipe
        if record is not None:
            yield from demands.method_faults(method, record.method)
        yield from demands.declared_faults(recipe, scheme, self.draft)
        if record is not None and scheme is not None:
            yield from demands.complete_faults(recipe, scheme, *sides)
        yield from demands.action_faults(recipe, self.draft, sorting.quantized)
        yield from demands.dropped_faults(self.draft, self.dropped, record, self.target)
        yield from demands.input_scale_faults(method, *sides, sorting.complete)
        yield from self.norms.faults

    def _compare_linear(
        self, tensor: TensorInfo, demand: Demand, parts: Mapping[str, TensorInfo]
    ) -> Compared:
        compared = compare_linear(self.sides, tensor, demand)
        if demand.scheme is not None:
            of = self.output, demand.scheme, tensor, parts
            compared.faults += companion_faults(*of, symmetric=demand.rule.of_our_own)
        for part in parts.values():
            if part.name not in compared.output_digests:
                digest = tensor_digest(self.output, part)
                compared.output_digests[part.name] = digest
                self.progress.add(part.nbytes)
        return compared

    def _foreign_matrix_scale_faults(self, largest: Mapping[str, float]) -> list[Fault]:
        if self.rule.scales != "about-absmax":
            return []
        schemes = {m: s for m in largest if (s := self.demands[m].scheme) and s.scales_whole_matrix}
        fused = [group for group in self.draft.scale_groups() if schemes.keys() >= set(group)]
        alone = schemes.keys() - {module for group in fused for module in group}
        faults = []
        for group in (*fused, *((module,) for module in sorted(alone))):
            absmax = {module: largest[module] for module in group}
            faults += about_matrix_scale_faults(self.output, schemes[group[0]], absmax)
        return faults


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(Brief):
    """What verifying a folder found, for a draft or for a target with a layer in it.

    Attributes:
        comparison: how the folder compares with its source; None for a target's folder.
        graft: the same for a target's folder with a layer in it.
    """

    comparison: VerifyReport | None
    graft: GraftVerification | None = None

    @property
    def ok(self) -> bool:
        """True if every byte is right."""
        return self._found.ok

    @property
    def _found(self) -> VerifyReport | GraftVerification:
        report = self.comparison or self.graft
        assert report is not None  # one of the two was compared
        return report

    @property
    def faults(self) -> tuple[str, ...]:
        """Everything that is wrong."""
        return tuple(str(fault) for fault in self._found.faults)

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        return self._found.to_mapping()

    @override
    def brief(self) -> Mapping[str, object]:
        return {**self._found.brief(), "faults": len(self.faults) or None}


def verify_as_asked(asked: Verifying) -> Verification:
    """Compare a folder with what it was made from; a wrong byte is a fault in the result."""
    folder = Path(asked.output)
    record = _record_of(folder) if folder.is_dir() else None
    if isinstance(record, records.GraftedProvenance):
        return Verification(comparison=None, graft=_compared_graft(asked, record))
    if isinstance(record, records.DequantizedProvenance):
        raise CheckpointError(
            folder / PROVENANCE_FILE,
            "there is nothing to verify: the folder was dequantized, and holds no quantized values",
            fix="verify the quantized folder that it was made from",
        )
    if asked.layer is not None:
        raise CheckpointError(
            "--layer",
            f"{asked.output} is no target's folder that `draftquant graft` wrote",
            fix="leave it out",
        )
    return Verification(comparison=_compared(asked))


def _record_of(folder: Path) -> records.Provenance | None:
    with suppress(CheckpointError):  # an unreadable one is a fault of the folder
        return read_provenance(folder)
    return None


def _compared_graft(asked: Verifying, record: records.GraftedProvenance) -> GraftVerification:
    layer = None
    if asked.layer is not None:
        layer = resolve_draft(str(asked.layer), asked.subtree).checkpoint()
    with asked.listener.bar("verify", None) as bar:
        return verify_graft(
            Path(asked.output),
            Path(asked.against),
            record.layers,
            layer=layer,
            record=record,
            on_progress=bar.advance,
        )


def _compared(asked: Verifying) -> VerifyReport:
    source = resolve_draft(str(asked.against), asked.subtree)
    quantized = resolve_draft(str(asked.output))
    family = _check_sides(quantized, source, foreign=asked.foreign)
    if family.notice is not None:
        asked.listener.note(family.notice)
    with asked.listener.bar("read headers", None) as bar:

        def show(done: int, total: int) -> None:
            if not bar.measured:
                bar.phase("verify", total, "bytes")
            bar.set(done, total)

        return verify(
            quantized.folder,
            source.folder,
            show,
            foreign=asked.foreign,
            target=optional_path(asked.target),
            subtree=source.subtree,
        )


def _roles_of(output: Path) -> tuple[str, ...]:
    """As `--role` said when it was made; a record that cannot be read is a fault of its own."""
    with suppress(CheckpointError):
        return recorded_roles(output)
    return ()


def _check_sides(output: DraftSource, source: DraftSource, *, foreign: bool) -> Family:
    """Check that both are in place, of one family, and that a foreign declaration is understood."""
    given, record = source.checkpoint(), _record_of(output.folder)
    refuse_other_kinds(given)
    if looks_quantized(given) and not isinstance(record, records.CutProvenance):
        raise CheckpointError(
            source.folder,
            "expected the unquantized draft behind --against, but this one is quantized",
            fix=f"are the two in the wrong order? Then run draftquant verify {source.folder}"
            f" --against {output.folder}",
        )
    family = StoredDraft.look(given).draft.family
    if (
        isinstance(record, records.QuantizedProvenance | records.CutProvenance)
        and record.source.family != family.name
    ):
        raise CheckpointError(
            source.folder,
            f"is of family {family.name}: {output.folder} was made from one of"
            f" {record.source.family}",
            fix="give the draft that it was made from behind --against",
        )
    if foreign:
        with suppress(CheckpointError):  # a fault of the folder
            declared_scheme(Checkpoint.open(output.folder))
    return family
