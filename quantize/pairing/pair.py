"""What is asked of a pair, and what `check_pair` answers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from typing_extensions import override

from ...recipes.brief import Brief
from ..drafts import Family
from ..drafts.geometry import Geometry
from ..engines.contract import TITLES, EngineCheck, EngineName, Verdict
from ..files.checkpoint import Checkpoint
from .rotation import Rotation
from .target import Target
from .target_args import TargetArgs
from .tokenizers import Tokenizer

Level = Literal["refused", "wrong", "unknown", "warning", "note"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""In the order in which they are said. A warning is of what happens without the printed launch
line, or may happen; it leaves the verdict as it is, as a note does."""
_VERDICTS: tuple[Verdict, ...] = ("REFUSED", "LOADS BUT WRONG", "UNKNOWN", "LOADS")
"""The worst first. What is certainly wrong of a pair is so whatever is unknown of its loading."""


class PairFinding(NamedTuple):
    """One thing about a pair.

    Attributes:
        level: refused = the engine ends with an error; wrong = it serves, and few tokens are
            accepted; unknown = one of these may be; warning, note: see `LEVELS`.
        subject: what it is about, in one word for machines.
        text: what the engine does, or what differs. remedy: what to do; "" = nothing.
        engine: None = of every engine.
    """

    level: Level
    subject: str
    text: str
    remedy: str = ""
    engine: EngineName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A draft beside a target, and how they are to be served.

    Attributes:
        draft: config and headers; of a layer inside its target's folder those of the layer.
        config: the draft's config.json, a multimodal target's with its text section.
        family, geometry: of the draft.
        target: what is known of it.
        args: what its launch line says.
        tp: tensor-parallel size.
        own_tokenizer, target_tokenizer: of the two folders; None where one has none.
        largest_feature: magnitude among recorded hidden states of the target; None = none given.
    """

    draft: Checkpoint
    config: Mapping[str, Any]
    family: Family
    geometry: Geometry
    target: Target
    args: TargetArgs
    tp: int
    own_tokenizer: Tokenizer | None = None
    target_tokenizer: Tokenizer | None = None
    largest_feature: float | None = None

    @property
    def rotation(self) -> Rotation:
        """How the draft rotates positions, and how many it is made for."""
        return Rotation.of(self.config)

    @property
    def is_mtp(self) -> bool:
        """Whether the draft is an MTP layer, in a folder of its own or in its target's."""
        return self.family.engine_traits.is_mtp

    @property
    def is_inside(self) -> bool:
        """Whether the draft lies in its target's folder."""
        return self.draft.subtree is not None

    @property
    def is_whole_model(self) -> bool:
        """Whether the draft is an ordinary language model."""
        return self.family.engine_traits.whole_model


PairRule = Callable[[Pair], Iterator[PairFinding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePair:
    """What one engine does with a pair.

    Attributes:
        answer: what it does with the draft alone, its layers numbered after this target's.
        findings: of the pair, the decisive one first; those of every engine among them.
        launch: the whole command that serves the pair.
    """

    answer: EngineCheck
    findings: tuple[PairFinding, ...]
    launch: str | None

    @property
    def verdict(self) -> Verdict:
        """The worse of the draft's own and the pair's."""
        of_levels: dict[Level, Verdict] = {
            "refused": "REFUSED",
            "wrong": "LOADS BUT WRONG",
            "unknown": "UNKNOWN",
        }
        found = [of_levels[each.level] for each in self.findings if each.level in of_levels]
        return min([self.answer.verdict, *found], key=_VERDICTS.index)

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        alone = self.answer
        return {
            "engine": alone.engine,
            "version": alone.version,
            "gpu": alone.gpu,
            "verdict": self.verdict,
            "draft_alone": {
                "verdict": alone.verdict,
                "findings": [finding._asdict() for finding in alone.findings],
                "notes": list(alone.notes),
            },
            "findings": [finding._asdict() for finding in self.findings],
            "launch": self.launch,
            "launch_note": alone.launch_note if self.launch else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PairCheck(Brief):
    """What engines do with a draft beside its target.

    Attributes:
        draft, target: as they are called in the launch lines.
        engines: one answer for each engine that was asked.
        findings: all of them, each once, the worst first.
        tensor_parallel: sizes up to 16 that both allow.
        not_compared: what could not be held against the other, each in a sentence.
    """

    draft: str
    target: str
    engines: tuple[EnginePair, ...]
    findings: tuple[PairFinding, ...]
    tensor_parallel: tuple[int, ...]
    not_compared: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Of one engine, its own; of several, the best: the pair can be served there."""
        return max((each.verdict for each in self.engines), key=_VERDICTS.index)

    @property
    def remedy(self) -> str | None:
        """What to do about the worst finding; None where nothing is refused or wrong."""
        bad = (each for each in self.findings if each.level in ("refused", "wrong"))
        return next((each.remedy for each in bad), None)

    @property
    def exit_code(self) -> int:
        """0 an engine loads the pair, 1 REFUSED or LOADS BUT WRONG in all, else 3."""
        return {"LOADS": 0, "LOADS BUT WRONG": 1, "REFUSED": 1, "UNKNOWN": 3}[self.verdict]

    def of(self, engine: EngineName) -> EnginePair:
        """One engine's answer."""
        return next(each for each in self.engines if each.answer.engine == engine)

    def to_mapping(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "draft": self.draft,
            "target": self.target,
            "verdict": self.verdict,
            "engines": [each.to_mapping() for each in self.engines],
            "tensor_parallel": list(self.tensor_parallel),
            "not_compared": list(self.not_compared),
        }

    @override
    def brief(self) -> Mapping[str, object]:
        each = {TITLES[one.answer.engine]: one.verdict for one in self.engines}
        return {"verdict": self.verdict, **each, "remedy": self.remedy}


def in_order(findings: Iterator[PairFinding]) -> tuple[PairFinding, ...]:
    """Each once, the worst first."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda each: LEVELS.index(each.level)))
