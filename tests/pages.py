"""Runs the code of a documentation page, and compares what it prints with the output that the page shows."""

import builtins
import contextlib
import io
import re
import symtable
import textwrap
import warnings

BLOCK = re.compile(r"^([ \t]*)```python\n(.*?)^\1```$(?:\n\n\1```output\n(.*?)^\1```$)?", re.MULTILINE | re.DOTALL)
TOKEN = re.compile(r"[-+]?(?<![\w.])\d+\.\d*(?:e[-+]?\d+)?|\w+|[^\w\s]")
NUMBER = re.compile(r"[-+]?\d+\.\d*(?:e[-+]?\d+)?")


def blocks(text):
    """The code blocks of a page, each with the output shown below it, or with `None`."""
    return [
        (textwrap.dedent(code), textwrap.dedent(shown) if shown else None) for _, code, shown in BLOCK.findall(text)
    ]


def undefined_names(codes):
    """The names that each of some blocks reads, and that neither it nor a block before it defines."""
    return [
        (number, sorted(names)) for number in range(len(codes)) if (names := _undefined("\n".join(codes[: number + 1])))
    ]


def _undefined(code):
    module = symtable.symtable(code, "page", "exec")
    known = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    read, scopes = set(), [module]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        read |= {
            symbol.get_name()
            for symbol in scope.get_symbols()
            if symbol.is_referenced() and (symbol.is_global() or scope is module)
        }
    return read - known - set(dir(builtins)) - {"__name__"}


def run_block(code, shown, filename, namespace):
    """Runs one block. Where the page shows an output, warnings and an exception at the end are part of it."""
    program = compile(code, filename, "exec")
    if shown is None:
        exec(program, namespace)
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(program, namespace)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    for warning in caught:
        printed.write(f"{warning.category.__name__}: {warning.message}\n")
    message = difference(printed.getvalue(), shown)
    assert message is None, f"{filename}: {message}\nprinted:\n{printed.getvalue()}\nthe page shows:\n{shown}"


def difference(printed, shown):
    """The first difference between a printed text and the one that a page shows, or `None`.

    Spaces do not matter. Numbers with a decimal point agree within 2 % or two units of their last digit, because
    compilers round differently. A page shows the first four decimals that are printed, except in arrays, where NumPy
    leaves out zeros. `...` in the page stands for any text.
    """
    tokens = TOKEN.findall(printed)
    pieces = [TOKEN.findall(piece) for piece in shown.split("...")]
    start = 0
    for i, piece in enumerate(pieces):
        last = len(tokens) - len(piece)
        starts = [start] if i == 0 else [last] if i == len(pieces) - 1 else range(start, last + 1)
        found = next((at for at in starts if start <= at <= last and _agree(tokens[at : at + len(piece)], piece)), None)
        if found is None:
            return f"`{_first_difference(tokens[start:], piece)}`" if i == 0 else f"no `{' '.join(piece)}`"
        start = found + len(piece)
    return None if start == len(tokens) else f"more is printed: `{' '.join(tokens[start:])}`"


def _agree(got, shown):
    return _first_disagreement(got, shown) is None


def _first_difference(got, shown):
    got = got + ["(nothing)"] * len(shown)
    at = _first_disagreement(got, shown)
    return f"{got[at]}` instead of `{shown[at]}"


def _first_disagreement(got, shown):
    depth = 0
    for at, (x, y) in enumerate(zip(got, shown, strict=False)):
        depth += (y == "[") - (y == "]")
        if not _token_agrees(x, y, in_array=depth > 0):
            return at
    return None


def _token_agrees(got, shown, *, in_array):
    if not (NUMBER.fullmatch(got) and NUMBER.fullmatch(shown)):
        return got == shown
    if not in_array and _decimals(shown) < min(_decimals(got), 4):
        return False
    unit = min(_unit(got), _unit(shown))
    return abs(float(got) - float(shown)) <= max(0.02 * abs(float(shown)), 2.01 * unit)


def _decimals(number):
    return len(number.partition("e")[0].partition(".")[2])


def _unit(number):
    return 10.0 ** (int(number.partition("e")[2] or 0) - _decimals(number))
