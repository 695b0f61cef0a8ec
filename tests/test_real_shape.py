"""Generated drafts of real shapes: small ones, byte for byte."""

import pytest

pytestmark = pytest.mark.slow
