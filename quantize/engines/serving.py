"""How a draft is to be served, from which an engine's launch line is made in one place."""

import shlex
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is served beside what; each engine's `launch` writes it in the engine's own flags.

    Attributes:
        draft: its folder or Hub id; None = its tensors lie in the target's folder.
        target: its folder or Hub id, or a word that stands for it.
        dtype: of target and draft; None = as the engine chooses.
        context: positions that are served; None = as many as the target has.
        quantization, target_cache_dtype: that the target's launch line names; None = it names none.
        cache_dtype: of the draft's KV cache, in the engine's words; None = as the engine chooses.
        words: of the target's own launch line, that are repeated as they are.
        environment: variables that the command needs, such as NAME=1.
    """

    draft: str | None
    target: str = "TARGET"
    dtype: str | None = None
    context: int | None = None
    quantization: str | None = None
    target_cache_dtype: str | None = None
    cache_dtype: str | None = None
    words: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()

    def line(self, *parts: str) -> str:
        """A command for a shell: variables, the parts that are not empty, and the given words."""
        given = (shlex.quote(word) for word in self.words)
        return " ".join([*self.environment, *filter(None, parts), *given])


def flag(name: str, value: object) -> str:
    """A flag with its value; nothing where the value is None."""
    return "" if value is None else f"{name} {shlex.quote(str(value))}"
