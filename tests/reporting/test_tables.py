"""Markdown as HTML: what the Markdown shows, whatever is in a cell."""

from xml.etree import ElementTree

from common.reporting.tables import as_html, markdown_table

ODD = ["a|b", "back\\slash", "<script>", "&amp; & &lt;", "ends in \\", "||"]


def test_tables_become_tables_and_all_else_paragraphs():
    rows = [[text, number] for number, text in enumerate(ODD)]
    parts = ["Some <i>", markdown_table(["", "n"], rows, "<>"), "| **x** | *y* |\n|---|--:|\n| * | **b |"]
    markdown = "\n\n".join(parts)
    page = ElementTree.fromstring(f"<body>{as_html(markdown)}</body>")
    assert page.find("p").text == "Some <i>"
    first, second = ([["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
                     for table in page.iter("table"))
    shown = [text.replace("&amp;", "&").replace("&lt;", "<") for text in ODD]  # Markdown has HTML's entities
    assert first == [["", "n"], *([text, str(number)] for number, text in enumerate(shown))]
    assert second == [["x", "y"], ["*", "**b"]]
    assert [cell.get("class") for cell in page.find(".//tr")] == [None, "number"]
    assert [page.findall(f".//{tag}")[0].text for tag in ("strong", "em")] == ["x", "y"]
