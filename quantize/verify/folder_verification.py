"""`verify`: a quantized folder against its source, byte by byte, with a decoder of its own.

It shares no code with what wrote the folder and does not import torch, so an error of the writer
cannot hide in a common helper.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ...recipes.errors import CheckpointError, VerifyError
from ..drafts import Draft, Row, read_draft
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.digests import NEWEST, algorithm_of, tensor_digest
from ..files.provenance import Method, QuantizedProvenance
from ..files.safetensors_header import TensorInfo
from ..stored.layouts.scheme import DeclaredScheme
from ..stored.stored_declaration import declared_scheme
from ..stored.stored_draft import StoredDraft
from .changed_values import ChangedNorms, cache_scale_faults, cache_scale_names, config_faults
from .codes import Demand, compare_linear
from .comparison import (
    Compared,
    Fault,
    Job,
    Progress,
    VerifyReport,
    compare_all,
    compare_kept,
    hash_the_rest,
)
from .cut_verification import cut_of, verify_cut
from .cut_view import cut_between, quantized_record
from .demands import (
    NO_RECORD,
    Record,
    action_faults,
    complete_faults,
    declared_faults,
    demands_of,
    dropped_faults,
    dropped_rows,
    input_scale_faults,
    method_faults,
    read_record,
    record_faults,
    remaining,
    whole_demands,
)
from .folder_faults import (
    check_is_checkpoint,
    exclude_faults,
    file_faults,
    fused_faults,
    side_declaration_faults,
    sort_tensors,
)
from .foreign_rules import about_matrix_scale_faults
from .scales import CodeRule, companion_faults, rule_of

OnProgress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read), from one thread at a time."""


def verify(
    output: Path,
    source: Path,
    on_progress: OnProgress | None = None,
    *,
    method: Method | None = None,
    config_changes: Mapping[str, object] = MappingProxyType({}),
    foreign: bool = False,
    target: Path | None = None,
    subtree: str | None = None,
    config_file: str = CONFIG_FILE,
) -> VerifyReport:
    """Check every byte of a quantized folder against the draft that it was made from.

    Every source tensor must be in the output, either with the same bytes or, for linears, as codes
    and scales stored exactly as the output declares, or the recipe drops it; nothing else may be in
    the output, tensor or file. Its config.json is the source's with the changes that the run says,
    none of which changes what the draft computes.

    Codes and scales, input scales and what balancing and learning changed in norms are held against
    the method: bit for bit where the recipe's algorithm says what they are. Of a folder that
    another tool made there is none: its codes must be the nearest rounding of the source, its
    scales those of absmax, but for the roundings that such tools are known to do.

    Args:
        method: of the run that wrote the folder and has recorded nothing yet; None = what its
            draftquant.json says.
        config_changes: of that run: dotted config.json key -> value.
        foreign: another tool made the folder, so that it needs no draftquant.json.
        target: whose tables stand for those that the recipe drops; they are compared again.
        subtree: of the source, where that is a layer in its target's folder; see `Checkpoint`.

    Returns:
        A report with all faults. A truncated or lying file of the output is a fault as well.

    Raises:
        CheckpointError: `source` is not an unquantized draft, or holds what must not travel;
            `output` is no checkpoint at all, or not quantized; `target` has no such tables.
    """
    of_source = Checkpoint.open(source, subtree=subtree)
    if method is None and (cut := cut_of(output, of_source)) is not None:
        return verify_cut(
            output, StoredDraft.read(of_source), cut, target=target, config_file=config_file
        )
    draft = read_draft(of_source)
    check_is_checkpoint(output, config_file)
    try:
        checkpoint = Checkpoint.open(output, config_file=config_file)
        scheme = declared_scheme(checkpoint)
        record = read_record(output)
        made = quantized_record(record)
        run = made.method if method is None and isinstance(made, QuantizedProvenance) else method
        rule = rule_of(run)
    except (CheckpointError, VerifyError) as exc:
        fault = Fault(where=exc.where, expected="readable headers and declaration", got=exc.what)
        return VerifyReport(output=str(output), source=str(source), faults=(fault,))
    with cut_between(draft, checkpoint, record, target) as (draft, made, faults):
        changes: Mapping[str, object] | None = config_changes
        if method is None:  # where nothing says what config.json must be, it is another tool's
            changes = made.config_changes if isinstance(made, QuantizedProvenance) else None
        report = _Verification(
            draft, checkpoint, scheme, made, run, rule, changes, target, config_file, on_progress
        ).report()
    if made is None and method is None and not foreign:
        faults = (NO_RECORD, *faults)
    return replace(report, faults=(*faults, *report.faults))


class _Verification:
    """One run: header checks, then all tensors in threads, then what depends on the hashes."""

    def __init__(
        self,
        draft: Draft,
        output: Checkpoint,
        scheme: DeclaredScheme | None,
        record: Record | None,
        method: Method | None,
        rule: CodeRule,
        changes: Mapping[str, object] | None,
        target: Path | None,
        config_file: str,
        on_progress: OnProgress | None,
    ) -> None:
        self._draft = draft
        self._source = draft.checkpoint
        self._output = output
        self._scheme = scheme
        self._record = record
        self._algorithm = algorithm_of(record.digests) if record is not None else NEWEST
        self._provenance = record if isinstance(record, QuantizedProvenance) else None
        self._method = method
        self._rule = rule
        self._changes = changes
        self._config_file = config_file
        self._target = target
        self._dropped = dropped_rows(method.recipe, draft) if method else ()
        self._left = remaining(draft, self._dropped)
        self._demands = demands_of(draft, scheme, method, record)
        beside = cache_scale_names(self._left, output)
        self._sorting = sort_tensors(self._left, output, self._demands, beside)
        quantized = self._sorting.quantized
        if method is None and scheme is None and not quantized:
            raise CheckpointError(
                output.folder,
                "there is nothing to verify: it declares no quantization and stores no"
                " quantized linear",
                fix="give the quantized folder first, and its source behind --against",
            )
        self._norms = ChangedNorms.of(method, draft, quantized) if method else ChangedNorms()
        total = draft.checkpoint.nbytes + output.nbytes

        def show(_count: int) -> None:
            if on_progress is not None:
                on_progress(self._progress.done, total)

        self._progress = Progress(show)

    def report(self) -> VerifyReport:
        sorting = self._sorting
        quantized, exponents = sorting.quantized, self._norms.exponents
        demands = whole_demands(self._draft, self._demands, quantized, exponents)
        compared = compare_all(self._jobs(demands))
        whole = Compared.joined(compared)
        faults = [*self._header_faults(), *whole.faults]
        faults += self._foreign_matrix_scale_faults(compared)
        sides = whole.source_digests, whole.output_digests
        # Tensors that are dropped, or that a fault kept from being compared.
        rest = partial(hash_the_rest, algorithm=self._algorithm, on_bytes=self._progress.add)
        faults += rest(self._source, sides[0])
        rest(self._output, sides[1])
        if self._record is not None:
            faults += record_faults(self._record, self._draft, self._output, *sides)
        demanded = [self._demands[m].rule for m in sorted(quantized & self._demands.keys())]
        return VerifyReport(
            output=str(self._output.folder),
            source=str(self._source.folder),
            scheme=str(self._scheme) if self._scheme else None,
            rule="; ".join(dict.fromkeys(map(str, demanded or [self._rule]))),
            kept=len(sorting.kept) - len(self._norms.factors),
            quantized=len(sorting.linears),
            bytes_compared=self._progress.done,
            linears=tuple(one.linear for one in compared if one.linear is not None),
            source_digests=dict(sorted(sides[0].items())),
            output_digests=dict(sorted(sides[1].items())),
            faults=tuple(faults),
            dropped=tuple(row.tensor.name for row in self._dropped),
            dropped_shown=bool(self._dropped) and self._target is not None,
            learned_norms=self._norms.factors,
        )

    def _header_faults(self) -> Iterator[Fault]:
        sorting, scheme, method = self._sorting, self._scheme, self._method
        ours = method is not None
        yield from sorting.faults
        if scheme is not None:
            yield from exclude_faults(self._left, scheme, sorting.quantized, all_listed=ours)
        sides = self._draft, self._output
        yield from fused_faults(*sides, scheme, sorting.quantized, sorting.complete)
        yield from config_faults(*sides, self._changes)
        yield from side_declaration_faults(self._output, scheme)
        yield from cache_scale_faults(*sides, scheme, method)
        yield from file_faults(
            self._source, self._output, scheme, config_file=self._config_file,
            foreign=not ours, recorded=self._provenance,
        )  # fmt: skip
        if method is None:
            return
        recipe, record = method.recipe, self._provenance
        if record is not None:
            yield from method_faults(method, record.method)
        yield from declared_faults(recipe, scheme, self._draft)
        if record is not None and scheme is not None:
            yield from complete_faults(recipe, scheme, *sides)
        yield from action_faults(recipe, self._draft, sorting.quantized)
        yield from dropped_faults(self._draft, self._dropped, record, self._target)
        yield from input_scale_faults(method, *sides, sorting.complete)
        yield from self._norms.faults

    def _jobs(self, demands: Mapping[str, Demand]) -> Iterator[Job]:
        for row in self._sorting.kept:
            yield row.tensor.nbytes, row.tensor.name, partial(self._compare_kept, row)
        for row, parts in self._sorting.linears:
            compare = partial(self._compare_linear, row.tensor, demands[row.module], parts)
            yield row.tensor.nbytes, row.tensor.name, compare

    def _compare_kept(self, row: Row) -> Compared:
        compare = self._norms.compare if self._norms.changes(row.tensor) else compare_kept
        return compare(self._source, self._output, row.tensor, self._progress.add, self._algorithm)

    def _compare_linear(
        self, tensor: TensorInfo, demand: Demand, parts: Mapping[str, TensorInfo]
    ) -> Compared:
        output, algorithm, on_bytes = self._output, self._algorithm, self._progress.add
        sides = self._source, output
        compared = compare_linear(*sides, tensor, demand, on_bytes=on_bytes, algorithm=algorithm)
        if demand.scheme is not None:
            ours = demand.rule.of_our_own
            of = output, demand.scheme, tensor, parts
            compared.faults += companion_faults(*of, symmetric=ours)
        for part in parts.values():
            if part.name not in compared.output_digests:
                compared.output_digests[part.name] = tensor_digest(output, part, algorithm)
                on_bytes(part.nbytes)
        return compared

    def _foreign_matrix_scale_faults(self, compared: Sequence[Compared]) -> list[Fault]:
        """Scales of whole matrices, of linears that engines fuse together."""
        if self._rule.scales != "about-absmax":
            return []
        found = {c.linear.module: c.absmax for c in compared if c.linear and c.absmax is not None}
        schemes = {m: s for m in found if (s := self._demands[m].scheme) and s.scales_whole_matrix}
        fused = [group for group in self._draft.fused_groups() if schemes.keys() >= set(group)]
        alone = schemes.keys() - {module for group in fused for module in group}
        faults = []
        for group in (*fused, *((module,) for module in sorted(alone))):
            absmax = {module: found[module] for module in group}
            faults += about_matrix_scale_faults(self._output, schemes[group[0]], absmax)
        return faults
