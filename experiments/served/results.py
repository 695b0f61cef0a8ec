"""results.json and RESULTS.md: what was served beside replay."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from served.rounds import Rounds, acceptance_length

HERE = Path(__file__).resolve().parent
JSON_FILE = HERE / "results.json"
RESULTS_FILE = HERE / "RESULTS.md"
_MEANINGS = {
    "NVFP4 linear layer": "vLLM has no NVFP4 kernel for this CPU.",
    "Marlin FP4 not available": "vLLM has no NVFP4 kernel for inputs in BF16 on this CPU.",
    "MXFP4 linear layer": "vLLM has no MXFP4 kernel for this CPU.",
    "No compressed-tensors compatible scheme": (
        "vLLM has no scheme for INT4 in groups with FP8 inputs on this CPU."
    ),
    "fp8 KV cache for CPU MLA is not yet implemented": (
        "vLLM's latent attention on a CPU keeps no FP8."
    ),
    "No quark compatible scheme": (
        "vLLM has no scheme for Quark's INT4 per channel with FP8 inputs; the plugin adds one."
    ),
}
"""The engine's words -> what they mean. A new refusal needs a sentence here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One draft in the engine.

    Attributes:
        error: the engine's own words where it refuses the draft; then all counts are 0.
        acceptance_length: of all rounds of the engine. replayed: of all rounds of replay.
        num_rounds: of the engine. num_compared: that replay can judge, see `rounds`.
        num_equal: of those, in which both accept the same number. num_near_ties: of the others,
            where the draft's choice was a near tie.
        served_where_compared, replayed_where_compared: acceptance lengths of the compared rounds.
        num_same_text: prompts continued as without a draft. num_prompts: all.
        dequantized: the CPU lacks the product for its weights, see `cpu`.
    """

    family: str
    draft: str
    error: str | None = None
    version: str = ""
    acceptance_length: float = 0.0
    replayed: float = 0.0
    num_rounds: int = 0
    num_compared: int = 0
    num_equal: int = 0
    num_near_ties: int = 0
    served_where_compared: float = 0.0
    replayed_where_compared: float = 0.0
    num_same_text: int = 0
    num_prompts: int = 0
    dequantized: bool = False

    @classmethod
    def of(cls, found: Rounds, *, family: str, draft: str, version: str) -> "Served":
        """What was counted of a draft that the engine serves."""
        served, replayed = zip(*found.compared, strict=True)
        return cls(
            family=family,
            draft=draft,
            version=version,
            acceptance_length=acceptance_length(found.served),
            replayed=acceptance_length(found.replayed),
            num_rounds=len(found.served),
            num_compared=len(found.compared),
            num_equal=found.num_equal,
            num_near_ties=found.num_near_ties,
            served_where_compared=acceptance_length(served),
            replayed_where_compared=acceptance_length(replayed),
            num_same_text=found.num_same_text,
            num_prompts=found.num_prompts,
        )

    @property
    def num_unexplained(self) -> int:
        """Rounds that differ where the draft's choice was clear."""
        return self.num_compared - self.num_equal - self.num_near_ties

    @property
    def difference(self) -> float:
        """Of the two acceptance lengths over the compared rounds, relative; 0 where refused."""
        if self.error is not None:
            return 0.0
        return abs(self.served_where_compared / self.replayed_where_compared - 1)


def write_results(served: Sequence[Served]) -> None:
    """Write results.json and RESULTS.md."""
    rows = ",\n".join(json.dumps(dataclasses.asdict(each)) for each in served)
    JSON_FILE.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    write_tables(served)


def write_tables(served: Sequence[Served]) -> None:
    """Write RESULTS.md, but for its head, which is written by hand."""
    head = RESULTS_FILE.read_text(encoding="utf-8").partition("\n| draft |")[0]
    RESULTS_FILE.write_text(f"{head}\n{table(served)}", encoding="utf-8")


def read_results() -> list[Served]:
    """What results.json holds."""
    return [Served(**row) for row in json.loads(JSON_FILE.read_text(encoding="utf-8"))]


def table(served: Sequence[Served]) -> str:
    """Every draft on both pairs, and the reasons of what the engine refuses."""
    drafts = dict.fromkeys(each.draft for each in served)
    families = dict.fromkeys(each.family for each in served)
    found = {(each.family, each.draft): each for each in served}
    reasons: dict[str, int] = {}
    columns = "".join(f" {family} served | replayed | equal steps |" for family in families)
    lines = [f"| draft |{columns}", f"|---|{'---|' * 3 * len(families)}"]
    for draft in drafts:
        cells = "".join(_cells(found.get((family, draft)), reasons) for family in families)
        lines.append(f"| {draft} |{cells}")
    lines += ["", _legend(served), ""]
    lines += [f"{number}. {_meaning(reason)} `{reason}`" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"


def _cells(served: Served | None, reasons: dict[str, int]) -> str:
    if served is None:
        return " not served | | |"
    if served.error is not None:
        return f" refused [{reasons.setdefault(served.error, len(reasons) + 1)}] | | |"
    lengths = f" {served.served_where_compared:.3f} | {served.replayed_where_compared:.3f} |"
    mark = " (as BF16)" if served.dequantized else ""
    return f"{lengths} {served.num_equal} of {served.num_compared}{mark} |"


def _meaning(reason: str) -> str:
    """What the engine's own words mean, as a sentence."""
    (meaning,) = (sentence for words, sentence in _MEANINGS.items() if words in reason)
    return meaning


def _legend(served: Sequence[Served]) -> str:
    loaded = [each for each in served if each.error is None]
    (version,) = {each.version for each in loaded}
    equal = sum(each.num_equal for each in loaded)
    compared = sum(each.num_compared for each in loaded)
    far = max(each.difference for each in loaded)
    ties = sum(each.num_near_ties for each in loaded)
    unexplained = sum(each.num_unexplained for each in loaded)
    return (
        f"vLLM {version} on a CPU, greedy. The acceptance lengths cover the verify steps whose"
        f" outcome replay knows. **Equal steps**: the engine accepted exactly as many tokens as"
        f" replay, in {equal:,} of {compared:,} steps ({equal / compared:.1%}). Of the others,"
        f" {ties:,} diverged at a near tie of the draft's logits and {unexplained:,} did not. The"
        f" largest difference of two acceptance lengths is {far:.2%}."
    )
