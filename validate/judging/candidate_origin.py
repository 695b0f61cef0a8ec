"""Whether a candidate comes from the baseline's weights, and from calibration beside the target.

A record (draftquant.json) counts as far as its hashes are those of the tensors on both sides. For a
folder without a record the weights decide: tensors that it keeps must equal the baseline's, and
quantized values must point the same way.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ...quantize.files.checkpoint import Checkpoint
from ...quantize.files.digests import tensor_digests, tensors_sha256
from ...quantize.files.provenance import (
    CutProvenance,
    DequantizedProvenance,
    Provenance,
    QuantizedProvenance,
    SeenTarget,
    VocabularyCut,
)
from ...quantize.files.provenance_file import (
    check_seal,
    cuts_of,
    quantization_of,
    read_provenance,
    sources_of,
)
from ...quantize.stored.loading import LoadedDraft
from ...quantize.stored.stored_declaration import declared_scheme
from ...quantize.stored.stored_draft import StoredDraft
from ...quantize.verify.demands import declared_faults
from ...recipes.errors import GateError

MIN_COSINE = 0.7
"""Cosine of a weight and its quantized values: 0.97 for INT3; about 0 for any other weight."""

_BLOCK = 2**24  # elements compared at a time
_ON_PURPOSE = "to compare two different drafts on purpose, add --unrelated"
_UNRELATED = (
    "two different drafts are compared (--unrelated), so the change is not the effect of"
    " quantization, and nothing ties the candidate to the baseline"
)
_UNKNOWN_TARGET = (
    "draftquant.json or trace.json does not record the whole target, so nothing shows that the"
    " candidate was calibrated beside the target on whose traces it is judged"
)
_IDENTITY = ("config_sha256", "weights_sha256")
_COPIED = ("embed_tokens.weight", "lm_head.weight", "fc.weight", "d2t", "t2d")
"""Tensors that a candidate shares with the baseline unless it quantizes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFolder:
    """A draft as stored; `quantized` = it declares this, `record` = its draftquant.json."""

    folder: Path
    tensor_digests: Mapping[str, str]
    quantized: bool
    record: Provenance | None

    @classmethod
    def read(cls, folder: Path) -> "DraftFolder":
        """Read a folder and hash its tensors; GateError if draftquant.json belongs to others."""
        checkpoint = Checkpoint.open(folder)
        record = read_provenance(folder)
        check_seal(folder, record)
        digests = tensor_digests(checkpoint)
        if record is not None and record.tensor_digests != digests:
            difference = _first(record.tensor_digests, digests)
            raise GateError(
                folder,
                f"its draftquant.json belongs to other tensors: {difference}",
                fix="run `draftquant verify`, and quantize the draft again",
            )
        scheme = declared_scheme(checkpoint)
        made = record.quantized_by if isinstance(record, CutProvenance) else record
        if isinstance(made, QuantizedProvenance):
            draft = StoredDraft.look(checkpoint, scheme).draft
            for fault in declared_faults(made.recipe, scheme, draft):
                raise GateError(
                    folder,
                    f"{fault.where} declares another format than the one it was quantized to:"
                    f" expected {fault.expected}, got {fault.got}",
                    fix="run `draftquant verify`, and quantize the draft again",
                )
        return cls(
            folder=folder, tensor_digests=digests, quantized=scheme is not None, record=record
        )

    @property
    def sha256(self) -> str:
        """Identity of its tensors."""
        return tensors_sha256(self.tensor_digests)

    @property
    def quantized_by(self) -> QuantizedProvenance | None:
        """Its quantization, where a record says so."""
        return quantization_of(self.record)

    @property
    def cuts(self) -> tuple[VocabularyCut, ...]:
        """Cuts of its vocabulary, as far as records say."""
        return cuts_of(self.record)

    @property
    def is_recorded(self) -> bool:
        """True if records of this package lead back to floating-point weights."""
        of_cut = isinstance(self.record, CutProvenance) and not self.quantized
        return self.quantized_by is not None or of_cut


def check_folders(
    baseline: DraftFolder, candidate: DraftFolder, *, unrelated: bool, same: bool = False
) -> tuple[str, ...]:
    """The baseline was never quantized; the candidate was made from it, unless `unrelated`.

    With `same`, the candidate has the baseline's tensors and is served in another form. Returns
    what nothing verifies, in sentences without a full stop.
    """
    if unrelated:
        return (_UNRELATED,)
    if baseline.quantized or isinstance(baseline.record, DequantizedProvenance):
        held = "is quantized" if baseline.quantized else "holds dequantized values"
        raise GateError(
            baseline.folder,
            f"expected the unquantized draft as the baseline, but this one {held}",
            fix="give the BF16 draft first, the quantized one second",
        )
    if same:
        return ()
    _check_candidate(baseline, candidate)
    return tuple(_unverified(baseline, candidate))


def check_loaded(
    baseline: LoadedDraft, candidate: LoadedDraft, folder: DraftFolder, *, unrelated: bool = False
) -> tuple[str, ...]:
    """What only the loaded drafts show, in sentences: configurations, and maybe weights."""
    if unrelated:
        return ()
    if not folder.is_recorded:
        _check_weights(baseline, candidate)
    before, after = dataclasses.asdict(baseline.geometry), dataclasses.asdict(candidate.geometry)
    changed = {name for name in before if before[name] != after.get(name)}
    changed -= {"draft_vocab_size"}  # which a cut alone changes: tensors have it
    if not changed:
        return ()
    return (
        f"the two drafts have different values in config.json ({', '.join(sorted(changed))}), so"
        " that the change is not the effect of quantization alone: give the baseline the same"
        " values (quantize --fix-config changes the quantized draft only)",
    )


def calibrated_elsewhere(candidate: DraftFolder, judge: SeenTarget) -> tuple[str, tuple[str, ...]]:
    """The target that made the candidate, if it is not `judge`, else ""; and what is not known."""
    made = [cut.choice.prompts for cut in candidate.cuts]
    if (record := candidate.quantized_by) is not None:
        made += [record.prompts, *([record.chosen.prompts] if record.chosen else [])]
    unknown = False
    for seen in made:
        if not seen.sha256:
            continue
        both = [(getattr(seen.target, name, None), getattr(judge, name)) for name in _IDENTITY]
        if any(None not in pair and pair[0] != pair[1] for pair in both):
            return f"{seen.target}, not {judge}", ()
        unknown |= any(None in pair for pair in both)
    return "", (_UNKNOWN_TARGET,) * unknown


def _check_candidate(baseline: DraftFolder, candidate: DraftFolder) -> None:
    made = isinstance(candidate.record, DequantizedProvenance | CutProvenance)
    if not candidate.quantized and not made:
        same = candidate.tensor_digests == baseline.tensor_digests
        raise GateError(
            candidate.folder,
            "expected a quantized draft as the candidate, but this one declares no quantization"
            + (" and has the same tensors as the baseline" if same else ""),
            fix=f"give what `draftquant quantize`, `dequantize` or `vocab` wrote; {_ON_PURPOSE}",
        )
    if not candidate.is_recorded:
        return
    made_of = list(sources_of(candidate.record))
    if baseline.tensor_digests not in made_of:
        difference = _first(made_of[-1], baseline.tensor_digests)
        what = f"was not quantized from {baseline.folder}: {difference}"
        fix = f"give the BF16 draft from which it was quantized; {_ON_PURPOSE}"
        raise GateError(candidate.folder, what, fix=fix)


def _check_weights(baseline: LoadedDraft, candidate: LoadedDraft) -> None:
    """A candidate without a record must resemble the baseline as only its quantized values can."""
    for name in sorted(baseline.weights.keys() | candidate.weights.keys()):
        ours, theirs = baseline.weights.get(name), candidate.weights.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            raise _other_draft(candidate, f"{name} has another shape or is not in both")
        as_codes = name.removesuffix(".weight") in candidate.quantized
        if name in _COPIED and not as_codes and not _equal(ours, theirs):
            raise _other_draft(candidate, f"{name} differs")
    for module in dict.fromkeys((*baseline.linears, *candidate.quantized)):
        name = f"{module}.weight"
        cosine = _cosine(baseline.weights[name], candidate.weights[name])
        if not cosine >= MIN_COSINE:
            what = f"{name} has a cosine of {cosine:.2f} with the baseline's"
            raise _other_draft(candidate, what)


def _unverified(baseline: DraftFolder, candidate: DraftFolder) -> Iterator[str]:
    if not candidate.is_recorded:
        why = "has no draftquant.json"
        if candidate.record is not None:
            why = "has a draftquant.json that does not record how it was quantized"
        yield (
            f"the candidate {why}, so nothing shows which prompts calibrated it, and only its"
            " weights show that it was quantized from the baseline"
        )
    if baseline.cuts and baseline.cuts == candidate.cuts[: len(baseline.cuts)]:
        yield (
            f"the baseline has a cut vocabulary itself ({baseline.cuts[-1]}), so the verdict does"
            " not hold what that cost: give the draft with the whole vocabulary first to judge both"
        )


def _other_draft(candidate: LoadedDraft, what: str) -> GateError:
    return GateError(
        candidate.name,
        f"was not quantized from the baseline: {what}",
        fix="give the BF16 draft from which it was quantized; if its vocabulary was cut, cut the"
        f" BF16 draft's by `draftquant vocab` and quantize that; {_ON_PURPOSE}",
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if equal; embedding rows that traces do not carry are NaN on both sides."""
    if a is b:  # drafts loaded together hold equal tensors once
        return True
    return a.shape == b.shape and all(
        torch.equal(x.nan_to_num().double(), y.nan_to_num().double()) for x, y in _blocks(a, b)
    )


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    dot = square_a = square_b = 0.0
    for x, y in _blocks(a.flatten(), b.flatten()):
        x, y = x.double(), y.double()
        dot += float(x @ y)
        square_a, square_b = square_a + float(x @ x), square_b + float(y @ y)
    norms = math.sqrt(square_a * square_b)
    return dot / norms if norms else math.nan


def _blocks(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rows = max(1, _BLOCK * len(a) // max(1, a.numel()))
    return zip(torch.split(a, rows), torch.split(b, rows), strict=True)


def _first(recorded: Mapping[str, str], present: Mapping[str, str]) -> str:
    names = recorded.keys() | present.keys()
    name = min(name for name in names if recorded.get(name) != present.get(name))
    if name not in present:
        return f"{name} is recorded, but missing"
    return f"{name} differs" if name in recorded else f"{name} is in the folder, but not recorded"
