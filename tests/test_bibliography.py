"""Every paper that the library cites is in `references.bib` once, and every entry is cited."""

import re

from .bibliography import DOCS, PAGE, entries, page

PACKAGE = DOCS.parent / "eqx_ensemble"
ENTRIES = entries()
CITATION = re.compile(r"^( *)\?\?\? cite\n((?:\1    .*\n)+)", re.MULTILINE)
LINK = re.compile(r"\]\((https?://(?:[^\s()]|\([^\s()]*\))+)\)")
IN_DOCSTRINGS = {
    url
    for path in PACKAGE.rglob("*.py")
    for _, text in CITATION.findall(path.read_text())
    for url in LINK.findall(text)
}
IN_THE_LIST = set(re.findall(r"bibliography\.md#(\w+)", (DOCS / "guide" / "choosing.md").read_text()))


def test_every_cited_paper_is_an_entry():
    assert IN_DOCSTRINGS - {fields["url"] for fields in ENTRIES.values()} == set()
    assert IN_THE_LIST - set(ENTRIES) == set()
    assert len(IN_DOCSTRINGS) > 100


def test_every_entry_is_cited_and_complete():
    assert {key for key in ENTRIES if key not in IN_THE_LIST and ENTRIES[key]["url"] not in IN_DOCSTRINGS} == set()
    assert all({"author", "title", "year", "url"} <= set(fields) for fields in ENTRIES.values())


def test_entries_are_sorted_and_differ():
    text = (DOCS / "references.bib").read_text()
    assert list(ENTRIES) == sorted(ENTRIES)
    assert len(ENTRIES) == text.count("@") == len({fields["url"] for fields in ENTRIES.values()})


def test_the_page_is_current():
    assert PAGE.read_text() == page(), "run `python -m tests.bibliography`"
