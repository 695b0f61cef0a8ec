"""Validate drafts as a release manager would, on real vLLM servers: tests/served/MEASURED.md.

Usage: `.venv/bin/python tests/served/validated.py --python .venv-served/bin/python`, and to try one
pair alone `--only FAMILY`.

For each pair: a server without a draft, with the BF16 draft and with quantized ones, started in
turns (`measure --launch`), then `gate --measured`, `parity divergence` and `reconcile`.

Exit status 1: a difference between server and replay is not explained, or an output parts from the
plain one where no near tie explains it.
"""

import argparse
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from served import context_norms  # noqa: E402
from served.drafts import SERVED_PAIRS  # noqa: E402
from served.validation import (  # noqa: E402
    BF16,
    JUDGED_AT,
    MATRICES,
    MAX_NEW_TOKENS,
    PLAIN,
    Validation,
    asked,
)

RESULTS = HERE / "MEASURED.md"
HEAD = f"""# Drafts validated on real servers

Written by `tests/served/validated.py`: vLLM on a CPU serves each pair without a draft, with the
BF16 draft and with quantized ones; {MATRICES[0].num_prompts} prompts of {MAX_NEW_TOKENS} tokens
({MATRICES[1].num_prompts} where FP8 is served), greedy, two busy cores, so that speeds say little.
Replay uses traces that the same engine recorded without a draft. Verify steps in common text are
compared at the same position, and a prompt is equal, explained, or neither (`draftquant
reconcile`). "Texts as plain" are outputs equal to those without a draft (`draftquant parity
divergence`).

{context_norms.__doc__}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One served draft: a line of the table, and what is wrong with it."""

    cells: tuple[str, ...]
    problems: tuple[str, ...]


COLUMNS = (
    "pair", "draft", "acceptance length served", "replayed, the same steps", "steps equal",
    "prompts equal, explained", "texts as plain", "parts unexplained", "change (gate --measured)",
    "tokens/s at 1", "at 8", "speed-up at 8", "TPOT at 8, ms",
)  # fmt: skip


def rows(validation: Validation, speed: dict[str, Any], *, first_row: bool) -> Iterator[Row]:
    """A row for each draft, and one more where the engine serves it as `context_norms` says."""
    path, judged = validation.measurement, (0, 1, 3)
    for variant in validation.drafts:
        audit = asked(
            *("parity", "divergence", str(path(PLAIN)), str(path(variant)), "--json"),
            *validation.again("--plain-again", PLAIN),
            expected=judged,
        )
        gate = None
        if variant != BF16:
            gate = asked(
                *("gate", "--measured", str(path(BF16)), str(path(variant)), "--json"),
                *validation.again("--baseline-again", BF16),
                expected=judged,
            )
        reconciled = (
            *("reconcile", str(validation.traces), str(path(variant)), "--json"),
            *("--draft", str(validation.draft(variant))),
        )
        family = validation.pair.family
        held = asked(*reconciled, expected=judged)
        problems = list(_problems(family, variant, held, audit, named=first_row))
        held_cells, rest = _held(held), _rest(variant, audit, gate, speed)
        yield Row((family, variant, *held_cells, *rest), tuple(problems))
        if first_row:
            held = asked(*reconciled, expected=judged, module="served.context_norms")
            name = f"{variant}, context normed as the engine does"
            problems = list(_problems(family, name, held))
            yield Row((family, name, *_held(held), *("",) * len(rest)), tuple(problems))


def _held(held: dict[str, Any]) -> tuple[str, ...]:
    prompts = held["prompts"]
    outcomes = Counter(prompt["outcome"] for prompt in prompts)
    compared = sum(prompt["num_compared"] for prompt in prompts)
    equal = sum(prompt["num_equal"] for prompt in prompts)
    return (
        f"{_length(prompts, 'served'):.3f}",
        f"{_length(prompts, 'replayed_there'):.3f} ({_length(prompts, 'served_there'):.3f})",
        f"{equal:,} of {compared:,}",
        f"{outcomes['equal']} + {outcomes['explained']} of {len(prompts)}",
    )


def _rest(
    variant: str, audit: dict[str, Any], gate: dict[str, Any] | None, speed: dict[str, Any]
) -> tuple[str, ...]:
    divergence = next(one for one in audit["findings"] if one["check"] == "divergence")
    served = gate and (gate if "change" in gate else gate["served"])  # or of all that it judged
    alone, together = (_speed(speed, variant, one) for one in (1, JUDGED_AT))
    assert together is not None
    return (
        f"{divergence['details'][0]['identity_rate']:.0%}",
        f"{divergence['estimate']:g}",
        "" if served is None else f"{_change(served)} {served['verdict']}",
        "" if alone is None else f"{alone['tokens_per_second']['value']:,.0f}",
        f"{together['tokens_per_second']['value']:,.0f}",
        _interval(together["speed_up"]),
        f"{1000 * together['time_per_output_token']['value']:.1f}",
    )


def _problems(
    family: str,
    variant: str,
    held: dict[str, Any],
    audit: dict[str, Any] | None = None,
    *,
    named: bool = False,
) -> Iterator[str]:
    """What is wrong; differences of rounds are left to the next row where their cause is named."""
    outcomes = Counter(prompt["outcome"] for prompt in held["prompts"])
    unexplained = outcomes["unexplained"] + outcomes["not known"]
    if unexplained and not named:
        yield f"{family} {variant}: {unexplained} prompts are not explained"
    for one in audit["findings"] if audit else ():
        if one["verdict"] == "FAIL":
            yield f"{family} {variant}: {one['reason']}"


def _length(prompts: list[dict[str, Any]], what: str) -> float:
    histograms = [prompt[what]["histogram"] for prompt in prompts]
    steps = [sum(column) for column in zip(*histograms, strict=True)]
    return 1 + sum(i * count for i, count in enumerate(steps)) / sum(steps)


def _speed(speed: dict[str, Any], variant: str, concurrency: int) -> dict[str, Any] | None:
    found = (
        one for one in speed["figures"]
        if (one["variant"], one["concurrency"]) == (variant, concurrency)
    )  # fmt: skip
    return next(found, None)


def _change(report: dict[str, Any]) -> str:
    change = report["change"]
    if change is None:
        return ""
    ends = ", ".join(f"{math.expm1(change[end]):+.2%}" for end in ("lower", "upper"))
    return f"{report['relative_change']:+.2%} ({ends})"


def _interval(estimate: dict[str, Any]) -> str:
    if estimate["lower"] is None:
        return f"{estimate['value']:.2f}"
    return f"{estimate['value']:.2f} ({estimate['lower']:.2f}, {estimate['upper']:.2f})"


def table(found: list[Row]) -> str:
    """Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells for row in found)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True, help="of the engine's environment")
    parser.add_argument("--work", type=Path, help="folder to keep everything in")
    parser.add_argument("--only", nargs="*", help="families")
    options = parser.parse_args()
    work, python = options.work and options.work.resolve(), options.python.absolute()
    first_row = context_norms.engine_reads_first_row(python)
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for pair in SERVED_PAIRS:
            for matrix in MATRICES:
                if not options.only or pair.family in options.only:
                    own = Validation(pair, matrix, (work or Path(temporary)) / pair.family, python)
                    wrong = first_row and pair.family == "dflash"
                    found += rows(own, own.make(), first_row=wrong)
    print(table(found))
    if not options.only:
        RESULTS.write_text(HEAD + table(found), encoding="utf-8")
    problems = [problem for row in found for problem in row.problems]
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
