"""`Step`: one step of an acceptance, and how it calls its verb."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .accept_inputs import hash_of
from .settings import Settings
from .verb import Verb

if TYPE_CHECKING:
    from ...validate.acceptance.acceptance import StepFound
    from ...validate.acceptance.journal import Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        name: of the verb, and on what. what: it looks at, for who waits.
        output: the file or folder that it makes, by its name.
        inputs: what its output depends on; asked when the steps before are done.
        run: makes the output at a path, whole or not at all.
        found: what an output says.
        hash_of: identity of an output, by which one that was edited is known.
        ends: a FAIL ends the acceptance, as what follows would cost more than it could say.
    """

    name: str
    what: str
    output: str
    inputs: "Callable[[], Inputs]"
    run: Callable[[Path], object]
    found: "Callable[[Path], StepFound]"
    hash_of: Callable[[Path], str] = hash_of
    ends: bool = False


def carried_out(verb: "Verb[..., Any, Any]", settings: Settings) -> Any:
    """A verb by settings, which are looked at as those of a command line are."""
    settings.check()
    return verb.run(settings)
