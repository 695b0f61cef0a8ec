"""What is to run on a GPU, on the meta device of torch: nothing waits, and nothing is left behind.

Tensors there have no values. To read one, or to mix them with tensors of the CPU, is an error: on a
GPU the first would wait, and the second fail.
"""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from draftquant.calibration.rounding import proposal_divergence as divergence
from draftquant.calibration.rounding.latents import LatentWeight
from draftquant.calibration.rounding.learned_state import LearningSettings
from draftquant.calibration.rounding.proposal_divergence import backward_of_divergence
from draftquant.calibration.rounding.sequences import LearningSequences
from draftquant.quantize.algorithms import InputMoments, row_algorithm
from draftquant.quantize.algorithms.algorithm import Feedback
from draftquant.quantize.backends import get_backend
from draftquant.quantize.drafts import forward as draft_forward
from draftquant.quantize.layouts import get_layout
from draftquant.quantize.layouts.layout import Columns
from draftquant.quantize.numerics.number_formats import _values_on
from draftquant.quantize.stored.online_rounding import STATIC, InputRounding
from draftquant.recipes import Recipe, built_in_recipes, load_recipe
from draftquant.recipes.errors import BackendError
from draftquant.recipes.schema import Algorithm
from rounding_pairs import K, shared_pair
from test_passes import ACTIVATIONS
from torch import Tensor

META = torch.device("meta")
ROWS, COLUMNS = 128, 128
ALGORITHMS = (
    ("absmax", "nearest"),
    pytest.param("mse", "nearest", marks=pytest.mark.slow),
    pytest.param("absmax", "gptq", marks=pytest.mark.slow),
)


@pytest.fixture(autouse=True)
def no_table_of_the_meta_device() -> Iterator[None]:
    yield
    _values_on.cache_clear()


def moments() -> InputMoments:
    """Whose factor, for which the host does wait, is there."""
    found = InputMoments(torch.empty(COLUMNS, COLUMNS, device=META), META)
    found._feedback = Feedback(
        order=torch.empty(COLUMNS, dtype=torch.int64, device=META),
        factor=torch.empty(COLUMNS, COLUMNS, device=META),
    )
    return found


def computed(recipe: Recipe, algorithm: Algorithm) -> None:
    weight = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device=META)
    absmax = torch.empty(1, 1, device=META) if recipe.weights.scales_whole_matrix else None
    backend = get_backend("torch", algorithm)
    needed = moments() if backend.needs == "second_moments" else None
    block = backend.quantize(weight, recipe.weights, absmax, needed)
    for data in get_layout(recipe.layout).encode_rows("a", block, recipe.weights).values():
        assert (data.tensor if isinstance(data, Columns) else data).device == META


@pytest.mark.parametrize(("scale", "rounding"), ALGORITHMS)
def test_codes_are_computed_and_packed_where_the_weight_is(scale: str, rounding: str) -> None:
    algorithm = Algorithm(scale=scale, rounding=rounding)  # type: ignore[arg-type]
    seen = 0
    for name in built_in_recipes():
        recipe = load_recipe(name)
        try:
            get_backend("torch", algorithm).check(recipe.weights)
        except BackendError:
            continue
        computed(recipe, algorithm)
        seen += 1
    assert seen >= 5


@pytest.mark.parametrize("how", ACTIVATIONS)
def test_inputs_are_rounded_where_they_are(how: str) -> None:
    scales = {"q": torch.empty((), device=META)} if how in STATIC else {}
    rounding = InputRounding({"q": how}, scales, None)  # type: ignore[dict-item]
    assert rounding("q", torch.empty(2, 3, 128, device=META)).device == META


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "dflash"])
def test_a_step_of_learning_waits_for_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, k = shared_pair(family), K[family]
    draft, recipe = pair.loaded(), load_recipe("int4-channel")
    start = row_algorithm(dataclasses.replace(recipe.algorithm, scale="absmax", rounding="nearest"))
    latents = {
        name: LatentWeight(
            draft.weights[f"{name}.weight"], recipe.weights, start, absmax=None, device=META
        )
        for name in draft.linears
    }

    def over(own: dict[str, Tensor]) -> draft_forward.DraftForward:
        weights = {name: weight.to(META) for name, weight in draft.weights.items()} | own
        return draft.family.forward(draft.geometry, weights, lambda _name, x: x)

    rows = (range(6, 12), range(8, 14))
    sequences = LearningSequences(
        hidden=torch.empty(2, 27, draft.geometry.hidden_size, device=META),
        token_ids=torch.empty(2, 28, dtype=torch.int64, device=META),
        rows=range(6, 14),
        own=rows,
    )
    checks: list[draft_forward._Check] = []
    monkeypatch.setattr(draft_forward, "_raise_first", checks.extend)
    monkeypatch.setattr(divergence, "_wide", lambda head, hidden: head(hidden))  # no autocast there
    served = {f"{name}.weight": one.dequantized() for name, one in latents.items()}
    loss = backward_of_divergence(
        over(served), over({}), sequences,
        num_draft_tokens=k, settings=LearningSettings(), share=0.5,
    )  # fmt: skip
    assert loss.device == META
    for one in latents.values():
        assert one.codes.grad is not None
        one.keep_within_reach()
    assert checks
    assert all(fine.device == META for fine, _, _ in checks)
