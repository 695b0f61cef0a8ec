"""What engines do with a draft, alone or beside its target, as it is asked."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ...recipes.brief import Brief
from ..asked import Checking
from ..engines.contract import EXIT_CODES, EngineCheck, Verdict
from ..engines.engine_check import check_draft
from ..files.hub import resolve_draft, resolve_target
from ..gpus import architecture
from .pair import PairCheck
from .pair_check import check_pair


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckReport(Brief):
    """What an engine does with a draft.

    Attributes:
        answer: the engine's answer.
        pair: what the engines do with the draft beside its target; None without `target=`.
    """

    answer: EngineCheck
    pair: PairCheck | None = None

    @property
    def verdict(self) -> Verdict:
        """LOADS, LOADS BUT WRONG, REFUSED or UNKNOWN: of the pair, where a target is given."""
        return self.pair.verdict if self.pair is not None else self.answer.verdict

    @property
    def remedy(self) -> str | None:
        """What to do where it does not load, None where it does."""
        return self.pair.remedy if self.pair is not None else self.answer.remedy

    @property
    def exit_code(self) -> int:
        """0 LOADS, 1 LOADS BUT WRONG or REFUSED, 3 UNKNOWN."""
        return EXIT_CODES[self.verdict]

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        if self.pair is not None:
            return self.pair.to_mapping()
        findings = [finding._asdict() for finding in self.answer.findings]
        return {**dataclasses.asdict(self.answer), "findings": findings}

    @override
    def brief(self) -> Mapping[str, object]:
        return self.pair.brief() if self.pair is not None else self.answer.brief()


def check_as_asked(asked: Checking, largest_feature: Callable[[], float | None]) -> CheckReport:
    """The answer for the draft alone, in the first engine that is asked, and for the pair."""
    folder = resolve_draft(str(asked.draft), asked.subtree).folder
    arch = architecture(asked.gpu) if asked.gpu else None
    if asked.target is not None:
        target = resolve_target(str(asked.target))
        pair = check_pair(folder, target, asked, arch=arch, largest_feature=largest_feature())
        return CheckReport(answer=pair.engines[0].answer, pair=pair)
    assert asked.engine is not None  # refused by who asks
    answer = check_draft(
        folder,
        engine=asked.engine,
        version=asked.version,
        arch=arch,
        tp=asked.tp or 1,
        target_layers=asked.target_layers,
        asked=asked.gpu,
    )
    return CheckReport(answer=answer)
