"""PromQL of what an engine's counters say of its verify steps; see `engine_counters`."""

import json
import re
from dataclasses import dataclass

from ...recipes.errors import short
from ..errors import GoldenError
from ..measure.measurement import EngineName
from ..measure.protocols.engine_counters import ENGINE_COUNTERS, MODEL_LABEL, EngineCounters, Series

GENERATED = {
    "vllm": "vllm:generation_tokens_total",
    "sglang": "sglang:generation_tokens_total",
    "tensorrt-llm": "trtllm_generation_tokens_total",
}
"""Counters of the tokens that were written, drafted or not."""


_WINDOW = re.compile("".join(rf"([0-9]{{1,{digits}}}{unit})?" for unit, digits in
                             (("w", 4), ("d", 4), ("h", 5), ("m", 5), ("s", 5))))  # fmt: skip
"""Each unit once, the largest first, and below the 292 years that Prometheus can hold."""
_LABEL = re.compile("(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


def check_window(window: str) -> None:
    """Refuse what Prometheus would not take for a time.

    Raises:
        GoldenError: it is none.
    """
    if not _WINDOW.fullmatch(window) or not re.search("[1-9]", window):
        raise GoldenError(
            "--window",
            f"expected a time such as 30m or 1h, got {window!r}",
            fix="give numbers with w, d, h, m or s, once each, in this order",
        )


def label_is(label: str, value: str) -> str:
    """The matcher of one value, quoted as PromQL does."""
    return f"{label}={json.dumps(value, ensure_ascii=False)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """Expressions over one engine's counters, one result for each served target.

    Attributes:
        selector: of labels that all series must have, such as `model_name="m"`; "" = none.
        category_label: each of whose values has a result of its own too; "" = none.
    """

    engine: EngineName
    selector: str = ""
    category_label: str = ""

    @classmethod
    def of(cls, engine: EngineName, model: str | None, category_label: str | None) -> "Queries":
        """Over the counters of one served target, or of all.

        Raises:
            GoldenError: the category label is no label of categories.
        """
        found = cls(
            engine=engine,
            selector=label_is(MODEL_LABEL, model) if model else "",
            category_label=category_label or "",
        )
        taken = ("alertname", "severity", MODEL_LABEL, found.counters.position_label)
        if category_label is not None and (
            not _LABEL.fullmatch(category_label) or category_label in taken
        ):
            raise GoldenError(
                "--category-label",
                f"expected a label of the counters that names categories, got"
                f" {short(category_label)}",
                fix="give the name of a label, such as category",
            )
        return found

    @property
    def counters(self) -> EngineCounters:
        """Names and labels."""
        return ENGINE_COUNTERS[self.engine]

    def verify_steps(self, window: str) -> str:
        """Verify steps within a window such as 1h."""
        return self._increase(self.counters.verify_steps, window)

    def acceptance_length(self, window: str) -> str:
        """The mean of a window: 1 + accepted / verify steps; nothing where there was no step."""
        steps, found = self.verify_steps(window), self.counters
        if found.emitted is not None and found.first_tokens is not None:
            emitted = self._increase(found.emitted, window)
            first = self._increase(found.first_tokens, window)
            return f"({emitted} - {first}) / ({steps} > 0)"
        accepted = found.accepted or found.accepted_at
        assert accepted is not None  # an engine counts one of the three
        return f"1 + {self._increase(accepted, window)} / ({steps} > 0)"

    def accepted_at(self, window: str) -> str | None:
        """Share of the steps that accepted the token at each position; None = not counted."""
        found, label = self.counters, self.counters.position_label
        if found.accepted_at is None:
            return None
        accepted = self._increase(found.accepted_at, window, by=f"{self._by}, {label}")
        steps = self.verify_steps(window)
        return f"{accepted} / on ({self._by}) group_left () ({steps} > 0)"

    def generated(self, window: str) -> str:
        """Tokens that were written within a window, drafted or not."""
        return self._increase(Series(name=GENERATED[self.engine]), window)

    def _increase(self, series: Series, window: str, by: str = "") -> str:
        labels = [f'{name}="{value}"' for name, value in series.labels.items()]
        matchers = ", ".join([*labels, *filter(None, [self.selector])])
        chosen = f"{{{matchers}}}" if matchers else ""
        grown = f"increase({series.name}{chosen}[{window}])"
        return f"sum by ({by or self._by}) ({grown})"

    @property
    def _by(self) -> str:
        return f"{MODEL_LABEL}, {self.category_label}" if self.category_label else MODEL_LABEL
