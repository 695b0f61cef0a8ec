"""SPEED-Bench by Model-Optimizer's `examples/specdec_bench`: its answers, one to a line.

Source: NVIDIA/Model-Optimizer, `examples/specdec_bench`, commits 1cb88ef9 and 55bcd7b8:
`metrics/specbench.py` and `metrics/acceptance_rate.py` (`_format_write_output`) write
`specbench_responses.jsonl` and `responses.jsonl` with `acceptance_lengths`, tokens of every verify
step with the bonus token, the first if it is prefill's and the last, which the end may cut, left
out; `utils.py` (`dump_env`) writes `configuration.json`, which has K. Older ones lack both.
"""

from collections.abc import Mapping
from pathlib import Path

from ...recipes.errors import short
from ..errors import MeasureError
from ..measure.protocols.answer_fields import (
    AnswerProblem,
    Fields,
    checked_draft_tokens,
    objects,
    whole,
    wholes,
)
from .foreign_files import lines_of, object_in, optional, reading, string
from .foreign_measurement import ForeignMeasurement, ForeignRequest, sha256_of

_NEWER = (
    "run examples/specdec_bench of Model-Optimizer of 2026-07 or later with --save_dir, which keeps"
    " acceptance_lengths of each request"
)
_COMPARED = ("dataset", "dataset_path", "output_length", "ignore_eos", "completions", "engine",
             "engine_version", "temperature")  # fmt: skip


def claims(first: object) -> bool:
    """Whether a first line is an answer of this tool."""
    keys = {"question_id", "turns", "choices"}
    return isinstance(first, Mapping) and keys <= first.keys()


def read(path: Path) -> ForeignMeasurement:
    """All answers of one run.

    Raises:
        MeasureError: an answer is none, failed or has no verify steps, or K is not known.
    """
    beside = path.with_name("configuration.json")
    if not beside.exists():
        raise MeasureError(
            beside, "is not there: it has K (draft_length), which the answers do not", fix=_NEWER
        )
    configuration = object_in(beside)
    with reading(str(beside), _NEWER):
        most = checked_draft_tokens(whole(configuration, "draft_length"), "draft_length")
    requests = []
    for where, line in lines_of(path):
        with reading(where, _NEWER):
            requests.append(_request(line, most))
    settings = {key: configuration[key] for key in _COMPARED if configuration.get(key) is not None}
    return ForeignMeasurement(
        name=f"{path.parent.name}/{path.name}",
        tool="specdec_bench (SPEED-Bench)",
        engine=str(configuration.get("engine") or ""),
        version=str(configuration.get("engine_version") or ""),
        model=Path(str(configuration.get("model_dir") or "")).name,
        num_draft_tokens=most,
        settings=settings,
        paired_by="the turns of the prompt",
        last_step_left_out=True,
        to_keep_outputs="specdec_bench always does",
        requests=tuple(requests),
    )


def _request(line: Fields, most: int) -> ForeignRequest:
    if line.get("error"):
        raise AnswerProblem(f"error: the request failed: {short(line.get('error_message'))}")
    name = line.get("question_id")
    if not isinstance(name, str | int):
        raise AnswerProblem(f"question_id: expected text or a number, got {short(name)}")
    lengths = wholes(line, "acceptance_lengths")
    if lengths and not 1 <= min(lengths) <= max(lengths) <= most + 1:
        raise AnswerProblem(
            f"acceptance_lengths: expected 1 to {most + 1} for draft_length = {most}, got"
            f" {min(lengths)} to {max(lengths)}"
        )
    answers = objects(line, "raw_choices" if "raw_choices" in line else "choices")
    turns = [one for answer in answers for one in _texts(answer)]
    return ForeignRequest(
        id=str(name),
        category=optional(line, "category", string) or "all",
        prompt_sha256=sha256_of([line.get("system_prompt"), _texts(line)]),
        num_output_tokens=_num_tokens(line),
        output="\0".join(turns),
        histogram=tuple(lengths.count(j + 1) for j in range(most + 1)),
    )


def _num_tokens(line: Fields) -> int | None:
    """Of a single turn, where token ids are kept."""
    ids = line.get("output_token_ids")
    alone = ids[0] if isinstance(ids, list) and len(ids) == 1 else None
    turns = alone.get("turns") if isinstance(alone, Mapping) else None
    known = isinstance(turns, list) and len(turns) == 1 and isinstance(turns[0], list)
    return len(turns[0]) if known and turns is not None else None


def _texts(fields: Fields) -> list[str]:
    values = fields.get("turns")
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise AnswerProblem(f"turns: expected a list of texts, got {short(values)}")
    return values
