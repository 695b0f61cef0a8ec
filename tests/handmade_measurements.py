"""Measurements made by hand: rounds in, and texts that agree as far as told."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftquant.calibration.traces.prompt_trace import prompt_sha256
from draftquant.validate.measure.measurement import (
    Asked,
    Measurement,
    RequestRecord,
    ServerIdentity,
    Setup,
    Speculation,
    prompts_sha256,
)
from draftquant.validate.measure.measurement_file import line_of

_SECONDS = itertools.count(1)  # no two runs take the same time


def setup(num_draft_tokens: int = 1, **changes: Any) -> Setup:
    """A greedy run on vLLM; `changes` of its speculation, asked or server by their own names."""
    parts = {
        "speculation": Speculation(num_draft_tokens=num_draft_tokens),
        "asked": Asked(prompts_sha256="0" * 64, max_new_tokens=4000, concurrency=1),
        "server": ServerIdentity(engine="vllm", version="0.32.0", model="target"),
    }
    for name, value in changes.items():
        part = next(key for key, one in parts.items() if hasattr(one, name))
        parts[part] = dataclasses.replace(parts[part], **{name: value})  # type: ignore[type-var]
    return Setup(draftquant="0", **parts)  # type: ignore[arg-type]


def record(
    accepted: Sequence[int],
    *,
    num_draft_tokens: int = 1,
    number: int = 0,
    parts_at: int | None = None,
    **changes: Any,
) -> RequestRecord:
    """One prompt whose rounds fill the output; from `parts_at` on the text is this record's own."""
    own = next(_SECONDS)
    tokens = tuple(
        10_000 * number + i if parts_at is None or i < parts_at else 1_000_000 * own + i
        for i in range(1 + sum(a + 1 for a in accepted))
    )
    result = RequestRecord(
        id=f"p{number}",
        category="a",
        prompt_sha256=prompt_sha256([number]),
        num_prompt_tokens=1,
        token_ids=tokens,
        ended="stop",
        histogram=tuple(list(accepted).count(j) for j in range(num_draft_tokens + 1)),
        accepted=tuple(accepted),
        began=0.0,
        time_to_first_token=None,
        latency=float(own),
    )
    return dataclasses.replace(result, **changes)


def measurement(
    rounds: Sequence[Sequence[int]],
    *,
    name: str = "run",
    num_draft_tokens: int = 1,
    categories: str = "a",
    parts_at: int | None = None,
    of_record: Sequence[dict[str, Any]] = (),
    **changes: Any,
) -> Measurement:
    """A run over as many prompts; `of_record` are changes of the records, in order."""
    records = tuple(
        dataclasses.replace(
            record(
                accepted,
                num_draft_tokens=num_draft_tokens,
                number=i,
                parts_at=parts_at,
                category=categories[i % len(categories)],
            ),
            **(of_record[i] if i < len(of_record) else {}),
        )
        for i, accepted in enumerate(rounds)
    )
    digest = prompts_sha256((r.id, r.category, r.prompt_sha256) for r in records)
    made = setup(num_draft_tokens, **({"prompts_sha256": digest} | changes))
    return Measurement(name=name, setup=made, records=records)


def alternating(rejected: int) -> list[int]:
    """200 K = 1 rounds, of which `rejected`, evenly spread, accept nothing."""
    return [0 if (i + 1) * rejected // 200 > i * rejected // 200 else 1 for i in range(200)]


def losing(drop: int = 0, noise: int = 0, count: int = 40, **changes: Any) -> Measurement:
    """K = 1, 200 steps per prompt, of which 80 to 84 and `drop` more accept nothing."""
    signs = [noise if i % 2 else -noise for i in range(count)]
    rounds = [alternating(80 + i % 5 + drop + sign) for i, sign in enumerate(signs)]
    return measurement(rounds, **({"name": f"drop {drop}"} | changes))


def written(path: Path, one: Measurement) -> Path:
    """The run as a file."""
    path.write_text("".join(map(line_of, (one.setup, *one.records))), encoding="utf-8")
    return path
