"""Writes `docs/guide/bibliography.md` from `docs/references.bib`: `python -m tests.bibliography`."""

import pathlib
import re
import unicodedata

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGE = DOCS / "guide" / "bibliography.md"
ENTRY = re.compile(r"^@\w+\{(\w+),\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"^ {4}(\w+)=\{(.*?)\},$", re.MULTILINE | re.DOTALL)
ACCENTS = {"'": "\u0301", "`": "\u0300", '"': "\u0308", "^": "\u0302", "~": "\u0303"}
VENUES = {
    "Advances in Neural Information Processing Systems": "NeurIPS",
    "International Conference on Learning Representations": "ICLR",
    "International Conference on Machine Learning": "ICML",
    "International Conference on Artificial Intelligence and Statistics": "AISTATS",
    "Conference on Uncertainty in Artificial Intelligence": "UAI",
    "AAAI Conference on Artificial Intelligence": "AAAI",
    "Conference on Computer Vision and Pattern Recognition": "CVPR",
    "Conference on Empirical Methods in Natural Language Processing": "EMNLP",
    "Journal of Machine Learning Research": "JMLR",
}
HEAD = """---
description: The papers behind the functions of the library.
---

# Bibliography

The papers behind the functions, also as [BibTeX](../references.bib); the docstring of each function names its own.
[Choosing](choosing.md#what-each-method-costs) compares the methods.

"""


def entries():
    """The fields of all entries, by key."""
    text = (DOCS / "references.bib").read_text()
    return {key: {name: _plain(value) for name, value in FIELD.findall(body)} for key, body in ENTRY.findall(text)}


def page():
    """The text of the page, one item per entry."""
    return HEAD + "".join(f"- {_item(fields)}\n  {{ #{key} }}\n" for key, fields in entries().items())


def _plain(text):
    text = re.sub(r"\{?\\(['`\"^~])\{?(\w)\}?\}?", lambda m: m[2] + ACCENTS[m[1]], " ".join(text.split()))
    return unicodedata.normalize("NFC", re.sub("[{}]", "", text))


def _item(fields):
    names = [name.split()[-1] for name in fields["author"].split(" and ")]
    shown = f"{names[0]} et al." if len(names) > 2 else " and ".join(names)
    where = fields.get("journal") or fields.get("booktitle")
    return f"{shown} ({fields['year']}). [{fields['title']}]({fields['url']}). {VENUES.get(where, where)}."


if __name__ == "__main__":
    PAGE.write_text(page())
