"""Every class of drafts of both engines in one table: roles, verified, executed, what `check` says.

`experiments/run class_table` writes it into `experiments/classes.md`. Folders and expected roles
are those of `tests/draft_classes.toml`; what was executed is in `classes.json`.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "experiments" / "classes.md"
RECIPE = "fp8-ptpc"
HEAD = "| class | roles | verified | executed | `check` |\n|---|---|---|---|---|\n"


def row(name: str, ran: Mapping[str, str], why: Mapping[str, str]) -> str:
    """The line of a class that no family reads."""
    import draftquant.api as dq
    from draft_classes import CLASSES, TABLE, tensors, write
    from draftquant.recipes import DraftQuantError

    expected = {tensor: role for tensor, role, *_ in tensors(name)}
    with tempfile.TemporaryDirectory() as work:
        source, out = write(name, Path(work) / "draft"), Path(work) / "out"
        found = {t["name"]: t["role"] for t in dq.inspect(source).to_mapping()["tensors"]}
        right = sum(found[tensor] == role for tensor, role in expected.items())
        folders = [source]
        try:
            dq.quantize(source, RECIPE, out=out)
            verified = "yes" if dq.verify(out, against=source).ok else "NO"
            folders.append(out)
        except DraftQuantError as exc:
            said_why = CLASSES[name].get("refused", "")
            verified = f"refused: {said_why}" if said_why and said_why in str(exc) else "NO"
        engine = "vllm" if name in TABLE["vllm"] else "sglang"
        said = [dq.check(folder, engine=engine, gpu="h200").verdict for folder in folders]
    executed = ran.get(name) or f"no: {why.get(name, 'no such class of SGLang was')}"
    return (
        f"| `{name}` | {right} of {len(expected)} | {verified} | {executed} | {', '.join(said)} |"
    )


def main() -> int:
    """See the module."""
    from draft_classes import CLASSES, TABLE

    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = json.loads((HERE / "classes.json").read_text("utf-8"))
    answers = {r["draft"]: ", ".join(r.get("answers", {})) for r in rows}
    ran = {
        name: ", ".join(filter(None, (answers[draft], answers.get(f"{draft} {RECIPE}"))))
        for name, draft in TABLE["executed"].items()
    }
    why = {name: said for said, names in TABLE["not_executed"].items() for name in names}
    lines = [row(name, ran, why) for name in CLASSES]
    same = [f"| `{name}` | as `{other}` | | | |" for name, other in TABLE["alike"].items()]
    known = [f"| `{name}` | family `{said}` | | | |" for name, said in TABLE["known"].items()]
    prose = PAGE.read_text(encoding="utf-8").partition(HEAD)[0]
    PAGE.write_text(prose + HEAD + "\n".join([*lines, *same, *known]) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(ROOT / "tests")]
    sys.exit(main())
