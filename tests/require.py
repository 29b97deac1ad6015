"""Modules that some tests need and the project does not."""

import importlib
import os
from types import ModuleType

import pytest


def require(name: str) -> ModuleType:
    """Return the module; where it is missing skip the test, but fail when CI=true."""
    if os.environ.get("CI") == "true":
        return importlib.import_module(name)
    module: ModuleType = pytest.importorskip(name)
    return module
