"""Folders whose config.json names layers of the target in one place, or in one convention, only."""

from collections.abc import Sequence

from edits import Broken, Edit, Folder

CT_FP8 = ("compressed-tensors", "fp8-channel", "fp8-token")
_KEY, _SECTION = "eagle_aux_hidden_state_layer_ids", "eagle_config"


def layers(*, nested: Sequence[int] = (), top: Sequence[int] = ()) -> Edit:
    """Ids in eagle_config, and at the top level; nothing of them where there are none."""

    def edit(folder: Folder) -> None:
        folder.config.pop(_SECTION)
        if nested:
            folder.config[_SECTION] = {_KEY: list(nested)}
        if top:
            folder.config[_KEY] = list(top)

    return edit


LAYERS = (
    Broken(
        name="layers-nested-only",
        what="layers other than the default in eagle_config only",
        formats=CT_FP8,
        edit=layers(nested=(0, 1, 2)),
        reads=(1, 2, 3),
    ),
    Broken(
        name="layers-at-the-top-only",
        what="layers other than the default at the top level only",
        formats=CT_FP8,
        edit=layers(top=(1, 2, 3)),
        reads=(1, 2, 3),
    ),
    Broken(
        name="layers-in-both-places",
        what="layers other than the default in both places, as each is read",
        formats=CT_FP8,
        edit=layers(nested=(0, 1, 2), top=(1, 2, 3)),
        reads=(1, 2, 3),
    ),
    Broken(
        name="layers-as-inputs",
        what="layers in eagle_config only, counted as TorchSpec does for vLLM",
        formats=CT_FP8,
        edit=layers(nested=(2, 3, 4)),
        family="eagle3-mla",
        reads=(2, 3, 4),
    ),
    Broken(
        name="layers-nowhere",
        what="no layers: every engine's default",
        formats=CT_FP8,
        edit=layers(),
    ),
)
