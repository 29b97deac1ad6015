"""What a test needs beyond the standard library: skipped where absent, a failure under CI."""

import importlib
import os
import shutil
from types import ModuleType
from typing import NoReturn

import pytest


def require(module: str) -> ModuleType:
    """Import `module`, or skip the test that asks; with CI=true its absence is a failure."""
    if os.environ.get("CI") != "true":
        return pytest.importorskip(module)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.fail(f"{module} is missing under CI: {error}")


def require_program(name: str) -> str:
    """Find the program `name`, or skip the test that asks; with CI=true absence is a failure."""
    path = shutil.which(name)
    if path is None:
        absent(f"the program {name} is not installed")
    return path


def absent(why: str) -> NoReturn:
    """Skip the test that asks, or fail it with CI=true: there all that it needs can be had."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
