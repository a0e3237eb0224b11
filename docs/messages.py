"""Every text that startrail raises, read from its source: for the page of errors, and so for the search of the site."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "startrail"
REFUSE = ("refuse", "error")  # methods that raise on all ranks, or end a command
LEAST = 4  # letters that a text has besides its values


def messages() -> Iterator[tuple[str, str]]:
    """Pairs of module and text, with ``...`` for values."""
    for module, _, texts in raises():
        for text in texts:
            yield module, text.replace("`", "'").replace("\n", " ")


def raises() -> Iterator[tuple[str, ast.AST, list[str]]]:
    """Module, node and texts of everything that raises."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    returned: dict[str, list[ast.expr]] = {}
    for node in chain.from_iterable(map(ast.walk, trees.values())):
        if isinstance(node, ast.FunctionDef):
            inside = (each.value for each in ast.walk(node) if isinstance(each, ast.Return | ast.Yield))
            returned.setdefault(node.name, []).extend(value for value in inside if value is not None)
    for path, tree in trees.items():
        module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        find = _Texts(tree, returned)
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield module, node, sorted(set(find.texts(node.exc)))
            elif isinstance(node, ast.Call) and _name(node.func) in REFUSE and node.args:
                yield module, node, sorted({text for given in node.args for text in find.texts(given)})


class _Texts:
    """Finds the texts that an expression can be: those of names and functions, too."""

    def __init__(self, tree: ast.Module, returned: dict[str, list[ast.expr]]) -> None:
        self.returned, self.assigned = returned, dict[str, list[ast.expr]]()
        for name, value in chain.from_iterable(map(_given, ast.walk(tree))):
            self.assigned.setdefault(name, []).append(value)

    def texts(self, node: ast.expr | None, seen: frozenset[str] = frozenset()) -> Iterator[str]:
        text = template(node)
        if len(text.replace("...", "").strip()) >= LEAST:
            yield text
            return
        inner: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = _name(node.func)
            inner = node.args[:1] if name.endswith("Error") or name not in self.returned else self.returned[name]
            seen, inner = seen | {name}, [] if name in seen else inner
        elif isinstance(node, ast.Name | ast.Attribute):
            name = _name(node)
            seen, inner = seen | {name}, [] if name in seen else self.assigned.get(name, [])
        elif node is not None:
            inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        for each in inner:
            yield from self.texts(each, seen)


def _given(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names that a statement gives values to, with these values.

    >>> [(name, ast.unparse(value)) for name, value in _given(ast.parse("kind, text = of(x)").body[0])]
    [('kind', 'of(x)'), ('text', 'of(x)')]
    """
    value = node.iter if isinstance(node, ast.For) else getattr(node, "value", None)
    if isinstance(node, ast.keyword):
        yield node.arg or "", node.value
    elif isinstance(value, ast.expr):
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            for part in getattr(target, "elts", [target]):
                yield _name(part), value
    elif isinstance(node, ast.Call) and _name(node.func) == "append" and isinstance(node.func, ast.Attribute):
        yield _name(node.func.value), node.args[0]


def _name(node: ast.AST | None) -> str:
    """
    >>> _name(ast.parse("sp.session.refuse", mode="eval").body)
    'refuse'
    """
    return getattr(node, "id", None) or getattr(node, "attr", None) or ""


def template(node: ast.AST | None) -> str:
    """The constant parts of a text.

    >>> template(ast.parse("f'a tensor of {n} tokens' + hint", mode='eval').body)
    'a tensor of ... tokens...'
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return "..."
