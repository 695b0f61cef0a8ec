"""Which recipe: the fastest whose draft passes, on prompts that no verdict will count.

Recipes stand in the order of their estimated drafting times. One that could not be the fastest even
if its draft lost nothing is not made. What is made is judged by the gate's own rules.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from jinja2 import PackageLoader
from markupsafe import Markup

from ...recipes.brief import counted
from ..judging.judgement import GateReport
from ..judging.policy import POLICIES, Verdict, in_percent
from ..report import words
from ..report.html_report import interval, render
from ..report.plots import forest

_FASTER = 1 + 1e-6
"""Ratio of two speeds above which their difference is none of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A recipe, or the draft as it is; `judged` None = its draft was not made."""

    name: str
    stored_bytes: int
    drafting_seconds: float
    judged: GateReport | None = None

    @property
    def verdict(self) -> Verdict | None:
        """What the prompts that choose say of its draft."""
        return None if self.judged is None else self.judged.verdict

    @property
    def kept(self) -> float:
        """Acceptance length as a share of the unquantized draft's; 1 where it is not known."""
        return 1 + ((self.judged.relative_change if self.judged else None) or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """All contenders, in the order in which they are tried, and which of them is chosen.

    Attributes:
        engine: the engine with its version. gpu: the GPU.
        unquantized: the draft as it is.
        left_out: recipe -> why its draft is no contender.
        verify_seconds: time of the target's verify step; None = not known.
        num_prompts: how many prompts choose.
        acceptance_length: of the unquantized draft on these.
    """

    engine: str
    gpu: str
    unquantized: Contender
    contenders: tuple[Contender, ...]
    left_out: Mapping[str, str]
    verify_seconds: float | None
    num_prompts: int = 0
    acceptance_length: float = 1.0

    def speed(self, one: Contender) -> float:
        """Tokens per second of a sequence; draftings per second where the target is not known."""
        if self.verify_seconds is None:
            return 1 / one.drafting_seconds
        return self.acceptance_length * one.kept / (one.drafting_seconds + self.verify_seconds)

    def could_win(self, one: Contender) -> bool:
        """Whether it is faster than what passes already, and than BF16, if it loses nothing."""
        passing = [each for each in self.contenders if each.verdict == "PASS"]
        return self.speed(one) > _FASTER * max(map(self.speed, (self.unquantized, *passing)))

    @property
    def chosen(self) -> Contender | None:
        """The fastest that passes, else the fastest that is not shown to fail."""
        for verdict in ("PASS", "INCONCLUSIVE"):
            if found := [each for each in self.contenders if each.verdict == verdict]:
                return max(found, key=self.speed)
        return None

    @property
    def told(self) -> str:
        """What is chosen, and what that is worth, in sentences."""
        those = counted(len(self.contenders), "recipe")
        recipes = f"the {those} that {self.engine} loads on {self.gpu}"
        by = f"on the {counted(self.num_prompts, 'prompt')} that choose"
        if (chosen := self.chosen) is None:
            return f"Of {recipes}, none keeps the acceptance length {by}."
        if chosen.verdict == "PASS":
            return f"{chosen.name}: of {recipes}, the fastest whose draft passes {by}."
        assert chosen.judged is not None  # it has a verdict
        return (
            f"{chosen.name}: of {recipes}, none passes {by}, and this is the fastest that is not"
            f" shown to fail. {chosen.judged.reason}"
        )

    @property
    def ordered_by(self) -> str:
        """What the order is based on."""
        if self.verify_seconds is None:
            return (
                "Faster means less time for drafting, whatever acceptance is lost within the"
                " limit: the target's verify step is not known (--target-step-ms)."
            )
        verify = f"{1e3 * self.verify_seconds:g} ms"
        return f"Speed is estimated, of one sequence, beside a verify step of {verify}."

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = {**asdict(replace(self, contenders=())), "told": self.told}
        plain["chosen"] = self.chosen and self.chosen.name
        return plain | {"contenders": list(map(_mapping, self.contenders))}


def _mapping(one: Contender) -> dict[str, Any]:
    plain = asdict(replace(one, judged=None))
    change = one.judged and one.judged.change
    reason = one.judged and one.judged.reason
    return plain | {"judged": {"verdict": one.verdict, "reason": reason,
                               "change": change and asdict(change)}}  # fmt: skip


def tried(selection: Selection, judge: Callable[[Contender], GateReport]) -> Selection:
    """The selection, with a judgement of each contender that could win when its turn came."""
    for place, one in enumerate(selection.contenders):
        if selection.could_win(one):
            contenders = list(selection.contenders)
            contenders[place] = replace(one, judged=judge(one))
            selection = replace(selection, contenders=tuple(contenders))
    return selection


COLUMNS = ("recipe", "stored", "drafting", "change", "bounds", "speed", "")


def rows(selection: Selection) -> Iterator[tuple[str, ...]]:
    """The cells of each contender, the unquantized draft first."""
    for one in (selection.unquantized, *selection.contenders):
        judged = one.judged
        change = judged and judged.change
        limit = judged.policy.max_relative_drop if judged else None
        known = selection.verify_seconds is not None and (judged or one is selection.unquantized)
        mark = "unquantized" if one is selection.unquantized else one.verdict or "cannot win"
        yield (
            one.name,
            words.nbytes(one.stored_bytes),
            f"{1e6 * one.drafting_seconds:,.1f} µs",
            words.change(change, limit) if change else "",
            words.bounds(change, limit) if change else "",
            f"{selection.speed(one):,.2f} tokens/s" if known else "",
            f"{mark}, chosen" if one is selection.chosen else mark,
        )


def page(selection: Selection, draft: str) -> str:
    """The table and the picture as one page."""
    drawn = [
        interval(
            one.name,
            one.judged.change,
            one.judged.policy.max_relative_drop,
            whole=one is selection.chosen,
        )
        for one in selection.contenders
        if one.judged
    ]
    bounds = f"one-sided {in_percent(POLICIES['release'].confidence)} bounds"
    title = "Change of the acceptance length of each recipe that was tried"
    return render(
        "selection.html.j2",
        PackageLoader(__package__, ""),
        selection=selection,
        draft=draft,
        columns=COLUMNS,
        lines=list(rows(selection)),
        plot=Markup(forest("selection", drawn, title=title, bounds=bounds)) if drawn else "",
    )
