"""The corpus: text that every machine has, the sources of Python's own standard library.

Whole files are assigned to the training, gate or calibration split by a hash of their name, so
the split depends neither on the seed nor on which other files exist. This module knows text,
tokens and prompts, not models.
"""

import hashlib
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

Split = Literal["training", "gate", "calibration"]

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
# Installed packages and test suites differ between distributions of Python; code tables
# (encodings, pydoc topics) and build settings (machine paths) are not text a reader would write.
_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
    | {"pydoc_data", "config"}
)
_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")
_GATE_PERCENT = 7
_CALIBRATION_PERCENT = 4
# Enough characters for one prompt: byte-level BPE on source code makes about 3 characters a token.
_CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of the standard library; `name` is its path relative to the library."""

    name: str
    text: str

    @property
    def split(self) -> Split:
        """The split this file belongs to, a function of its name alone."""
        percentile = int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16) % 100
        if percentile < _GATE_PERCENT:
            return "gate"
        if percentile < _GATE_PERCENT + _CALIBRATION_PERCENT:
            return "calibration"
        return "training"

    @property
    def category(self) -> str:
        """Top-level package, or "modules" for a single-file module."""
        parts = PurePosixPath(self.name).parts
        return parts[0] if len(parts) > 1 else "modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A held-out prompt: `token_ids` is exactly what the tokenizer makes of `text`."""

    id: str
    category: str
    token_ids: tuple[int, ...]
    text: str


def standard_library() -> tuple[SourceFile, ...]:
    """Read the standard library's sources, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return tuple(
        SourceFile(name=name, text=(root / name).read_text(encoding="utf-8", errors="replace"))
        for name in names
        if _is_source(PurePosixPath(name))
    )


def _is_source(name: PurePosixPath) -> bool:
    return _EXCLUDED_FOLDERS.isdisjoint(name.parts) and not any(
        part.startswith(_EXCLUDED_PREFIXES) for part in name.parts
    )


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer.

    Args:
        vocab_size: number of tokens, the end-of-text token (id 0) and 256 bytes included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # transformers 5.23 leaves the constructor without types.
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """Encode texts one after the other.

    No end-of-text token is put between files: the target never learns to emit it, so every
    greedy continuation has the full length.

    Returns:
        [num_tokens] int64.
    """
    encodings = tokenizer.backend_tokenizer.encode_batch(list(texts))
    return torch.tensor([token for encoding in encodings for token in encoding.ids])


def sample_windows(
    stream: Tensor, *, count: int, length: int, generator: torch.Generator
) -> Tensor:
    """Cut `count` windows at random places of a token stream.

    Args:
        stream: [num_tokens] int64.

    Returns:
        [count, length] int64.
    """
    starts = torch.randint(len(stream) - length, (count, 1), generator=generator)
    windows: Tensor = stream[starts + torch.arange(length)]
    return windows


def held_out_prompts(
    files: Sequence[SourceFile],
    split: Split,
    tokenizer: PreTrainedTokenizerFast,
    *,
    count: int,
    length: int,
    seed: int,
) -> tuple[Prompt, ...]:
    """Draw prompts of equal length from the files of one held-out split, in turn.

    A prompt starts at a line, re-encodes to its own token ids, and its text occurs in no training
    file (standard-library modules copy passages from each other).
    """
    training_text = "\n".join(file.text for file in files if file.split == "training")
    candidates = [
        _prompts_of(file, tokenizer, length, seed) for file in files if file.split == split
    ]
    prompts: dict[tuple[int, ...], Prompt] = {}
    while len(prompts) < count and candidates:
        rounds = [(source, next(source, None)) for source in candidates]
        candidates = [source for source, prompt in rounds if prompt is not None]
        for _, prompt in rounds:
            if prompt is not None and prompt.text not in training_text:
                prompts.setdefault(prompt.token_ids, prompt)
    if len(prompts) < count:
        raise ValueError(
            f"{split} prompts of the standard library: expected {count}, got {len(prompts)}\n"
            "  fix: ask for fewer or shorter prompts"
        )
    return tuple(prompts.values())[:count]


def _prompts_of(
    file: SourceFile, tokenizer: PreTrainedTokenizerFast, length: int, seed: int
) -> Iterator[Prompt]:
    """Prompts of one file, at its lines in a random order fixed by the seed and its name."""
    lines = file.text.splitlines(keepends=True)
    order = list(range(len(lines)))
    random.Random(f"{seed} {file.name}").shuffle(order)
    for line in order:
        passage = "".join(lines[line : line + length])[: length * _CHARACTERS_PER_TOKEN]
        token_ids = tokenizer.backend_tokenizer.encode(passage).ids[:length]
        text = tokenizer.backend_tokenizer.decode(token_ids)
        reencoded = tokenizer.backend_tokenizer.encode(text).ids
        if len(token_ids) == length and reencoded == token_ids:
            yield Prompt(
                id=f"{file.name}:{line + 1}",
                category=file.category,
                token_ids=tuple(token_ids),
                text=text,
            )
