"""PromQL of what an engine's counters say of its verify steps; see `engine_counters`."""

import json
import re
from dataclasses import dataclass

from ..errors import GoldenError
from ..measure.measurement import EngineName
from ..measure.protocols.engine_counters import ENGINE_COUNTERS, EngineCounters, Series

GENERATED = {
    "vllm": "vllm:generation_tokens_total",
    "sglang": "sglang:generation_tokens_total",
    "tensorrt-llm": "trtllm_generation_tokens_total",
}
"""Counters of the tokens that were written, drafted or not."""


_WINDOW = re.compile("".join(rf"([0-9]{{1,{digits}}}{unit})?" for unit, digits in
                             (("w", 4), ("d", 4), ("h", 5), ("m", 5), ("s", 5))))  # fmt: skip
"""Each unit once, the largest first, and below the 292 years that Prometheus can hold."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """Expressions over one engine's counters, one result for each served target.

    Attributes:
        selector: of labels that all series must have, such as `model_name="m"`; "" = none.
    """

    engine: EngineName
    selector: str = ""

    @classmethod
    def of(cls, engine: EngineName, model: str | None) -> "Queries":
        """Over the counters of one served target, or of all; a name is quoted as PromQL does."""
        label = ENGINE_COUNTERS[engine].model_label
        return cls(
            engine=engine,
            selector=f"{label}={json.dumps(model, ensure_ascii=False)}" if model else "",
        )

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
        by = f"{found.model_label}, {label}"
        accepted = self._increase(found.accepted_at, window, by=by)
        steps = self.verify_steps(window)
        return f"{accepted} / on ({found.model_label}) group_left () ({steps} > 0)"

    def generated(self, window: str) -> str:
        """Tokens that were written within a window, drafted or not."""
        return self._increase(Series(name=GENERATED[self.engine]), window)

    def _increase(self, series: Series, window: str, by: str = "") -> str:
        labels = [f'{name}="{value}"' for name, value in series.labels.items()]
        matchers = ", ".join([*labels, *filter(None, [self.selector])])
        chosen = f"{{{matchers}}}" if matchers else ""
        grown = f"increase({series.name}{chosen}[{window}])"
        return f"sum by ({by or self.counters.model_label}) ({grown})"
