"""A tokenizer by what tells two apart: its tokens and merges, not its file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...recipes.brief import counted
from ...recipes.errors import reason
from ...recipes.regular_file import read_text
from ...recipes.strict_json import JsonProblem, parse_json
from ..errors import CheckpointError
from ..files.checkpoint import read_json_object

_FILE, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """One tokenizer.json, and the chat template beside it.

    Attributes:
        tokens: id -> token, of vocabulary and added tokens.
        merges: digest of the merges; of other models than BPE of what else they say.
        template: digest of the chat template; None = there is none.
    """

    tokens: Mapping[int, str]
    merges: str
    template: str | None

    @classmethod
    def read(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a folder; None where it has no tokenizer.json.

        Raises:
            CheckpointError: a file is not readable as JSON.
        """
        if not (folder / _FILE).exists():
            return None
        value = _object(folder / _FILE)
        model = value.get("model")
        model = model if isinstance(model, Mapping) else {}
        rest = {key: part for key, part in model.items() if key != "vocab"}
        return cls(
            tokens={**_listed(model.get("vocab")), **_added(value.get("added_tokens"))},
            merges=_digest(rest),
            template=_template(folder),
        )

    @property
    def size(self) -> int:
        """Token ids lie below it."""
        return max(self.tokens, default=-1) + 1

    def difference(self, other: "Tokenizer") -> str | None:
        """Where this tokenizer differs from another; None = in nothing that changes token ids."""
        if self.tokens != other.tokens:
            ids = self.tokens.keys() | other.tokens.keys()
            unlike = sorted(i for i in ids if self.tokens.get(i) != other.tokens.get(i))
            first = unlike[0]
            return (
                f"other tokens stand at {counted(len(unlike), 'id')}; the first is {first:,},"
                f" {_said(self.tokens.get(first))} here and {_said(other.tokens.get(first))} in the"
                " target"
            )
        return None if self.merges == other.merges else "equal tokens, but other merges"


def _object(path: Path) -> Mapping[str, Any]:
    """A tokenizer.json, which may be larger than any config."""
    again = "download the tokenizer again, or remove it"
    try:
        value = parse_json(read_text(path, _MOST_BYTES))
    except (OSError, JsonProblem) as exc:
        raise CheckpointError(path, f"not readable as JSON: {reason(exc)}", fix=again) from exc
    if not isinstance(value, dict):
        what = f"expected a JSON object, got {type(value).__name__}"
        raise CheckpointError(path, what, fix=again)
    return value


def _listed(vocab: object) -> dict[int, str]:
    """BPE and WordPiece map tokens to ids, Unigram lists tokens with their scores."""
    if isinstance(vocab, Mapping):
        return {i: token for token, i in vocab.items() if type(i) is int}
    rows = vocab if isinstance(vocab, list) else []
    return {i: str(row[0]) for i, row in enumerate(rows) if isinstance(row, list) and row}


def _added(tokens: object) -> dict[int, str]:
    rows = [row for row in tokens if isinstance(row, Mapping)] if isinstance(tokens, list) else []
    return {row["id"]: str(row.get("content")) for row in rows if type(row.get("id")) is int}


def _template(folder: Path) -> str | None:
    if (folder / _TEMPLATE).exists():
        return _digest(read_text(folder / _TEMPLATE))
    if not (folder / _CONFIG).exists():
        return None
    said = read_json_object(folder / _CONFIG, "download it again").get("chat_template")
    return None if said is None else _digest(said)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _said(token: str | None) -> str:
    return "no token" if token is None else repr(token)
