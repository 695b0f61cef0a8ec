"""`verify`: a quantized folder against its source, byte by byte, with a decoder of its own.

It shares no code with what wrote the folder and does not import torch, so an error of the writer
cannot hide in a common helper.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ...recipes.errors import CheckpointError, VerifyError
from ..drafts import Draft, Row, read_draft
from ..files.checkpoint import CONFIG_FILE, Checkpoint
from ..files.digests import NEWEST, Finiteness, algorithm_of, tensor_digest
from ..files.provenance import Method, QuantizedProvenance
from ..files.safetensors_header import WORKERS, TensorInfo
from ..stored.layouts import DeclaredScheme
from ..stored.stored_declaration import declared_scheme
from ..stored.stored_draft import StoredDraft
from .changed_values import ChangedNorms, cache_scale_faults, cache_scale_names, config_faults
from .codes import Expected, compare_linear
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
    expected_codes,
    input_scale_faults,
    read_record,
    record_faults,
    recorded_changes,
    recorded_faults,
    remaining,
)
from .folder_faults import (
    QUANTIZED_ONLY,
    card_faults,
    check_is_checkpoint,
    exclude_faults,
    fused_faults,
    index_faults,
    metadata_faults,
    own_files,
    side_declaration_faults,
    side_file_faults,
    sort_tensors,
    unowned_faults,
)
from .foreign_rules import about_matrix_scale_faults
from .scales import Rule, companion_faults, rule_of
from .verify_report import (
    Compared,
    Fault,
    LinearFinding,
    NotFinite,
    OnProgress,
    Progress,
    VerifyReport,
    compare_kept,
    unreadable,
)

__all__ = ["Fault", "LinearFinding", "VerifyReport", "verify"]


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
        on_progress: called with (bytes read, bytes to read), from one thread at a time.
        method: of the run that wrote the folder and has recorded nothing yet; None = what its
            draftquant.json says.
        config_changes: of that run: dotted config.json key -> value.
        foreign: another tool made the folder, so that it needs no draftquant.json.
        target: whose tables stand for those that the recipe drops; they are compared again.
        subtree: of the source, where that is a layer in its target's folder; see `Checkpoint`.
        config_file: its name in a staging folder, see `Checkpoint.open`.

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
        recorded = read_record(output)
        made = quantized_record(recorded)
        run = made.method if method is None and isinstance(made, QuantizedProvenance) else method
        rule = rule_of(run)
    except (CheckpointError, VerifyError) as exc:
        fault = Fault(where=exc.where, expected="readable headers and declaration", got=exc.what)
        return unreadable(output, source, fault)
    with cut_between(draft, checkpoint, recorded, target) as (draft, made, faults):
        said = config_changes if method is not None else recorded_changes(made)
        verification = _Verification(
            draft, checkpoint, scheme, made, run, rule, said, target, config_file, on_progress
        )
        report = verification.report()
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
        recorded: Record | None,
        method: Method | None,
        rule: Rule,
        changes: Mapping[str, object] | None,
        target: Path | None,
        config_file: str,
        on_progress: OnProgress | None,
    ) -> None:
        self._draft = draft
        self._source = draft.checkpoint
        self._output = output
        self._scheme = scheme
        self._recorded = recorded
        self._algorithm = algorithm_of(recorded.digests) if recorded is not None else NEWEST
        self._provenance = recorded if isinstance(recorded, QuantizedProvenance) else None
        self._method = method
        self._rule = rule
        self._config_file = config_file
        self._target = target
        self._dropped = dropped_rows(method.recipe, draft) if method else ()
        left = remaining(draft, self._dropped)
        self._changes = changes
        self._demands = demands_of(draft, scheme, method, recorded)
        self._sorting = sort_tensors(left, output, self._demands, cache_scale_names(left, output))
        if method is None and scheme is None and not self._sorting.quantized:
            raise CheckpointError(
                output.folder,
                "there is nothing to verify: it declares no quantization and stores no"
                " quantized linear",
                fix="give the quantized folder first, and its source behind --against",
            )
        quantized = self._sorting.quantized
        self._norms = ChangedNorms.of(method, draft, quantized) if method else ChangedNorms()
        self._progress = Progress(draft.checkpoint.nbytes + output.nbytes, on_progress)

    def report(self) -> VerifyReport:
        """Run everything."""
        sorting = self._sorting
        with ThreadPoolExecutor(WORKERS) as pool:
            quantized = sorting.quantized
            exponents = self._norms.exponents
            expected = expected_codes(pool, self._draft, self._demands, quantized, exponents)
            compared = self._compare(pool, expected)
        source_digests: dict[str, str] = {}
        output_digests: dict[str, str] = {}
        for one in compared:
            source_digests |= one.source_digests
            output_digests |= one.output_digests
        faults = [*self._header_faults(), *(fault for one in compared for fault in one.faults)]
        faults += self._foreign_matrix_scale_faults(compared)
        faults += self._hash_the_rest(source_digests, output_digests)
        if self._recorded is not None:
            sides = source_digests, output_digests
            faults += record_faults(self._recorded, self._draft, self._output, *sides)
        return VerifyReport(
            output=str(self._output.folder),
            source=str(self._source.folder),
            scheme=str(self._scheme) if self._scheme else None,
            rule=self._rules(),
            kept=len(sorting.kept) - len(self._norms.factors),
            quantized=len(sorting.linears),
            bytes_compared=self._progress.done,
            linears=tuple(one.linear for one in compared if one.linear is not None),
            source_digests=dict(sorted(source_digests.items())),
            output_digests=dict(sorted(output_digests.items())),
            faults=tuple(faults),
            dropped=tuple(row.tensor.name for row in self._dropped),
            dropped_shown=bool(self._dropped) and self._target is not None,
            learned_norms=self._norms.factors,
        )

    def _rules(self) -> str:
        """What was demanded, of some linears one thing and of others another."""
        quantized = sorted(self._sorting.quantized & self._demands.keys())
        found = [self._demands[module].rule for module in quantized] or [self._rule]
        return "; ".join(dict.fromkeys(map(str, found)))

    def _header_faults(self) -> list[Fault]:
        sorting, scheme = self._sorting, self._scheme
        left = remaining(self._draft, self._dropped)
        ours = self._method is not None
        excludes = (
            exclude_faults(left, scheme, sorting.quantized, all_listed=ours) if scheme else []
        )
        return [
            *sorting.faults,
            *excludes,
            *fused_faults(self._draft, self._output, scheme, sorting.quantized, sorting.complete),
            *config_faults(self._draft, self._output, self._changes),
            *side_declaration_faults(self._output, scheme),
            *cache_scale_faults(self._draft, self._output, scheme, self._method),
            *index_faults(self._output),
            *metadata_faults(self._source, self._output, foreign=self._method is None),
            *side_file_faults(self._source, self._output, without=QUANTIZED_ONLY, foreign=not ours),
            *card_faults(self._output, self._provenance),
            *self._unowned_faults(),
            *self._method_faults(),
        ]

    def _unowned_faults(self) -> list[Fault]:
        side_file = self._scheme.layout.side_file if self._scheme else None
        own = own_files(side_file.name if side_file else None)
        return unowned_faults(
            self._source, self._output, config_file=self._config_file, own=own,
            without=QUANTIZED_ONLY, foreign=self._method is None,
        )  # fmt: skip

    def _method_faults(self) -> list[Fault]:
        """What the run did, against headers and small values."""
        method, sorting = self._method, self._sorting
        if method is None:
            return []
        recorded = self._provenance.method if self._provenance else method
        complete: list[Fault] = []
        if self._provenance and self._scheme:
            complete = complete_faults(method.recipe, self._scheme, self._draft, self._output)
        return [
            *recorded_faults(method, recorded),
            *declared_faults(method.recipe, self._scheme, self._draft),
            *complete,
            *action_faults(method.recipe, self._draft, sorting.quantized),
            *dropped_faults(self._draft, self._dropped, self._provenance, self._target),
            *input_scale_faults(method, self._draft, self._output, sorting.complete),
            *self._norms.faults,
        ]

    def _compare(
        self, pool: ThreadPoolExecutor, expected: Mapping[str, Expected]
    ) -> list[Compared]:
        """All tensors, the largest first so that the workers end together; results by name."""
        jobs: list[tuple[int, str, Callable[[], Compared]]] = []
        for row in self._sorting.kept:
            jobs.append((row.tensor.nbytes, row.tensor.name, partial(self._compare_kept, row)))
        for row, parts in self._sorting.linears:
            scheme = self._demands[row.module].scheme
            if scheme is not None:
                linear = partial(
                    self._compare_linear, scheme, row.tensor, parts, expected[row.module]
                )
                jobs.append((row.tensor.nbytes, row.tensor.name, linear))
        jobs.sort(key=lambda job: (-job[0], job[1]))
        results = [(name, pool.submit(job)) for _, name, job in jobs]
        return [future.result() for _, future in sorted(results, key=lambda r: r[0])]

    def _compare_kept(self, row: Row) -> Compared:
        compare = self._norms.compare if self._norms.changes(row.tensor) else compare_kept
        return compare(self._source, self._output, row.tensor, self._progress.add, self._algorithm)

    def _compare_linear(
        self,
        scheme: DeclaredScheme,
        tensor: TensorInfo,
        parts: Mapping[str, TensorInfo],
        expected: Expected,
    ) -> Compared:
        """Codes and scale of one linear, then its small companions."""
        compared = compare_linear(
            self._source,
            self._output,
            tensor,
            scheme,
            expected,
            on_bytes=self._progress.add,
            algorithm=self._algorithm,
        )
        symmetric = self._demands[tensor.name.removesuffix(".weight")].rule.of_our_own
        compared.faults += companion_faults(
            self._output, scheme, tensor, parts, symmetric=symmetric
        )
        for part in parts.values():
            if part.name not in compared.output_digests:
                compared.output_digests[part.name] = tensor_digest(
                    self._output, part, self._algorithm
                )
                self._progress.add(part.nbytes)
        return compared

    def _foreign_matrix_scale_faults(self, compared: Sequence[Compared]) -> list[Fault]:
        """Scales of whole matrices, of linears that engines fuse together."""
        if self._rule.scales != "about-absmax":
            return []
        found = {c.linear.module: c.absmax for c in compared if c.linear and c.absmax is not None}
        schemes = {module: self._demands[module].scheme for module in found}
        whole = {m for m, scheme in schemes.items() if scheme and scheme.scales_whole_matrix}
        absmax = {module: largest for module, largest in found.items() if module in whole}
        fused = [group for group in self._draft.fused_groups() if absmax.keys() >= set(group)]
        alone = absmax.keys() - {module for group in fused for module in group}
        faults = []
        for group in (*fused, *((module,) for module in sorted(alone))):
            scheme = schemes[group[0]]
            if scheme is not None:
                members = {module: absmax[module] for module in group}
                faults += about_matrix_scale_faults(self._output, scheme, members)
        return faults

    def _hash_the_rest(self, source: dict[str, str], output: dict[str, str]) -> list[Fault]:
        """Hashes of tensors that are dropped, or that a fault kept from being compared."""
        faults = []
        for checkpoint, hashes in ((self._source, source), (self._output, output)):
            for name in sorted(checkpoint.tensors.keys() - hashes.keys()):
                tensor = checkpoint.tensors[name]
                found = Finiteness(tensor.dtype, tensor.shape)
                hashes[name] = tensor_digest(checkpoint, tensor, self._algorithm, found.look)
                faults += NotFinite.of(name, found.problem) if hashes is source else []
                self._progress.add(tensor.nbytes)
        return faults
