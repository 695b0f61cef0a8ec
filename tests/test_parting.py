"""How near a tie the target's choice was: who is asked first, and what each of them says."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftquant.calibration.traces.target_tables import FINAL_NORM, HEAD, SharedTables
from draftquant.validate.served.choice_gap import choice_gap
from handmade_measurements import record
from test_reconcile import trace

NONE = SharedTables({})


def folder(kind: str = "aux", layers: tuple[int, ...] = (0, 3)) -> Any:
    features = SimpleNamespace(kind=kind, aux_layer_ids=layers, width=4)
    return SimpleNamespace(
        manifest=SimpleNamespace(features=features, target=SimpleNamespace(num_layers=4))
    )


def test_the_recorded_log_probabilities_are_asked_first() -> None:
    told = trace(
        (0, 1),
        top_token_ids=torch.tensor([[0, 1], [1, 8]]),
        top_logprobs=torch.tensor([[-0.1, -3.0], [-0.5, -0.75]]),
    )
    other = dataclasses.replace(record([0]), token_ids=(0, 8), top_gap=(9.0, 9.0))
    assert choice_gap(other, told, 1, folder(), NONE) == 0.25
    rarer = dataclasses.replace(other, token_ids=(0, 99))
    assert choice_gap(rarer, told, 1, folder(), NONE) == 0.25  # at least: it is none of the two


def test_the_server_is_asked_where_nothing_is_recorded() -> None:
    other = dataclasses.replace(record([0]), token_ids=(0, 8), top_gap=(9.0, 0.3))
    assert choice_gap(other, trace((0, 1)), 1, folder(), NONE) == 0.3


def test_the_head_says_it_of_the_last_layers_output() -> None:
    """Of two layers of width 2 the last one's is [3, 3], normalized [1, 1]: rows sum to logits.

    Of norms that multiply by the weight or by 1 + weight, the one that says the recorded token.
    """
    head = torch.zeros(9, 2)
    head[1], head[8] = torch.tensor([2.0, 1.0]), torch.tensor([2.0, 0.5])
    features = torch.tensor([[5.0, 5.0, 3.0, 3.0]] * 2)
    other = dataclasses.replace(record([0]), token_ids=(0, 8))
    for norm, expected in ((torch.ones(2), 0.5), (torch.full((2,), -0.1), 0.45)):
        tables = SharedTables({HEAD: lambda: head, FINAL_NORM: lambda norm=norm: norm})
        found = choice_gap(other, trace((0, 1), features=features), 1, folder(), tables)
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "layers", "tables"),
    [("fused", (0, 3), True), ("aux", (0, 2), True), ("aux", (0, 3), False)],
)
def test_nobody_knows(kind: str, layers: tuple[int, ...], tables: bool) -> None:
    given = {HEAD: lambda: torch.zeros(9, 2), FINAL_NORM: lambda: torch.ones(2)} if tables else {}
    other = dataclasses.replace(record([0]), token_ids=(0, 8))
    assert choice_gap(other, trace((0, 1)), 1, folder(kind, layers), SharedTables(given)) is None
