"""`draftquant traces`: what is done with trace folders beside recording them."""

import argparse
from typing import TYPE_CHECKING, Any

from ..api.traces import traces_import, traces_info, traces_merge, traces_split, traces_store
from ..console import megabytes, print_json, print_table, stdout, table
from .traces_info import print_info, print_written, written
from .verbs import Below, Verbs, run_verb

if TYPE_CHECKING:
    from ..api.reports import ImportReport


def run(options: argparse.Namespace) -> int:
    """Run the verb."""
    return run_verb(options, VERBS)


def _import(options: argparse.Namespace) -> int:
    report = traces_import.run(options.settings)
    if options.json:
        print_json(_imported(report))
    else:
        _print_import(report)
    return 0


def _info(options: argparse.Namespace) -> int:
    print_info(traces_info.run(options.settings), options.settings.traces, as_json=options.json)
    return 0


def _split(options: argparse.Namespace) -> int:
    settings = options.settings
    report = traces_split.run(settings)
    if options.json:
        print_json(
            {
                "first": written(report.first),
                "second": written(report.second),
                "by_category": {name: list(counts) for name, counts in report.by_category.items()},
                "kept_together": report.num_kept_together,
            }
        )
        return 0
    names = [str(out) for out in settings.outs]
    title = f"{settings.traces}, {len(report.first) + len(report.second)} prompts"
    found = table(title, "category", *names, right=(*names,))
    for category, (first, second) in report.by_category.items():
        found.row(category, str(first), str(second))
    found.row("sum", str(len(report.first)), str(len(report.second)), style="bold")
    print_table(found)
    if report.num_kept_together:
        stdout().line(
            f"{report.num_kept_together} prompts are on the same side as a related one: copies,"
            " near duplicates and turns of one conversation are kept together"
        )
    return 0


def _merge(options: argparse.Namespace) -> int:
    report = traces_merge.run(options.settings)
    if options.json:
        absent = [str(folder) for folder in report.without_tables]
        changed = {"renamed": dict(report.renamed), "without_tables": absent}
        print_json(written(report.traces) | changed)
        return 0
    print_written(report.traces)
    if report.renamed:
        old, new = next(iter(report.renamed.items()))
        stdout().line(
            f"{len(report.renamed)} prompts were renamed because their ids existed twice: {old} is"
            f" now {new}"
        )
    if report.without_tables:
        named = ", ".join(map(str, report.without_tables))
        stdout().line(f"the merged folder has no embedding and head, because {named} has none")
    return 0


def _store(options: argparse.Namespace) -> int:
    report = traces_store.run(options.settings)
    before, after = report.nbytes_before, report.nbytes
    if options.json:
        changed = {"feature_storage": options.settings.feature_storage}
        print_json(written(report.traces) | changed | {"nbytes_before": before, "nbytes": after})
        return 0
    print_written(report.traces)
    stdout().line(f"shards: {megabytes(before)} -> {megabytes(after)}, {after / before:.1%}")
    return 0


VERBS: Verbs = {
    "import": Below(
        traces_import, _import, "convert hidden states that a trainer or vLLM dumped into traces"
    ),
    "info": Below(traces_info, _info, "describe a trace folder"),
    "split": Below(traces_split, _split, "split a trace folder into two without common prompts"),
    "merge": Below(traces_merge, _merge, "merge trace folders of the same target"),
    "store": Below(traces_store, _store, "copy traces with hidden states in fewer bytes"),
}


def _print_import(report: "ImportReport") -> None:
    print_written(report.traces, f" of {report.num_samples} texts")
    for sentence in report.layout.sentences():
        stdout().line(f"  {sentence}")
    if report.num_off_policy:
        stdout().line(
            f"  {report.num_off_policy} answers left out: the target would not have given them"
        )
    if report.num_without_answer:
        stdout().line(f"  {report.num_without_answer} texts without an answer")


def _imported(report: "ImportReport") -> dict[str, Any]:
    return written(report.traces) | {
        "texts": report.num_samples,
        "findings": list(report.layout.sentences()),
        "left_out_off_policy": report.num_off_policy,
        "without_answer": report.num_without_answer,
    }
