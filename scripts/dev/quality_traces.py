"""What `bench_quality` measures on: prompts of a trained pair, and traces of its target on them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .measured_process import BenchError, Taken, measured

if TYPE_CHECKING:
    from .training.corpus import Split

NEW_TOKENS = 128
SEED = 1
"""The shipped prompts were drawn with 0."""
SHIPPED = {"gate": "prompts.jsonl", "calibration": "calibration.jsonl"}
"""Files of a pair, by the split of the corpus whose files they are from."""
_OPTIONS = {"gate": "--prompts", "calibration": "--calibrate-by"}
CANDIDATES = 8
"""Per prompt: small targets like to loop, and prompts whose continuation does are left out."""


def draftquant(*arguments: str) -> Taken:
    """One command in a process of its own.

    Raises:
        BenchError: it failed; with its last lines.
    """
    return measured(arguments[0], "-m", "draftquant.scripts.cli", *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """By which prompts codes are found.

    Attributes:
        count: so many of the pair's, and behind these fresh ones from files of calibration prompts;
            None = all of the pair's.
        category: those of this one alone; it is then no prompt that judges.
    """

    count: int | None = None
    category: str | None = None

    def __str__(self) -> str:
        if self.category is not None:
            return f"by {self.category}"
        return "" if self.count is None else f"by {self.count} prompts"

    @property
    def suffix(self) -> str:
        """Behind the names of folders."""
        return "".join(f"-{word}" for word in str(self).split())


class PairTraces:
    """The traces of one pair in a folder, recorded when they are first asked for.

    Args:
        pair: folder of a trained pair.
        work: folder of its traces, made if need be.
        num_prompts: to judge by, beside those that the pair ships.
    """

    def __init__(self, pair: Path, work: Path, num_prompts: int) -> None:
        if not (pair / "training.json").is_file():
            raise BenchError(str(pair), "is no trained pair", fix="give one of tests/pairs")
        work.mkdir(parents=True, exist_ok=True)
        self._pair, self._work = pair, work
        self._prompts = work / f"prompts-{num_prompts}.jsonl"
        if not self._prompts.exists():
            write_prompts(pair, self._prompts, num_prompts)

    def calibration(self, by: Calibration) -> Path:
        """To find codes by."""
        shipped, name = self._pair / SHIPPED["calibration"], f"calibration{by.suffix}"
        fresh = (by.count or 0) - len(_lines(shipped))
        if fresh > 0:
            prompts = self._work / f"{name}.jsonl"
            if not prompts.exists():
                write_prompts(self._pair, prompts, fresh, split="calibration")
            return self._recorded(name, prompts)
        whole = self._recorded("calibration", shipped)
        if by.category is not None:
            return self._split(whole, name, "--category", by.category)[0]
        if by.count is not None:
            return self._split(whole, name, "--count", str(by.count))[0]
        return whole

    def gate(self, by: Calibration) -> Path:
        """To judge by, greedy."""
        return self._without(self._recorded("gate", self._prompts), by)

    def drawn(self, by: Calibration) -> Path:
        """To judge by, at temperature 1."""
        drawn = self._recorded("drawn", self._prompts, "--temperature", "1", "--seed", "1")
        return self._without(drawn, by)

    def _without(self, traces: Path, by: Calibration) -> Path:
        if by.category is None:
            return traces
        return self._split(traces, f"{traces.name}{by.suffix}", "--category", by.category)[1]

    def _split(self, traces: Path, name: str, *how: str) -> tuple[Path, Path]:
        first, second = self._work / name, self._work / f"{name}-rest"
        if not first.exists():
            draftquant("traces", "split", str(traces), *how, "--out", str(first), str(second))
        return first, second

    def _recorded(self, name: str, prompts: Path, *options: str) -> Path:
        out = self._work / name
        if not out.exists():
            target, draft = self._pair / "target", self._pair / "draft"
            draftquant(
                "record",
                *("--target", str(target), "--draft", str(draft), "--tables"),
                *("--prompts", str(prompts), "--max-new-tokens", str(NEW_TOKENS)),
                *("--out", str(out), *options),
            )
        return out


def write_prompts(pair: Path, out: Path, num_more: int, *, split: "Split" = "gate") -> None:
    """The shipped prompts and more from files of the same split, chosen by the target alone."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from .training.corpus import held_out_prompts, standard_library
    from .training.pair import PairPlan
    from .training.selection import first_prompts

    shipped = [json.loads(line) for line in _lines(pair / SHIPPED[split])]
    known, plan = {tuple(one["token_ids"]) for one in shipped}, PairPlan()
    more = []
    if num_more:
        candidates = held_out_prompts(
            standard_library(),
            split,
            PreTrainedTokenizerFast.from_pretrained(pair / "target"),
            count=CANDIDATES * num_more + len(shipped),
            length=plan.prompt_length,
            seed=SEED,
        )
        fresh = [one for one in candidates if one.token_ids not in known]
        target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
        try:
            chosen = first_prompts(
                target,
                fresh,
                count=num_more,
                num_new_tokens=plan.num_new_tokens,
                max_repeated_8gram_share=plan.max_repeated_8gram_share,
            )
        except ValueError as exc:
            raise BenchError(
                str(pair),
                str(exc).splitlines()[0],
                fix=f"ask for fewer prompts ({_OPTIONS[split]})",
            ) from exc
        more = [asdict(one) | {"id": f"more-{one.id}"} for one in chosen]
    out.write_text("".join(json.dumps(one) + "\n" for one in [*shipped, *more]), encoding="utf-8")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
