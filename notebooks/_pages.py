"""Writes the pages of the notebooks and the gallery of examples: `python notebooks/_pages.py [NAME ...]`.

`quickstart` is the page `docs/guide/start.md`, every other notebook a page of `docs/examples`. A notebook runs only if
its code is not that of its page; `--run` runs it in any case. A page shows the first paragraph of its notebook, then
the figure `NAME.png` that the notebook saves, then all cells. Figures named `NAME-2.png`, `NAME-3.png`, ... are shown
below the cells that save them. Marks of a cell: `# %% alt="..."` is the alternative text of its figure, and
`# %% fold="..."` folds its code under this title; its outputs and figures are shown. It needs the extras `test` and
`docs`.
"""

import argparse
import ast
import html
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
import tokenize

import jupytext
from PIL import Image

NOTEBOOKS = pathlib.Path(__file__).parent
DOCS = NOTEBOOKS.parent / "docs"
EXAMPLES = DOCS / "examples"
IMAGES = EXAMPLES / "images"
START = "quickstart"
COLUMNS, PIXELS, BYTES = 88, 1280, 120_000
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```\n(?:\n```output\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r'"(\w+(?:-\d+)?\.png)"')
LEFT_OUT = ("JAXTYPING_", "PYTEST_", "XLA_FLAGS")  # a notebook runs with the defaults of the library
GALLERY = """---
description: Ten worked examples, from the data to the figure, each with its code, outputs, figures and limits.
---

# Examples

Each is a program and a notebook: `notebooks/NAME.py` and `notebooks/NAME.ipynb`. `pip install -e '.[examples]'`
installs what they import; `python notebooks/NAME.py` runs one in about a minute on two CPU cores, without a network,
and draws its figures in `notebooks/figures/`. New here? Begin with [Start here](../guide/start.md).

<div class="grid cards gallery">
<ul>
{}
</ul>
</div>
"""


def scripts():
    return sorted(NOTEBOOKS.glob("[!_]*.py"))


def page_of(name):
    return DOCS / "guide" / "start.md" if name == START else EXAMPLES / f"{name}.md"


def cells_of(name):
    """The cells that a page shows: all but the import hook, and what is said about it."""
    cells = jupytext.read(NOTEBOOKS / f"{name}.py").cells
    return [cell for cell in cells if not cell.source.startswith(("%", "In a notebook, these two lines"))]


def code_of(name):
    return [cell.source for cell in cells_of(name) if cell.cell_type == "code"]


def read_page(name):
    """Code and output of every cell, as the page shows them."""
    text = page_of(name).read_text() if page_of(name).exists() else ""
    return [(textwrap.dedent(code), output or None) for _, code, output in BLOCK.findall(text)]


def is_same(code, other):
    """Whether two programs differ in their layout alone."""
    return ast.dump(ast.parse(code)) == ast.dump(ast.parse(other)) and comments(code) == comments(other)


def comments(code):
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def is_run(name):
    """Whether the outputs on the page are those of the script's code."""
    code, shown = code_of(name), read_page(name)
    return len(code) == len(shown) and all(is_same(a, b) for a, (b, _) in zip(code, shown, strict=True))


def run(name, folder):
    """Runs a notebook in a folder, and returns code and output of every cell."""
    from nbclient import NotebookClient

    notebook = jupytext.read(NOTEBOOKS / f"{name}.py")
    env = {key: value for key, value in os.environ.items() if not key.startswith(LEFT_OUT)} | {"JAX_PLATFORMS": "cpu"}
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": folder}}).execute(env=env)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and not cell.source.startswith("%")]
    return [(cell.source, output_of(cell)) for cell in cells]


def output_of(cell):
    """What a cell prints to its standard output, in lines that fit the page."""
    streams = [output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout"]
    lines = "".join(streams).rstrip().splitlines()
    wrapped = (
        textwrap.wrap(line, COLUMNS, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2))
        if len(line) > COLUMNS
        else [line.rstrip()]
        for line in lines
    )
    text = "\n".join(line for part in wrapped for line in part).strip("\n")
    return f"{text}\n" if text else None


def in_columns(code):
    command = [sys.executable, "-m", "ruff", "format", "--config", str(DOCS / "ruff.toml"), "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True).stdout


def keep_figure(path):
    """The figure in as many colours and pixels as a page can load quickly."""
    figure = Image.open(path).convert("RGB")
    figure.thumbnail((PIXELS, 2 * PIXELS), Image.Resampling.LANCZOS)
    IMAGES.mkdir(parents=True, exist_ok=True)
    for colours in (256, 128, 64, 32, 16):
        few = figure.quantize(colours, dither=Image.Dither.NONE)
        few.save(IMAGES / path.name, optimize=True)
        if (IMAGES / path.name).stat().st_size <= BYTES:
            return
    raise ValueError(f"{path.name} is larger than {BYTES} bytes")


def size_of(file):
    """Two pixels of the file are one of the page."""
    with Image.open(IMAGES / file) as figure:
        return f'width="{figure.width // 2}" height="{figure.height // 2}"'


def figure(file, alt, name):
    folder = os.path.relpath(IMAGES, page_of(name).parent)
    return f"![{alt}]({folder}/{file}){{ {size_of(file)} }}"


def fold(title, text):
    return f'??? note "{title}"\n\n' + textwrap.indent(text, "    ")


def block(cell, code, output, name):
    """A cell of code, what it prints, and the figures that it saves, but for the first of the page."""
    text = f"```python\n{code.strip()}\n```\n"
    if "fold" in cell.metadata:
        text = fold(cell.metadata["fold"], text)
    text += f"\n```output\n{output}```\n" if output else ""
    more = [file for file in SAVED.findall(code) if file != f"{name}.png"]
    return text + "".join(f"\n{figure(file, cell.metadata['alt'], name)}\n" for file in more)


def introduction(name):
    """Title, first paragraph and the rest of the first cell."""
    title, _, rest = cells_of(name)[0].source.partition("\n")
    first, _, rest = rest.strip().partition("\n\n")
    return title.removeprefix("# "), first, rest


def plain(text):
    """Markdown without its marks, in one line."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"[*`$]", "", text).split())


def render(name, code):
    """The page of a notebook, from its script and code and output of its cells."""
    title, first, rest = introduction(name)
    description = json.dumps(re.split(r"(?<=[.?!]) ", plain(first))[0], ensure_ascii=False)
    alt = next(cell.metadata["alt"] for cell in cells_of(name) if f'"{name}.png"' in cell.source)
    begin = f"---\ndescription: {description}\n---\n\n# {title}\n\n{first}\n\n{figure(f'{name}.png', alt, name)}\n"
    remaining = iter(code)
    parts = [begin, f"{rest}\n"] if rest else [begin]
    for cell in cells_of(name)[1:]:
        parts.append(f"{cell.source}\n" if cell.cell_type == "markdown" else block(cell, *next(remaining), name))
    return "\n".join(parts)


def card(name):
    title, first, _ = introduction(name)
    sentence = re.split(r"(?<=[.?!]) ", plain(first))[0]
    picture = f'<img src="images/{name}.png" alt="" {size_of(f"{name}.png")} loading="lazy">'
    text = f"<strong>{html.escape(title)}</strong></a><br>{html.escape(sentence)}"
    return f'<li><a href="{name}/">{picture}{text}</li>'


def gallery():
    """The page of all examples, in the order of the navigation."""
    order = re.findall(r"examples/(\w+)\.md", (NOTEBOOKS.parent / "mkdocs.yml").read_text())
    return GALLERY.format("\n".join(card(name) for name in order if name != "index"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="*", default=[path.stem for path in scripts()])
    parser.add_argument("--run", action="store_true", help="run the notebook also if its code is that of its page")
    arguments = parser.parse_args()
    for name in arguments.name:
        if arguments.run or not is_run(name):
            with tempfile.TemporaryDirectory() as folder:
                code = [(in_columns(code), output) for code, output in run(name, folder)]
                for path in sorted(pathlib.Path(folder).glob("figures/*.png")):
                    keep_figure(path)
        else:
            code = read_page(name)
        page_of(name).write_text(render(name, code))
        print(page_of(name).relative_to(NOTEBOOKS.parent))
    (EXAMPLES / "index.md").write_text(gallery())


if __name__ == "__main__":
    main()
