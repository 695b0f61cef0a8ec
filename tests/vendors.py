"""Marks of tests that run a vendor's own toolkit.

./scripts/test installs both and sets DRAFTQUANT_REQUIRE_VENDORS: there an absent one is an error.
"""

import importlib.util
import os

import pytest


def needs(toolkit: str) -> pytest.MarkDecorator:
    """Skip without the package "quark" or "modelopt"; fail where it is required."""
    missing = importlib.util.find_spec(toolkit) is None
    if missing and os.environ.get("DRAFTQUANT_REQUIRE_VENDORS"):
        raise RuntimeError(f"{toolkit} is not installed, and DRAFTQUANT_REQUIRE_VENDORS is set")
    return pytest.mark.skipif(missing, reason=f"{toolkit} is not installed")
