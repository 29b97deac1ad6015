"""Settings for every test."""

from hypothesis import settings

# A law is not judged by the clock: a busy machine would fail it.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
