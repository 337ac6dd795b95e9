"""The Markdown table writer: layout, and text that must not break out of its cell."""

import pytest

from common.reporting.tables import markdown_table


def test_columns_are_padded_to_one_width():
    table = markdown_table(("", "loss"), [("teacher", 1.25), ("gqa", 10)])
    assert table == ("|         | loss |\n"
                     "|---------|------|\n"
                     "| teacher | 1.25 |\n"
                     "| gqa     | 10   |")


def test_right_aligned_columns_say_so_in_the_rule():
    lines = markdown_table(("name", "bytes"), [("a", 7)], align="<>").splitlines()
    assert lines == ["| name | bytes |", "|------|------:|", "| a    |     7 |"]


@pytest.mark.parametrize(("text", "cell"), [
    ("a|b", r"a\|b"),
    ("a\\|b", r"a\\\|b"),
    ("a\r\nb\n\tc", "a b c"),
    ("<!-- /scores -->", "&lt;!-- /scores -->"),
])
def test_text_stays_in_its_cell(text, cell):
    table = markdown_table(("name", "x"), [(text, "y")])
    assert table.splitlines()[2] == f"| {cell} | y |"
    assert len(table.splitlines()) == 3


def test_a_row_of_another_length_is_an_error():
    with pytest.raises(ValueError):
        markdown_table(("a", "b"), [("only one",)])
