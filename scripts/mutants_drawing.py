"""Drawing mutants: a place in the code, one of the changes that Cosmic Ray's operators know for it, and the new text.

Left out by rule, for a test that sees them would prove nothing:

- annotations, what stands under TYPE_CHECKING and under `__name__ == "__main__"`: not what the packages do;
- what is said: the arguments of an exception that is raised, of a warning, of `print`, of an assertion;
- `is` for `==` and the reverse: for None, small numbers and short texts they are the same;
- `strict` of zip: an assertion;
- the looks of a picture: what is called `fontsize`, `lw`, `zorder` and the like;
- decorators that only save time (`cache`) or only speak to readers and their tools (`abstractmethod`, `overload`).

The order of the places is that of a hash of each line and what it is about, not of its number: where code is added or
removed elsewhere, the other mutants of a sample stay what they were.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNTOLD = ("VariableReplacer", "VariableInserter", "NoOp")  # operators that have to be told names, and the one of none
SAME = ("Eq_Is", "Is_Eq", "NotEq_IsNot", "IsNot_NotEq")
NO_EFFECT = {"cache", "lru_cache", "cached_property", "abstractmethod", "overload", "override", "final"}
SPEAKING = {"print", "warn", "exit"}
LEFT_OUT = {"strict"} | {"alpha", "dpi", "figsize", "fontsize", "linewidth", "ls", "lw", "pad", "zorder"}  # keywords


@dataclass(frozen=True)
class Mutant:
    """A change of one place: "- old line" and "+ new line" in `change`; `twin`: how many such lines are before it."""

    file: str
    line: int
    change: str
    twin: int
    text: str  # of the whole file, changed

    @property
    def key(self) -> tuple[str, str, int]:
        return self.file, self.change, self.twin


def draw(sources: list[str], seed: int) -> Iterator[Mutant]:
    """Mutants of these files, one a place, as many as there are places: one with many changes counts once."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    operators = [get_operator(name)() for name in sorted(operator_names()) if not name.endswith(UNTOLD + SAME)]
    texts = {path: Path(path).read_text() for path in sources}
    nodes = {path: list(ast_nodes(get_ast(text))) for path, text in texts.items()}
    order = sorted(place for source in sources for place in places(source, texts[source], nodes[source], seed))
    for digest, path, i in order:
        fitting = [operator for operator in operators if any(operator.mutation_positions(nodes[path][i]))]
        if not fitting:
            continue
        operator = random.Random(digest).choice(fitting)
        occurrence = sum(len([*operator.mutation_positions(node)]) for node in nodes[path][:i])
        mutated = mutate_code(texts[path], operator, occurrence)
        if mutated and behaviour(mutated) not in ("", behaviour(texts[path])):
            yield describe(path, nodes[path][i].start_pos[0], texts[path], mutated)


def places(path: str, text: str, nodes: list, seed: int) -> Iterator[tuple[str, str, int]]:
    """Of each node of a file: (hash of where it is, path, its number)."""
    lines, seen = text.splitlines(), Counter()
    for i, node in enumerate(nodes):
        row, column = node.start_pos
        where = f"{seed} {path} {lines[row - 1] if row <= len(lines) else ''} {column} {node.type}"
        seen[where] += 1
        yield hashlib.sha256(f"{where} {seen[where]}".encode()).hexdigest(), path, i


def describe(path: str, line: int, text: str, mutated: str) -> Mutant:
    old, new = text.splitlines(), mutated.splitlines()
    diff = [row for row in difflib.unified_diff(old, new, n=0, lineterm="") if not row.startswith(("---", "+++", "@@"))]
    twin = old[: line - 1].count(old[line - 1])
    return Mutant(path, line, "\n".join(f"{row[0]} {row[1:].strip()}" for row in diff), twin, mutated)


def behaviour(text: str) -> str:
    """The program without what is left out by rule, to compare; "" for what is no program."""
    try:
        return ast.dump(Plain().visit(ast.parse(text)))
    except SyntaxError:
        return ""


class Plain(ast.NodeTransformer):
    """Takes out of a program what no mutant is to change."""

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.returns = None
        node.decorator_list = [d for d in node.decorator_list if last_name(d) not in NO_EFFECT]
        return node

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node

    def visit_If(self, node):
        self.generic_visit(node)
        test = ast.dump(node.test)
        return ast.Pass() if "TYPE_CHECKING" in test or "__main__" in test else node

    def visit_Raise(self, node):
        self.generic_visit(node)
        if isinstance(node.exc, ast.Call):
            node.exc = node.exc.func
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        node.keywords = [k for k in node.keywords if k.arg not in LEFT_OUT]
        return ast.Call(node.func, [], []) if last_name(node.func) in SPEAKING else node

    def visit_Assert(self, node):
        self.generic_visit(node)
        node.msg = None
        return node


def last_name(node: ast.expr) -> str:
    """cache of functools.cache, lru_cache of lru_cache(maxsize=8)."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))
