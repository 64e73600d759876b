"""An extension of griffe: what docstrings write for Sphinx, written for the site.

Roles that name an object become links where the site has it. Formulas become HTML, so that a page
needs no script to show them. An entry for several arguments becomes one for each. Members that
``internal_names.py`` lists are not shown.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

# griffe loads this file by its path, without a package to import from.
INTERNAL: dict[str, str] = runpy.run_path(str(Path(__file__).with_name("internal_names.py")))[
    "INTERNAL"
]

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`([\w.]+)`")
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.+\n(?:\1 +.+\n)*)", re.M)
MATH = re.compile(r":math:`([^`]+)`|^( *)\.\. math:: *(.+)$", re.M)
GREEK = "alpha beta gamma delta epsilon eta theta lambda mu pi rho sigma tau phi omega"
OTHERS = "Phi partial sum prod cdot odot times pm le ge ne in infty dots to lfloor rfloor"
SYMBOLS = {
    **dict(zip(GREEK.split(), "αβγδεηθλμπρστφω")),
    **dict(zip(OTHERS.split(), "Φ∂∑∏·⊙×±≤≥≠∈∞…→⌊⌋")),
    **{name: name for name in ("cos", "exp", "log", "max", "min", "sin", "tanh")},
    **dict.fromkeys((",", " "), " "),
    "quad": "\N{EM SPACE}",
}


class _Formula:
    """Reads the LaTeX of a formula from left to right."""

    def __init__(self, latex: str) -> None:
        self.latex = latex
        self.tokens = re.findall(r"\\[a-zA-Z]+|\\.|\s+|.", latex)

    def html(self, end: str = "") -> str:
        """What stands before ``end``."""
        out = ""
        while self.tokens and self.tokens[0] != end:
            out += self._next()
        if end:
            self._expect(end)
        return out

    def _expect(self, token: str) -> None:
        if not self.tokens or self.tokens.pop(0) != token:
            raise ValueError(f"{token!r} is missing in {self.latex!r}")

    def _next(self) -> str:
        token = self.tokens.pop(0)
        if token == "{":
            return self.html("}")
        if token in ("^", "_"):
            tag = "sup" if token == "^" else "sub"
            return f"<{tag}>{self._next()}</{tag}>"
        if not token.startswith("\\"):
            return {"<": "&lt;", ">": "&gt;", "&": "&amp;", "*": "&#42;"}.get(token, token)
        name = token[1:]
        if name in ("mathrm", "mathbf", "text", "operatorname"):
            return f"<span>{self._argument()}</span>"
        if name == "sqrt":
            return f"√({self._argument()})"
        if name == "frac":
            return f"({_in_parentheses(self._argument())} / {_in_parentheses(self._argument())})"
        if name in ("left", "right"):
            return ""
        if name not in SYMBOLS:
            raise ValueError(f"{token} of {self.latex!r} is no name in docs/docstrings.py")
        return SYMBOLS[name]

    def _argument(self) -> str:
        self._expect("{")
        return self.html("}")


def _in_parentheses(html: str) -> str:
    single = re.fullmatch(r"\w+|√\([^()]*(\([^()]*\))?[^()]*\)", html)
    return html if single else f"({html})"


def formula(latex: str) -> str:
    """A formula as HTML.

    Raises:
        ValueError: it has a command that is not among ``SYMBOLS``, or a brace that is not closed.
    """
    html = re.sub(" +", " ", _Formula(latex).html())
    return f'<span class="formula">{html}</span>'


def _path(obj: griffe.Object, name: str) -> str:
    """The full path of what a docstring of ``obj`` calls ``name``."""
    if name.startswith("opfuser."):
        return name
    scope: Any = obj
    while scope is not None:
        first = name.partition(".")[0]
        if first in scope.all_members:
            return f"{scope.path}.{name}"
        scope = scope.parent
    return f"opfuser.{name}"


def separated(text: str) -> str:
    """``text`` with an entry for each of several arguments that share one: ``a, b: of both``."""

    def entries(found: re.Match[str]) -> str:
        indent, names, said = found.groups()
        return "".join(f"{indent}{name}: {said}" for name in names.split(", "))

    return SEVERAL.sub(entries, text + "\n")


def readable(obj: griffe.Object, text: str) -> str:
    """The docstring ``text`` of ``obj`` without roles and directives."""

    def link(role: re.Match[str]) -> str:
        shown = role[1].removeprefix("opfuser.")
        path = _path(obj, role[1])
        return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'

    text = ROLE.sub(link, separated(text))
    text = re.sub("::$", ":", text, flags=re.M)  # code follows, indented
    return MATH.sub(lambda found: (found[2] or "") + formula(found[1] or found[3]), text)


def _objects(obj: griffe.Object) -> Iterator[griffe.Object]:
    yield obj
    for member in obj.members.values():
        if not member.is_alias:
            yield from _objects(member)


class Docstrings(griffe.Extension):
    """Rewrites every docstring of the package, and hides what is internal."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for path, names in INTERNAL.items():
            for name in names.split():
                pkg.del_member(f"{path}.{name}".removeprefix(f"{pkg.path}."))
        for obj in _objects(pkg):
            if obj.docstring is not None:
                obj.docstring.value = readable(obj, obj.docstring.value)
