"""Settings for every test."""

import os

import pytest
from hypothesis import settings
from require import require

# Coroutines never awaited, slow callbacks, calls from the wrong thread: reported everywhere.
os.environ["PYTHONASYNCIODEBUG"] = "1"

# A law is not judged by the clock: a busy machine would fail it.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def real_model():
    """The default model, loaded once for all tests that are marked `model`."""
    require("torch")
    import lm

    return lm.LanguageModel.load()
