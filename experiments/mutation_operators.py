"""The faults that `mutations.py` puts into code: where in a file each is possible, and the file with one of them.

Operators work on the syntax tree; a fault replaces the text of one node and leaves the rest of the file as it is.
Mutated is code that computes: no docstrings, annotations, decorators, imports, `__all__`, and nothing that only words a
message (f-strings, `print`, options of the command line).

Of the libraries for this, mutatest is not kept up, and cosmic-ray and mutmut bring their own way of judging that knows
neither two versions of the code nor which tests execute a line; neither removes statements, and cosmic-ray drops no
arguments. What would be left of them is a table of operators, which is short.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OPERATORS = ("comparison", "constant", "argument", "sign", "boolean", "statement")
"""Turned, shifted, dropped, changed, turned, removed."""

TURNED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip
WORDING = {
    "print", "rule", "log", "info", "debug", "warning", "Option", "Argument", "Typer", "add_argument", "escape",
    "add_column", "ArgumentParser", "cast", "TypeVar", "NewType", "assert_never",
}  # fmt: skip
"""Functions, by the last part of the name, whose calls are left alone: they word messages or serve the type checker."""
LOOKS = {
    "help", "metavar", "title", "description", "style", "markup", "highlight", "soft_wrap", "justify", "indent",
    "strict", "encoding", "ensure_ascii",
}  # fmt: skip
"""Keywords of calls that are left alone: looks, or asserted anyway."""


@dataclass(frozen=True)
class Site:
    """One possible fault. ``node``: what is replaced by ``text``. ``variant``: of several at the same node."""

    operator: str
    node: ast.expr | ast.stmt
    text: str
    variant: int = 0


@dataclass(frozen=True)
class Statement:
    """A statement with its faults, in the order of the text. Of a compound statement, only its head.

    ``path``: names of the classes and functions around it. ``before``, ``after``: its neighbours' heads, or "".
    """

    node: ast.stmt
    path: str
    head: str
    before: str
    after: str
    sites: tuple[Site, ...]

    @property
    def is_at_import(self) -> bool:
        """Executed when the module is imported, not in a call."""
        return not any(part.endswith("()") for part in self.path.split("."))


def statements(source: str) -> list[Statement]:
    """All statements of a module in which a fault is possible."""
    return list(_in_body(ast.parse(source).body, "", ""))


def mutated(source: str, site: Site) -> str:
    """The file with the fault."""
    data, starts = source.encode(), [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    node = site.node
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    begin = starts[node.lineno - 1] + node.col_offset  # columns are counted in bytes
    end = starts[node.end_lineno - 1] + node.end_col_offset
    return (data[:begin] + site.text.encode() + data[end:]).decode()


def watched(source: str, sites: Sequence[tuple[int, Site, bool]]) -> str:
    """The module's code with a call of ``mutation_helper.at(number)`` at every site. For one that is executed at import
    (the third of each), at the beginning of each function of the module."""
    tree = ast.parse(source)
    at_import = [number for number, _, is_at_import in sites if is_at_import]
    of_place = {_place(site.node): number for number, site, is_at_import in sites if not is_at_import}
    _Watching(at_import, of_place).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def _place(node: ast.AST) -> tuple[object, ...]:
    names = ("lineno", "col_offset", "end_lineno", "end_col_offset")
    return (type(node), *(getattr(node, name, None) for name in names))


def _at(number: int) -> ast.expr:
    return ast.parse(f"__import__('mutation_helper').at({number})", mode="eval").body


@dataclass(frozen=True)
class _Watching(ast.NodeTransformer):
    at_import: list[int]
    of_place: dict[tuple[object, ...], int]

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        place = _place(node)
        self.generic_visit(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and self.at_import:
            after = 1 if ast.get_docstring(node) is not None else 0
            node.body[after:after] = [ast.Expr(_at(number)) for number in self.at_import]
        if place not in self.of_place:
            return node
        call = _at(self.of_place[place])
        # `at` returns None.
        return ast.BoolOp(ast.Or(), [call, node]) if isinstance(node, ast.expr) else [ast.Expr(call), node]


def head(node: ast.stmt) -> str:
    """The statement's code in one spelling, without the blocks that it contains."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"def {node.name}({ast.unparse(node.args)})"
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    if isinstance(node, ast.Match):
        return f"match {ast.unparse(node.subject)}"
    if isinstance(node, ast.Try):
        return "try"
    return ast.unparse(node).split("\n")[0] if _blocks(node) else ast.unparse(node)


# ---- statements ----


def _in_body(body: list[ast.stmt], path: str, outer: str) -> Iterator[Statement]:
    """``outer``: the head of the statement that contains this block."""
    heads = [head(node) for node in body]
    for n, node in enumerate(body):
        if _is_left_alone(node, first=n == 0):
            continue
        before, after = (heads[n - 1] if n else outer), (heads[n + 1] if n + 1 < len(body) else "")
        sites = tuple(_sites(node))
        if sites:
            yield Statement(node, path, heads[n], before, after, sites)
        inner = path
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{path}.{node.name}()".lstrip(".")
        elif isinstance(node, ast.ClassDef):
            inner = f"{path}.{node.name}".lstrip(".")
        for block in _blocks(node):
            yield from _in_body(block, inner, heads[n])


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(node, ast.Match):
        return [case.body for case in node.cases]
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(node, "handlers", [])]
    return [block for block in blocks if block]


def _is_left_alone(node: ast.stmt, first: bool) -> bool:
    if isinstance(node, ast.Expr):
        # Docstrings, also of attributes; and calls that only say something.
        return isinstance(node.value, ast.Constant) or (isinstance(node.value, ast.Call) and _words(node.value))
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test) or "__name__" in ast.unparse(node.test)
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Pass | ast.Global | ast.Nonlocal)


# ---- faults of one statement ----


def _sites(statement: ast.stmt) -> Iterator[Site]:
    if _is_removable(statement):
        yield Site("statement", statement, "pass")
    elif isinstance(statement, ast.AugAssign) and type(statement.op) in SWAPPED:
        yield _swapped(statement)
    for expression in _expressions(statement):
        for node in _walk(expression):
            yield from _of_node(node)


def _is_removable(node: ast.stmt) -> bool:
    """What can be left out and leaves code that runs: names stay defined."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Yield | ast.YieldFrom | ast.Await)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.Raise | ast.Continue | ast.Break | ast.Delete | ast.AugAssign)


def _expressions(node: ast.stmt) -> Iterator[ast.expr]:
    """What the statement itself computes: not its blocks, annotations, decorators or messages."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from node.args.defaults
            yield from (default for default in node.args.kw_defaults if default is not None)
        case ast.AnnAssign():
            if node.value is not None:
                yield node.value
        case ast.Match():
            yield node.subject
            yield from (case.guard for case in node.cases if case.guard is not None)
        case ast.With() | ast.AsyncWith():
            yield from (item.context_expr for item in node.items)
        case ast.Assert():
            yield node.test
        case ast.Raise() | ast.ClassDef() | ast.Try():
            pass
        case _:
            yield from (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))


def _walk(node: ast.expr) -> Iterator[ast.expr]:
    """The expression and those in it, in the order of the text, without what is left alone."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _words(node)):
        return
    yield node
    for child in _children(node):
        yield from _walk(child)


def _children(node: ast.AST) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.keyword) and child.arg in LOOKS:
            continue
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.keyword | ast.comprehension | ast.arguments):
            yield from _children(child)


def _words(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in WORDING


def _of_node(node: ast.expr) -> Iterator[Site]:
    match node:
        case ast.Compare():
            for n, turned in enumerate(TURNED[type(node.ops[0])]):
                text = _text(ast.Compare(node.left, [turned(), *node.ops[1:]], node.comparators))
                yield Site("comparison", node, text, n)
        case ast.BoolOp():
            other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            yield Site("boolean", node, _text(ast.BoolOp(other, node.values)))
        case ast.UnaryOp(op=ast.Not()):
            yield Site("boolean", node, _text(node.operand))
        case ast.UnaryOp(op=ast.USub()):
            yield Site("sign", node, _text(node.operand))
        case ast.BinOp() if type(node.op) in SWAPPED and not (_is_text(node.left) or _is_text(node.right)):
            yield _swapped(node)
        case ast.Constant(value=bool(value)):
            yield Site("constant", node, str(not value))
        case ast.Constant(value=int(value)):
            yield Site("constant", node, str(value + 1), 0)
            if value > 0:
                yield Site("constant", node, str(value - 1), 1)
        case ast.Constant(value=float(value)):
            yield Site("constant", node, repr(2 * value if value else 1.0))
        case ast.Call():
            yield from _dropped(node)


def _dropped(call: ast.Call) -> Iterator[Site]:
    """A keyword argument, or the last positional one of several."""
    certain = isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "issubclass", "hasattr")
    if len(call.args) > 1 and not isinstance(call.args[-1], ast.Starred) and not certain:
        yield Site("argument", call, _text(ast.Call(call.func, call.args[:-1], call.keywords)), 0)
    for n, keyword in enumerate(call.keywords):
        if keyword.arg is not None and keyword.arg not in LOOKS:
            rest = [other for other in call.keywords if other is not keyword]
            yield Site("argument", call, _text(ast.Call(call.func, call.args, rest)), n + 1)


def _swapped(node: ast.BinOp | ast.AugAssign) -> Site:
    op = SWAPPED[type(node.op)]()
    if isinstance(node, ast.BinOp):
        return Site("sign", node, _text(ast.BinOp(node.left, op, node.right)))
    return Site("sign", node, ast.unparse(ast.AugAssign(node.target, op, node.value)))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _text(node: ast.expr) -> str:
    """In parentheses where what is around could bind otherwise."""
    text = ast.unparse(node)
    return text if isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Constant) else f"({text})"
