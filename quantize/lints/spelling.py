"""Keys of config.json that are no keys, but nearly: what they say is read by nobody."""

from collections.abc import Iterator

from ..drafts import Draft
from ..drafts.config_keys import near_key
from ..drafts.lint import Lint


def misspelt_keys(draft: Draft) -> Iterator[Lint]:
    """A key beside which the right one is absent: its value is not read by anything.

    Source: no engine refuses a key that it does not know (`PretrainedConfig` keeps all of them).
    """
    config = draft.checkpoint.config
    found = {key: near for key in config if (near := near_key(key, config))}
    if found:
        yield Lint(
            name="misspelt-key",
            level="warning",
            cause=f"nothing reads {', '.join(map(repr, found))} of config.json",
            remedy="if that is what is meant, rename "
            + ", ".join(f"{key!r} to {near!r}" for key, near in found.items()),
        )
