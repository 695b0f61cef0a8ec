"""`card`: README.md of a quantized draft, for the Hub."""

from collections.abc import Sequence
from pathlib import Path


def card(
    folder: str | Path,
    *,
    gate: str | Path | None = None,
    measured: Sequence[str | Path] = (),
    base_model: str | None = None,
    license: str | None = None,
    name: str | None = None,
) -> str:
    """The model card of a folder that `quantize` wrote; nothing is written.

    Example:
        >>> text = dq.card("OUT", base_model="someone/draft", license="mit")
        >>> "base_model_relation: quantized" in text
        True

    Args:
        folder: the quantized draft.
        gate: report of the gate on it: acceptance with intervals, by category.
        measured: what `measure` wrote of servers with this draft.
        base_model: Hub id of the draft that was quantized, where that was a local folder.
        license: as the Hub calls it, where the card of the source names none.
        name: Hub id that the folder will have, for launch commands.

    Raises:
        DraftQuantError: the folder is not what was recorded, figures are of another draft, or base
            model or licence is missing.
    """
    from ...validate.card.model_card import CardRequest, model_card

    request = CardRequest(
        gate=None if gate is None else Path(gate),
        measured=tuple(map(Path, measured)),
        base_model=base_model,
        license=license,
        name=name,
    )
    return model_card(Path(folder), request)
