"""Tables, sections and the report: pure functions."""

import pytest

import report
from figures import Staircase
from report import Finding

FINDING = Finding(["way", "bytes"], [["/complete", "596"]], "5 prompts", ["A note."], "a model")


class TestTable:
    def test_is_aligned(self):
        lines = report.markdown_table(["a", "long name"], [["much longer", "1"], ["", "x"]])
        assert lines.splitlines() == [
            "| a           | long name |",
            "| ----------- | --------- |",
            "| much longer | 1         |",
            "|             | x         |",
        ]

    def test_every_row_has_the_headers_cells(self):
        with pytest.raises(ValueError, match="cells"):
            report.markdown_table(["a", "b"], [["1"]])


class TestSection:
    def test_holds_everything_once(self):
        text = report.section("three-ways", "What it is.", FINDING, ["2026", "`command`"])
        assert text.startswith("## three-ways\n\nWhat it is.\n\n| way ")
        assert text.endswith("\n\n- A note.\n\n*n = 5 prompts; model: a model; 2026; `command`*")

    def test_without_notes_there_is_no_gap(self):
        text = report.section("x", "T.", Finding(["a"], [["1"]], "1"), [])
        assert "\n\n\n" not in text

    def test_shows_the_figures_by_the_names_of_their_files(self):
        finding = Finding(["a"], [["1"]], "1", figures=[Staircase("stairs", "How it comes", {})])
        text = report.section("x", "T.", finding, [])
        assert "| 1 |\n\n![How it comes](stairs.svg)\n\n*n = 1" in text


class TestMerge:
    ORDER = ("one", "two", "three")

    def test_begins_with_the_introduction(self):
        merged = report.merge("", ["## two\n\nnew"], self.ORDER)
        assert merged == f"{report.INTRODUCTION}\n## two\n\nnew\n"

    def test_a_newer_run_replaces_its_section_and_leaves_the_others(self):
        old = report.merge("", ["## one\n\n1", "## two\n\n2", "## three\n\n3"], self.ORDER)
        new = report.merge(old, ["## two\n\nnewer"], self.ORDER)
        assert new == old.replace("\n2\n", "\nnewer\n")

    def test_sections_stand_in_order_and_unknown_ones_at_the_end(self):
        merged = report.merge("## gone\n\nkept\n", ["## three\n\n3", "## one\n\n1"], self.ORDER)
        assert [line for line in merged.splitlines() if line.startswith("## ")] == [
            "## one",
            "## three",
            "## gone",
        ]

    def test_merging_the_same_twice_changes_nothing(self):
        once = report.merge("", ["## one\n\n1\n### not a section"], self.ORDER)
        assert report.merge(once, ["## one\n\n1\n### not a section"], self.ORDER) == once

    def test_record_makes_the_folder_and_leaves_no_scratch(self, tmp_path):
        path = tmp_path / "results" / "report.md"
        report.record(path, ["## one\n\n1"], self.ORDER)
        report.record(path, ["## two\n\n2"], self.ORDER)
        assert path.read_text() == f"{report.INTRODUCTION}\n## one\n\n1\n\n## two\n\n2\n"
        assert list(path.parent.iterdir()) == [path]

    def test_files_are_written_beside_the_report(self, tmp_path):
        path = tmp_path / "results" / "report.md"
        report.record(path, ["## one\n\n1"], self.ORDER, {"timeline.json": "{}\n"})
        assert (tmp_path / "results" / "timeline.json").read_text() == "{}\n"
        assert len(list(path.parent.iterdir())) == 2


class TestNumbers:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(None, "n/a"), (0, "0 ms"), (0.1304, "130 ms"), (1, "1.00 s"), (4.678, "4.68 s")],
    )
    def test_seconds(self, value, text):
        assert report.seconds(value) == text

    @pytest.mark.parametrize(("value", "text"), [(0.9949, "0.99x"), (1.2, "1.20x"), (5.38, "5.4x")])
    def test_times(self, value, text):
        assert report.times(value) == text

    @pytest.mark.parametrize(
        ("values", "text"), [([10, 10], "10"), ([11, 10, 1000], "10 to 1,000")]
    )
    def test_span(self, values, text):
        assert report.span(values) == text


def test_the_machine_and_versions_are_told():
    assert "core" in report.machine()
    assert report.versions().startswith("Python 3.")
