"""Fixtures that several test modules share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def float64_on_one_thread() -> Iterator[None]:
    """Float64 inside transformers too; one thread, as the tensors are tiny."""
    from reference_draft import transformers_in_float64  # imports transformers: not for every test

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with transformers_in_float64():
        yield
    torch.set_num_threads(before)
