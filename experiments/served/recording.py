"""Record the shipped targets with the real vLLM and with transformers; write RECORDED.md.

Usage: `.venv/bin/python experiments/served/recording.py --python .venv-served/bin/python`.

Exit status 1: a recording is not what it should be; the failed checks are printed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

import torch  # noqa: E402
from draftquant.calibration.traces.feature_evidence import feature_evidence  # noqa: E402
from draftquant.calibration.traces.trace_folder import TraceFolder  # noqa: E402
from draftquant.scripts.cli import main as draftquant  # noqa: E402
from draftquant.validate.served.common_steps import common_length  # noqa: E402
from served.drafts import SERVED_PAIRS, Pair, record, record_by_engine  # noqa: E402

RESULTS = HERE / "RECORDED.md"
NUM_PROMPTS = 48
MAX_RELATIVE = {"bfloat16": 0.02, "float32": 1e-4}
"""Of a layer's outputs; BF16 keeps 8 bits, and sums are taken in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two recordings of the same prompts, the engine's first.

    Attributes:
        num_equal: prompts with the same tokens. num_positions: whose tokens are the same up to
            there; of them alone: layers: number, largest and relative (root mean square)
            difference of its outputs. logprob: mean difference of the emitted tokens'.
        evidence: share of the features' variance that the token beside them explains.
        acceptance_length: of the BF16 draft, replayed.
    """

    num_equal: int
    num_positions: int
    layers: tuple[tuple[int, float, float], ...]
    logprob: float
    evidence: tuple[float, ...]
    acceptance_length: tuple[float, ...]


def compare(first: TraceFolder, second: TraceFolder, draft: Path) -> Compared:
    """Hold two recordings with log-probabilities against each other."""
    ids = second.manifest.features.aux_layer_ids
    assert first.manifest.features == second.manifest.features
    assert first.manifest.target == second.manifest.target
    errors, powers, largest = torch.zeros(3, len(ids), dtype=torch.float64)
    logprobs: list[torch.Tensor] = []
    num_equal = num_positions = 0
    for one, other in zip(first, second, strict=True):
        assert one.id == other.id
        num_equal += torch.equal(one.token_ids, other.token_ids)
        common = common_length(one.token_ids.tolist(), other.token_ids.tolist())
        rows = min(common, one.num_tokens - 1, other.num_tokens - 1)
        num_positions += rows
        own, theirs = (t.features[:rows].float().unflatten(1, (len(ids), -1)) for t in (one, other))
        errors += (own - theirs).square().sum((0, 2))
        powers += theirs.square().sum((0, 2))
        largest = largest.maximum((own - theirs).abs().amax((0, 2)).double())
        assert one.token_logprob is not None
        assert other.token_logprob is not None
        emitted = common - one.prompt_length
        logprobs.append((one.token_logprob[:emitted] - other.token_logprob[:emitted]).abs())
    relative = (errors / powers).sqrt()
    evidence = [feature_evidence(traces) for traces in (first, second)]
    assert all(each.fault() is None for each in evidence)
    return Compared(
        num_equal=num_equal,
        num_positions=num_positions,
        layers=tuple(zip(ids, largest.tolist(), relative.tolist(), strict=True)),
        logprob=float(torch.cat(logprobs).mean()),
        evidence=tuple(each.share[0] for each in evidence),
        acceptance_length=tuple(_replayed(draft, traces) for traces in (first, second)),
    )


def _replayed(draft: Path, traces: TraceFolder) -> float:
    said = StringIO()
    with redirect_stdout(said):
        code = draftquant(["replay", str(draft), "--traces", str(traces.folder), "--json"])
    assert code == 0
    return float(json.loads(said.getvalue())[0]["mean_acceptance_length"])


def _row(pair: Pair, dtype: str, found: Compared) -> str:
    layers = "; ".join(f"{n}: {largest:.2g}, {rel:.3%}" for n, largest, rel in found.layers)
    cells = (
        *(pair.family, dtype, f"{found.num_equal} of {NUM_PROMPTS}", f"{found.num_positions:,}"),
        *(layers, f"{found.logprob:.1e}", "{:.3f}, {:.3f}".format(*found.evidence)),
        "{:.3f}, {:.3f}".format(*found.acceptance_length),
    )
    return f"| {' | '.join(cells)} |"


def _faults(pair: Pair, dtype: str, found: Compared) -> Iterator[str]:
    for number, _, relative in found.layers:
        if relative > MAX_RELATIVE[dtype]:
            yield f"{pair.family} {dtype}: layer {number} is {relative:.2%} away"
    if found.num_equal < NUM_PROMPTS / 4:
        yield f"{pair.family} {dtype}: {found.num_equal} of {NUM_PROMPTS} texts are equal"
    one, other = found.acceptance_length
    if abs(one / other - 1) > 0.05:
        yield f"{pair.family} {dtype}: replay gives {one:.3f} and {other:.3f}"


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True, help="of the engine's environment")
    parser.add_argument("--work", type=Path, help="folder to keep traces in")
    options = parser.parse_args()
    failed: list[str] = []
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for pair in SERVED_PAIRS:
            work = (options.work or Path(temporary)) / pair.family
            work.mkdir(parents=True)
            prompts = pair.write_prompts(work / "prompts.jsonl", NUM_PROMPTS)
            for dtype in MAX_RELATIVE:
                asked = ("--dtype", dtype, "--logprobs")
                engine = record_by_engine(
                    options.python, pair, prompts, work / f"vllm-{dtype}", *asked, *pair.recording
                )
                reference = record(pair, prompts, work / f"transformers-{dtype}", *asked)
                found = compare(engine, reference, pair.folder / "draft")
                rows.append(_row(pair, dtype, found))
                failed += _faults(pair, dtype, found)
                print(rows[-1], flush=True)
    # All but the rows is written by hand.
    page = RESULTS.read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(page) if line.startswith("|---")) + 1
    after = next(i for i in range(at, len(page)) if not page[i].startswith("|"))
    RESULTS.write_text("\n".join([*page[:at], *rows, *page[after:]]) + "\n", encoding="utf-8")
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
