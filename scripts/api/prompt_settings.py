"""`ChosenPrompts`: which prompts of a file, or of a data set of the Hub, several verbs take."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...recipes.bounds import AT_LEAST_1
from .arguments import AnyPath
from .option import Option
from .settings import Settings

if TYPE_CHECKING:
    from ...calibration.prompts.prompt_choice import PromptChoice
    from ...calibration.prompts.prompt_file import PromptEncoder
    from ...calibration.prompts.prompt_source import ReadPrompts

_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class ChosenPrompts(Settings):
    """Which of the prompts are taken."""

    prompts_split: Annotated[
        str | None,
        Option("split of a Hub data set, and its config if several", "[CONFIG/]SPLIT"),
    ] = None
    prompts_column: Annotated[
        str | None,
        Option("column that holds the prompts, if its name is not a usual one", "NAME"),
    ] = None
    num_prompts: Annotated[
        int | None,
        Option("draw so many prompts at random (default: take all)", "PROMPTS", bounds=AT_LEAST_1),
    ] = None
    prompts_seed: Annotated[
        int,
        Option("seed of --num-prompts (default 0); a larger draw contains a smaller one", "SEED"),
    ] = 0

    @property
    def choice(self) -> "PromptChoice":
        """The same, for who reads them."""
        from ...calibration.prompts.prompt_choice import PromptChoice

        return PromptChoice(
            split=self.prompts_split,
            column=self.prompts_column,
            num_prompts=self.num_prompts,
            seed=self.prompts_seed,
        )

    def read_prompts(self, prompts: AnyPath, encoder: "PromptEncoder") -> "ReadPrompts":
        """Read the prompts, and warn of rows that are none.

        Args:
            prompts: a file, or owner/name[@revision] on the Hub.
            encoder: of the target.

        Raises:
            PromptError: see `prompts_of`.
        """
        from ...calibration.prompts.prompt_source import prompts_of

        read = prompts_of(Path(prompts), encoder, self.choice)
        if read.dataset is not None:
            self.listener.note(f"{len(read.prompts)} prompts of {read.dataset}")
        if over := read.passed_over:
            named = "; ".join(over[:_MOST_NAMED])
            self.listener.warning(f"{prompts}: {len(over)} row(s) hold no prompt: {named}")
        return read
