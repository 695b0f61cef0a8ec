"""Fixtures that several test modules share."""

import importlib.util
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from everyday import (  # noqa: F401 - hooks
    pytest_addoption,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_runtest_protocol,
    pytest_sessionfinish,
)
from hypothesis import HealthCheck, Phase, settings
from told import _told  # noqa: F401 - for every test

pytest_plugins = ["workers"]

os.environ["DRAFTQUANT_CACHE"] = ""  # nothing of one test, or of the tester, reaches another
os.environ["TZ"] = "Here-5:45"  # where no clock shows the same hour or minute as that of UTC
time.tzset()

settings.register_profile(
    "suite",
    max_examples=100,
    derandomize=True,
    deadline=None,  # tests measure their own time
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "fuzz",
    parent=settings.get_profile("suite"),
    max_examples=int(os.environ.get("DRAFTQUANT_FUZZ_EXAMPLES", "2000")),
    derandomize=False,
    phases=(Phase.generate, Phase.shrink),
    print_blob=True,
)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output as in a pipe, whatever the terminal of the tester is like."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def running() -> Iterator[Any]:
    from vllm_server import VLLMServer, served

    with served(VLLMServer()) as found:
        yield found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny tensors, which more threads only make wait, and for sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def float64_on_one_thread(one_thread: None) -> Iterator[None]:
    """Float64 inside transformers too; one thread, as the tensors are tiny."""
    from reference_draft import transformers_in_float64  # imports transformers: not for every test

    del one_thread
    with transformers_in_float64():
        yield


@pytest.fixture(scope="session")
def quark_imported() -> None:
    """For tests that run Quark themselves: imported as the backend does, with its build guarded."""
    from draftquant.quantize.backends.quark_backend import quark_process_state

    if importlib.util.find_spec("quark") is not None:
        with quark_process_state():
            pass
