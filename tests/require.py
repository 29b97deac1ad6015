"""What a test needs beyond the standard library: skipped where absent, a failure under CI."""

import importlib
import os
from types import ModuleType

import pytest


def require(module: str) -> ModuleType:
    """Import `module`, or skip the test that asks; with CI=true its absence is a failure."""
    if os.environ.get("CI") != "true":
        return pytest.importorskip(module)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.fail(f"{module} is missing under CI: {error}")
