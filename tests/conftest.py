"""Settings for every test."""

import os
import ssl
import subprocess
from pathlib import Path

import pytest
import pytest_asyncio
from browser import FLAGS
from hypothesis import settings
from require import require, require_program

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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium():
    """A browser for all tests that run in the session's event loop."""
    playwright = require("playwright.async_api")
    program = require_program("chromium")
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        await browser.close()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that it signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [require_program("openssl"), "req", "-x509", "-newkey", "ec",
         "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


@pytest.fixture
def tls(files: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    return context
