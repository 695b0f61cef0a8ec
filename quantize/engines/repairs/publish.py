"""`repair_draft`: a copy of a folder with its JSON repaired. It appears whole, or not at all.

Every tensor keeps its bytes: safetensors files are copied whole and hashed on both sides.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import VerifyError
from ...files.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    PROVENANCE_FILE,
    Checkpoint,
    read_json_object,
)
from ...files.hub import DraftSource
from ...files.provenance import package_version
from ...files.side_files import SPARE_BYTES, copy_side_files
from ...files.staging import check_output, staged_output, sync, write_text
from ...stored.declarations import declared_scheme, raw_declaration
from ...verify.codes import hash_tensor
from ...verify.folder import REPAIRED_FORMAT, VerifyReport, verify
from .declaration import understood
from .plan import RepairPlan
from .repair import with_config

REPAIRED_VERSION = 1
_WORKERS = 2  # hashing releases the interpreter lock


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What was written.

    Attributes:
        verification: of the new folder against the draft that it was made from; None without one.
    """

    out: Path
    plan: RepairPlan
    verification: VerifyReport | None


def repair_draft(
    plan: RepairPlan, out: Path, *, source: DraftSource, argv: Sequence[str] = ()
) -> RepairReport:
    """Write a repaired copy of a folder: copy, write the JSON, re-read everything, rename.

    Args:
        plan: from `plan_repairs`, with at least one repair.
        out: folder to create.
        source: where the folder came from, for provenance.
        argv: the command line, for provenance.

    Raises:
        OutputError: `out` exists or cannot be written.
        VerifyError: what was written is not what was planned; nothing is left behind.
    """
    folder = plan.source.folder
    side_files = [f for f in plan.source.side_files() if f not in (*plan.files, PROVENANCE_FILE)]
    nbytes = sum((folder / file).stat().st_size for file in (*plan.source.headers, *side_files))
    check_output(out, folder, needed_bytes=nbytes + SPARE_BYTES)
    recorded = _provenance_of(folder)
    with staged_output(out) as staging:
        for file in plan.source.headers:
            shutil.copyfile(folder / file, staging / file)
            sync(staging / file)
        if plan.source.index is not None and INDEX_FILE not in plan.files:
            side_files.append(INDEX_FILE)
        copy_side_files(folder, staging, side_files)
        for file, content in {**plan.files, CONFIG_FILE: plan.config}.items():
            write_text(staging / file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        hashes = _reread(plan, staging, out)
        against = plan.against.checkpoint.folder if plan.against is not None else None
        if recorded is not None or raw_declaration(plan.source) is not None:
            # A plain draft gets no record: it may still be quantized, which writes one.
            provenance = _provenance(plan, recorded, source, argv, hashes)
            write_text(staging / PROVENANCE_FILE, json.dumps(provenance, indent=2) + "\n")
        report = verify(staging, against) if against is not None else None
        if report is not None:
            _check_codes(plan, report, out)
            report = dataclasses.replace(report, output=str(out))
    return RepairReport(out=out, plan=plan, verification=report)


def _reread(plan: RepairPlan, staging: Path, out: Path) -> dict[str, str]:
    """The sha256 of every tensor, after all has been held against the source and the plan.

    Raises:
        VerifyError: a tensor or a declaration is not as planned.
    """
    written = Checkpoint.open(staging)
    with ThreadPoolExecutor(_WORKERS) as pool:
        before, after = (
            dict(zip(side.tensors, pool.map(partial(hash_tensor, side), side.tensors.values()),
                     strict=True))
            for side in (plan.source, written)
        )  # fmt: skip
    changed = sorted(name for name in before.keys() | after.keys()
                     if before.get(name) != after.get(name))  # fmt: skip
    if changed:
        raise VerifyError(
            out,
            f"{changed[0]} did not arrive as it was ({len(changed)} tensor(s) in all)",
            fix="the folder changed while it was copied: run again",
        )
    if understood(with_config(plan.source, plan.config)) is not None:
        declared_scheme(written)  # strictly: both declarations of ModelOpt, every key, every regex
    return after


def _check_codes(plan: RepairPlan, report: VerifyReport, out: Path) -> None:
    """A pack order that was proven decodes to the source's weights in what was written, too."""
    wrong = [linear.module for linear in report.linears if linear.max_error > 1]
    if wrong and any(repair.name == "pack-order" for repair in plan.repairs):
        raise VerifyError(
            out,
            f"the codes of {wrong[0]} are not those of {report.source}, and nothing is published",
            fix="run again; if it stays, report this with the folder's config.json",
        )


def _provenance_of(folder: Path) -> Mapping[str, Any] | None:
    path = folder / PROVENANCE_FILE
    return read_json_object(path, "copy or quantize the draft again") if path.exists() else None


def _provenance(
    plan: RepairPlan,
    recorded: Mapping[str, Any] | None,
    source: DraftSource,
    argv: Sequence[str],
    hashes: Mapping[str, str],
) -> dict[str, Any]:
    """What the folder recorded of itself, and its repairs; of another tool's, the repairs alone."""
    now = {"draftquant": package_version("draftquant"), "argv": list(argv)}
    repairs = [dataclasses.asdict(repair) for repair in plan.repairs]
    if recorded is None:
        return {
            "format": REPAIRED_FORMAT,
            "version": REPAIRED_VERSION,
            **now,
            "source": {"hub_id": source.hub_id, "revision": source.revision},
            "repairs": repairs,
            "tensor_sha256": dict(hashes),
        }
    made_by = recorded.get("made_by") or {key: recorded.get(key) for key in now}
    return {
        **recorded,
        **now,
        "made_by": made_by,
        "repairs": [*(recorded.get("repairs") or ()), *repairs],
    }
