"""Hidden states of traces in fewer bytes: what is saved, what it costs, what it does to a verdict.

    python -m draftquant.scripts.dev.bench_features WORKDIR [--pair tests/pairs/eagle3-llama ...]
        [--recipe int4-channel ...] [--rounds 3] [--json]

The exact traces are recorded once, in a process of its own. Writing, reading, and replaying the
BF16 draft take turns with the exact folder in one process; their ratios of CPU seconds are medians
of the rounds. That of recording follows: the seconds of the exact recording, with another writing
in place of the exact one. The acceptance length of each draft on stored features is
compared with the same draft on exact ones, and of a quantized draft also its change from BF16, what
a gate judges: paired by prompts, two-sided intervals that hold together with 95 % over all
pairs and drafts of a storage (max-t within a pair, Bonferroni between pairs). Traces stay in
WORKDIR.
"""

import argparse
import dataclasses
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...calibration.traces.manifest import StorageChoice
from ..console import print_table, stderr, table
from .command_lines import add_pairs, benchmark_parser, run_benchmark
from .measured_process import BenchError
from .quality_traces import NEW_TOKENS, SHIPPED, draftquant

if TYPE_CHECKING:
    from ...calibration.traces.trace_folder import TraceFolder
    from ...quantize.stored.loading import LoadedDraft
    from ...validate.counting.draft_replay import DraftReplay

STORAGES: tuple[StorageChoice, ...] = ("exact", "zstd", "fp8-per-token")
CONFIDENCE = 0.95
BF16 = "BF16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What stored features do to a figure of one draft.

    Attributes:
        draft: a recipe, or BF16. of: "length" = its acceptance length, "verdict" = the change from
            BF16 to it, in percentage points.
        relative: the change against exact features. lower, upper: its interval.
        num_prompts: whose counts differ.
    """

    draft: str
    of: str
    relative: float
    lower: float
    upper: float
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One pair in one storage; ratios against its exact traces.

    Attributes:
        nbytes: of the shards. record, write, read, replay: of CPU seconds.
    """

    pair: str
    storage: str
    nbytes: int
    bytes_ratio: float
    record: float
    write: float
    read: float
    replay: float
    changes: tuple[Change, ...]


def measured_pair(
    pair: Path, work: Path, recipes: Sequence[str], rounds: int, confidence: float
) -> list[Stored]:
    """All storages of one pair.

    Args:
        pair: folder of a trained pair.
        work: folder of its traces and drafts.
        recipes: of the quantized drafts.
        rounds: of writing, reading and replaying.
        confidence: of all intervals of a storage together.

    Raises:
        BenchError: it is no trained pair, or a command failed.
    """
    from ...calibration.traces.store_traces import store_traces
    from ...calibration.traces.trace_folder import TraceFolder

    if not (pair / "training.json").is_file():
        raise BenchError(str(pair), "is no trained pair", fix="give one of tests/pairs")
    work.mkdir(parents=True, exist_ok=True)
    seconds = _recorded(pair, work)
    exact = TraceFolder.open(work / "exact")
    for storage in STORAGES[1:]:
        if not (work / storage).exists():
            store_traces(exact, work / storage, storage)
    folders = {storage: TraceFolder.open(work / storage) for storage in STORAGES}
    drafts = {BF16: pair / "draft"} | {name: _quantized(pair, work, name) for name in recipes}
    took = [_seconds(folders, drafts[BF16]) for _ in range(rounds)]
    replays = {storage: _replayed(drafts, traces) for storage, traces in folders.items()}
    sizes = {
        storage: sum(shard.nbytes for shard in traces.manifest.shards)
        for storage, traces in folders.items()
    }
    return [
        Stored(
            pair=pair.name,
            storage=storage,
            nbytes=sizes[storage],
            bytes_ratio=sizes[storage] / sizes["exact"],
            record=1
            + statistics.median(
                (one[storage].write - one["exact"].write) / seconds for one in took
            ),
            write=statistics.median(one[storage].write / one["exact"].write for one in took),
            read=statistics.median(one[storage].read / one["exact"].read for one in took),
            replay=statistics.median(one[storage].replay / one["exact"].replay for one in took),
            changes=_changes(replays["exact"], replays[storage], confidence),
        )
        for storage in STORAGES
    ]


def _recorded(pair: Path, work: Path) -> float:
    """CPU seconds of the exact recording, which are kept beside the traces."""
    out, kept = work / "exact", work / "exact.seconds"
    if not out.exists():
        taken = draftquant(
            "record",
            *("--target", str(pair / "target"), "--draft", str(pair / "draft"), "--tables"),
            *("--prompts", str(pair / SHIPPED["gate"]), "--max-new-tokens", str(NEW_TOKENS)),
            *("--out", str(out)),
        )
        kept.write_text(str(taken.cpu_seconds), encoding="utf-8")
        stderr().line(f"{pair.name}: recorded in {taken.cpu_seconds:.1f} CPU seconds")
    return float(kept.read_text(encoding="utf-8"))


def _quantized(pair: Path, work: Path, recipe: str) -> Path:
    out = work / recipe
    if not out.exists():
        draftquant("quantize", str(pair / "draft"), "--recipe", recipe, "--out", str(out))
    return out


class _Seconds(NamedTuple):
    """CPU seconds of one storage in one round."""

    write: float
    read: float
    replay: float


def _seconds(
    folders: "dict[StorageChoice, TraceFolder]", draft: Path
) -> "dict[StorageChoice, _Seconds]":
    """One round: storages take turns."""
    from ...calibration.traces.sets import copy_traces

    loaded, took = list(folders["exact"]), {}
    for storage, traces in folders.items():
        with tempfile.TemporaryDirectory(dir=traces.folder.parent) as folder:
            times = [time.process_time()]
            copy_traces([traces], Path(folder) / "copy", loaded)
            times.append(time.process_time())
            for _trace in traces:
                pass
            times.append(time.process_time())
            _replay(draft, traces)
            times.append(time.process_time())
        took[storage] = _Seconds(*(after - before for before, after in pairwise(times)))
        stderr().line(f"{traces.folder}: write, read, replay {took[storage]}")
    return took


def _replayed(drafts: dict[str, Path], traces: "TraceFolder") -> "dict[str, DraftReplay]":
    return {name: _replay(folder, traces) for name, folder in drafts.items()}


def _replay(folder: Path, traces: "TraceFolder") -> "DraftReplay":
    from ...quantize.stored.loading import load_draft
    from ...validate.counting.trace_replay import chosen_num_draft_tokens, replay_drafts

    draft: LoadedDraft = load_draft(folder, shared=traces.tables(None))
    (replay,) = replay_drafts(
        [draft], traces, num_draft_tokens=chosen_num_draft_tokens(None, [draft])
    )
    return replay


def _changes(
    exact: "dict[str, DraftReplay]", stored: "dict[str, DraftReplay]", confidence: float
) -> tuple[Change, ...]:
    """Of every draft, and of every quantized one's change from BF16; intervals hold together."""
    from ...validate.comparison.counted_drafts import Contestant, count_drafts
    from ...validate.comparison.prompt_samples import samples_of
    from ...validate.comparison.simultaneous import simultaneous

    names = list(exact)
    counted = count_drafts(
        [
            Contestant(name=f"{name} {where}", sha256=None, prompts=replays[name].prompts)
            for where, replays in (("exact", exact), ("stored", stored))
            for name in names
        ]
    )
    whole = samples_of(counted, {})[0]
    lengths = [whole.change(place, len(names) + place) for place in range(len(names))]
    own = [
        dataclasses.replace(
            one,
            value=one.value - lengths[0].value,
            contributions=one.contributions - lengths[0].contributions,
        )
        for one in lengths[1:]
    ]
    bounds = simultaneous([*lengths, *own], confidence).bounds
    of = [*((name, "length") for name in names), *((name, "verdict") for name in names[1:])]
    return tuple(
        Change(
            draft=name,
            of=what,
            relative=math.expm1(estimate.value),
            lower=math.expm1(lower),
            upper=math.expm1(upper),
            num_prompts=sum(
                one.counts != other.counts
                for one, other in zip(exact[name].prompts, stored[name].prompts, strict=True)
            ),
        )
        for (name, what), estimate, (lower, upper) in zip(of, [*lengths, *own], bounds, strict=True)
    )


def print_rows(rows: Sequence[Stored]) -> None:
    """What is saved and what it costs, then what it does to acceptance."""
    numbers = ("bytes", "of exact", "record", "write", "read", "replay")
    found = table("Hidden states in fewer bytes", "pair", "storage", *numbers, right=numbers)
    for row in rows:
        ratios = (row.bytes_ratio, row.record, row.write, row.read, row.replay)
        found.row(row.pair, row.storage, f"{row.nbytes:,}", *(f"{one:.2f}" for one in ratios))
    print_table(found)
    of_each = ("change", "interval", "prompts that differ")
    changes = table("Against exact features", "pair", "storage", "draft", "of", *of_each,
                    right=of_each)  # fmt: skip
    for row in rows:
        for one in row.changes if row.storage != "exact" else ():
            interval = f"{one.lower:+.2%} to {one.upper:+.2%}"
            changes.row(row.pair, row.storage, one.draft, one.of, f"{one.relative:+.2%}", interval,
                      str(one.num_prompts))  # fmt: skip
    print_table(changes)


def stored_pairs(asked: argparse.Namespace) -> list[Stored]:
    """All storages of every pair.

    Raises:
        BenchError: something could not be made.
    """
    each = 1 - (1 - CONFIDENCE) / len(asked.pair)
    return [
        row
        for pair in asked.pair
        for row in measured_pair(pair, asked.workdir / pair.name, asked.recipe, asked.rounds, each)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = benchmark_parser("bench_features", __doc__)
    add_pairs(parser)
    recipes = ("int4-channel", "fp8-ptpc")
    parser.add_argument("--recipe", nargs="*", default=recipes, help="of quantized drafts")
    parser.add_argument("--rounds", type=int, default=3, help="of the speeds (default 3)")
    return run_benchmark(parser, arguments, stored_pairs, lambda _, rows: print_rows(rows))


if __name__ == "__main__":
    sys.exit(main())
