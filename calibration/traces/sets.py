"""Trace folders, split and merged: what may be together, and what must not be apart.

A split leaves no related prompts on both sides: what calibrates a draft must not judge it. A merge
joins equally recorded traces.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from ...quantize.files.staging import check_output
from ...recipes.brief import Brief, megabytes
from ...recipes.decode import encode
from ...recipes.errors import TraceError, short
from .manifest import Sampling, StorageChoice, TooLongPrompts, TraceManifest, is_printable_name
from .prompt_trace import PromptTrace
from .related_prompts import PromptText, prompt_text, related, related_groups, sketched, united
from .stored_features import storage_of
from .trace_folder import TraceFolder
from .writer import CarriedTables, TraceWriter, trace_output


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SplitReport(Brief):
    """A trace folder, split into two.

    Attributes:
        first: the first folder that was written, opened.
        second: the second one.
        by_category: category -> number of its prompts in the first and in the second folder.
        num_groups: groups of related prompts, each of them on one side.
        largest_group: prompts of the largest one.
    """

    first: TraceFolder
    second: TraceFolder
    by_category: Mapping[str, tuple[int, int]]
    num_groups: int
    largest_group: int

    @property
    def lopsided(self) -> bool:
        """Whether one group holds most prompts, so that only the side with it can be large."""
        return 2 * self.largest_group > len(self.first) + len(self.second)

    @override
    def brief(self) -> Mapping[str, object]:
        prompts = f"{len(self.first)} and {len(self.second)}"
        return {"first": self.first.folder, "second": self.second.folder, "prompts": prompts}


def split_traces(
    traces: TraceFolder,
    first: Path,
    second: Path,
    *,
    count: int | None = None,
    categories: Collection[str] = (),
    seed: int = 0,
) -> SplitReport:
    """Write two trace folders that have no prompt in common, one published after the other.

    By `count`, the most prompts in `first`, each category gives the same share of prompts, up to
    rounding and to what belongs together; by `categories` whole ones go to one side, with related
    prompts of others.
    """
    for out in (first, second):
        check_output(out, traces.folder)
    if first.absolute() == second.absolute():
        raise TraceError(second, "given twice", fix="name two folders")

    def choose(groups: Groups) -> set[int]:
        if count is None:
            return _of_categories(traces, groups, categories)
        return _chosen(traces.manifest, groups, count, seed)

    groups, chosen = _apart([prompt_text(trace) for trace in traces], choose)
    if not 0 < len(chosen) < len(traces):
        wanted = ", ".join(categories) if count is None else str(count)
        raise TraceError(
            traces.folder,
            f"{len(chosen)} of its {len(traces)} prompts would be in {first}, with {wanted} wanted:"
            f" they are {len(groups)} groups of related prompts, the largest of"
            f" {max(map(len, groups))}",
            fix="ask for others, or record more prompts, which the target answers differently",
        )
    entries = list(enumerate(traces.manifest.prompts))
    sides = (
        (first, [e for e in entries if e[0] in chosen]),
        (second, [e for e in entries if e[0] not in chosen]),
    )
    with ExitStack() as outputs:
        for out, side in reversed(sides):  # the first is published first
            writer = outputs.enter_context(output_like(out, traces.manifest, [traces]))
            for place, (_, entry) in enumerate(side):
                writer.add(traces.load(entry), position=place)
    one, other = (Counter(entry.category for _, entry in side) for _, side in sides)
    return SplitReport(
        first=TraceFolder.open(first),
        second=TraceFolder.open(second),
        by_category={name: (one[name], other[name]) for name in sorted(one | other)},
        num_groups=len(groups),
        largest_group=max(map(len, groups)),
    )


Groups = Sequence[Sequence[int]]


def _apart(
    texts: Sequence[PromptText], choose: Callable[[Groups], set[int]]
) -> tuple[Groups, set[int]]:
    """Groups of related texts and the chosen positions: no side has sketches of the other's texts.

    What most of a side's texts have is a template there. So two texts may be related by what is
    kept of one side, and not by all texts together.
    """
    groups = related_groups(texts)
    while True:
        chosen = choose(groups)
        sides = (
            [i for i in range(len(texts)) if i in chosen],
            [i for i in range(len(texts)) if i not in chosen],
        )
        across = {pair for own, other in (sides, sides[::-1]) for pair in _seen(texts, own, other)}
        if not across:
            return groups, chosen
        whole = ((group[0], member) for group in groups for member in group)
        groups = united(range(len(texts)), (*whole, *across))


def _seen(
    texts: Sequence[PromptText], known: Sequence[int], judged: Sequence[int]
) -> set[tuple[int, int]]:
    """Positions of related texts, as a gate on some of them sees those that calibrated a draft."""
    made, own = [texts[i] for i in known], [texts[i] for i in judged]
    return {
        (known[one], judged[other])
        for continued in (False, True)
        for one, other in related(sketched(made, continued=continued), own, continued=continued)
    }


def _chosen(manifest: TraceManifest, groups: Groups, count: int, seed: int) -> set[int]:
    """Positions of the first side: for each category its share, in whole groups."""
    strata: dict[str, list[Sequence[int]]] = {}
    for group in groups:
        strata.setdefault(manifest.prompts[group[0]].category, []).append(group)
    sizes = {category: sum(map(len, strata[category])) for category in sorted(strata)}
    draw = random.Random(seed)
    chosen: set[int] = set()
    for category, quota in _quotas(sizes, count).items():
        room = quota
        shuffled = strata[category]
        draw.shuffle(shuffled)
        for group in shuffled:
            if len(group) <= room:
                chosen.update(group)
                room -= len(group)
    return chosen


def _of_categories(traces: TraceFolder, groups: Groups, categories: Collection[str]) -> set[int]:
    prompts = traces.manifest.prompts
    known = sorted({entry.category for entry in prompts})
    for category in categories:
        if category not in known:
            what = f"no prompt has the category {category!r}"
            raise TraceError(traces.folder, what, fix=f"use some of: {', '.join(known)}")
    chosen = (group for group in groups if any(prompts[i].category in categories for i in group))
    return {position for group in chosen for position in group}


def _quotas(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """`count` shared out in proportion; the remainder goes to the largest fractions."""
    total = sum(sizes.values())
    quotas = {category: count * size // total for category, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda category: -(count * sizes[category] % total))
    for category in by_remainder[: count - sum(quotas.values())]:
        quotas[category] += 1
    return quotas


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MergeReport(Brief):
    """Several trace folders, joined.

    Attributes:
        traces: the folder that was written, opened.
        renamed: old id -> new id, for prompts whose id another folder has too.
        without_tables: folders without tables where others have them: the joined one has none.
    """

    traces: TraceFolder
    renamed: Mapping[str, str]
    without_tables: tuple[Path, ...]

    @override
    def brief(self) -> Mapping[str, object]:
        return {**self.traces.brief(), "renamed": len(self.renamed) or None}


def merge_traces(folders: Sequence[TraceFolder], out: Path) -> MergeReport:
    """Write one trace folder with the traces of several, in their order; seeds may differ.

    An id that an earlier folder also has gets the name of its own folder in front: `gate/p1`.
    """
    check_output(out)
    _check_alike(folders)
    with_tables = [folder for folder in folders if folder.manifest.tables]
    all_carry = len(with_tables) == len(folders)
    renamed: dict[str, str] = {}
    taken: set[str] = set()
    datasets = (dataset for folder in folders for dataset in folder.manifest.datasets or ())
    by = list(dict.fromkeys(folder.manifest.recorded_by for folder in folders))
    merged = replace(
        folders[0].manifest,
        sampling=_common_sampling(folders),
        recorded_by=by[0] if len(by) == 1 else " + ".join(name or "transformers" for name in by),
        too_long=_too_long(folders),
        datasets=tuple(dict.fromkeys(datasets)) or None,
    )
    with output_like(out, merged, folders if all_carry else ()) as writer:
        place = 0
        for folder in folders:
            for trace in folder:
                name = trace.id
                if name in taken:
                    name = renamed[trace.id] = f"{folder.folder.resolve().name}/{trace.id}"
                if name in taken or not is_printable_name(name):
                    what = f"prompt {trace.id}: its id is taken, and so is {name}"
                    fix = "rename the folder, which goes before ids that are taken"
                    raise TraceError(folder.folder, what, fix=fix)
                taken.add(name)
                writer.add(replace(trace, id=name), position=place)
                place += 1
    return MergeReport(
        traces=TraceFolder.open(out),
        renamed=renamed,
        without_tables=tuple(
            folder.folder for folder in folders if with_tables and folder not in with_tables
        ),
    )


def copy_traces(
    folders: Sequence[TraceFolder],
    out: Path,
    traces: Iterable[PromptTrace],
    manifest: TraceManifest | None = None,
) -> TraceFolder:
    """Write a trace folder from traces that were loaded from folders recorded in one go.

    Without a manifest, the first folder gives target, features and decoding. Tables of all folders
    that carry some are carried.
    """
    with output_like(out, manifest or folders[0].manifest, folders) as writer:
        for place, trace in enumerate(traces):
            writer.add(trace, position=place)
    return TraceFolder.open(out)


def _check_alike(folders: Sequence[TraceFolder]) -> None:
    if len(folders) < 2:
        raise TraceError("traces merge", "expected at least two folders", fix="name more")
    first = folders[0]
    seen = {first.sha256}
    for folder in folders[1:]:
        if folder.sha256 in seen:
            raise TraceError(folder.folder, "the same traces are given twice", fix="give them once")
        seen.add(folder.sha256)
        kind = _kind(folder.manifest)
        for what, ours in _kind(first.manifest).items():
            if (theirs := kind[what]) != ours:
                raise TraceError(
                    folder.folder,
                    f"another {what} than {first.folder}: {_difference(ours, theirs)}",
                    fix="merge traces of one target that were recorded with the same settings",
                )


def _difference(ours: object, theirs: object) -> str:
    own, other = encode(ours), encode(theirs)
    if not (isinstance(own, dict) and isinstance(other, dict)):
        return f"{short(other)}, expected {short(own)}"
    return ", ".join(
        f"{key} {short(other.get(key))}, expected {short(own.get(key))}"
        for key in sorted(own.keys() | other.keys())
        if own.get(key) != other.get(key)
    )


def _kind(manifest: TraceManifest) -> dict[str, object]:
    """What must be equal."""
    sampling = manifest.sampling and replace(manifest.sampling, seed=None)
    return {
        "target": manifest.target,
        "features": manifest.features,
        "decoding": (manifest.temperature, sampling, manifest.ignore_eos),
        "log-probabilities": manifest.logprobs,
    }


def _common_sampling(folders: Sequence[TraceFolder]) -> Sampling | None:
    """The settings of all folders; the seed is unknown where they differ."""
    samplings = {folder.manifest.sampling for folder in folders}
    sampling = folders[0].manifest.sampling
    return sampling if len(samplings) == 1 or sampling is None else replace(sampling, seed=None)


def _too_long(folders: Sequence[TraceFolder]) -> TooLongPrompts | None:
    too_long = [folder.manifest.too_long for folder in folders if folder.manifest.too_long]
    if not too_long:
        return None
    return TooLongPrompts(
        skipped=tuple(dict.fromkeys(name for each in too_long for name in each.skipped)),
        truncated=tuple(dict.fromkeys(name for each in too_long for name in each.truncated)),
    )


def output_like(
    out: Path, manifest: TraceManifest, folders: Sequence[TraceFolder]
) -> AbstractContextManager[TraceWriter]:
    """An output of the same target, features and decoding, with the tables of these folders."""
    carrying = [folder for folder in folders if folder.manifest.tables]
    return trace_output(out, manifest, tables=CarriedTables(carrying) if carrying else None)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StoreReport(Brief):
    """Traces whose features are stored in another way.

    Attributes:
        traces: the folder that was written, opened.
        nbytes_before: bytes of the shards of the given folder.
        nbytes: bytes of the shards of the written one.
    """

    traces: TraceFolder
    nbytes_before: int
    nbytes: int

    @override
    def brief(self) -> Mapping[str, object]:
        change = f"{megabytes(self.nbytes_before)} -> {megabytes(self.nbytes)}"
        return {**self.traces.brief(), "shards": change}


def store_traces(traces: TraceFolder, out: Path, choice: StorageChoice) -> StoreReport:
    """Write the same traces with their features stored in another way, one prompt at a time."""
    check_output(out, traces.folder)
    spec, storage = traces.manifest.features, storage_of(choice)
    if spec.storage == storage:
        raise TraceError(traces.folder, f"its features are stored as {choice} already",
                         fix="copy the folder, or choose another --feature-storage")  # fmt: skip
    if spec.storage == "fp8-per-token":
        raise TraceError(
            traces.folder,
            "its features were rounded to FP8: what they were before is lost",
            fix=f"record the traces again with --feature-storage {choice}",
        )
    manifest = replace(traces.manifest, features=replace(spec, storage=storage))
    written = copy_traces([traces], out, traces, manifest)
    before, now = (sum(s.nbytes for s in each.manifest.shards) for each in (traces, written))
    return StoreReport(traces=written, nbytes_before=before, nbytes=now)
