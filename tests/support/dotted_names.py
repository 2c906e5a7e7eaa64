"""Which dotted names the expressions of a module stand for, as far as its imports tell."""

import ast
from collections.abc import Iterator

UNKNOWN = "?"
ANY = "*"


def walk(node: ast.AST) -> list[ast.AST]:
    """Return a node and all below it as ast.walk does, and keep them: walking takes most time."""
    found: list[ast.AST] | None = getattr(node, "walked", None)
    if found is None:
        found = list(ast.walk(node))
        node.walked = found  # type: ignore[attr-defined]
    return found


def resolve(expression: ast.expr, known: dict[str, str]) -> str | None:
    """Return the dotted name that an expression stands for, "?" for a part of a layer specification
    of megatron-core, or None if it is no import's.
    """
    match expression:
        case ast.Name(id=name):
            return known.get(name)
        case ast.Attribute(attr="submodules"):  # of a layer specification of megatron-core
            return UNKNOWN
        case ast.Attribute(value=value, attr=attribute):
            owner = resolve(value, known)
            return owner if owner in (None, UNKNOWN) else f"{owner}.{attribute}"
        case ast.Call(func=function, args=[ast.Constant(value=str(module))]) if (
            ast.unparse(function).rpartition(".")[2] == "import_module"
        ):
            return module
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
            found = resolve(owner, known)
            return found and f"{found}.{name}"
        case ast.Subscript(
            value=ast.Call(func=ast.Name(id="vars"), args=[owner]), slice=ast.Constant(value=name)
        ):
            found = resolve(owner, known)
            return found and f"{found}.{name}"
    return None


def names_of(nodes: list[ast.AST], outer: dict[str, str]) -> dict[str, str]:
    """Return what imports and plain assignments of the statements make of local names."""
    known = dict(outer)
    for node in (each for root in nodes for each in walk(root)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                known[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                found = resolve(node.value, known)
                if isinstance(target, ast.Name) and found is not None:
                    known[target.id] = found
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in (*node.args.args, *node.args.kwonlyargs):
                known.pop(argument.arg, None)
    return known


def put_texts(tree: ast.Module) -> ast.Module:
    """Put texts in place of the module's names for them, in keys and in names of modules."""
    texts = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name):
            node.slice = texts.get(node.slice.id, node.slice)
        elif isinstance(node, ast.Call):
            node.args = [
                texts.get(argument.id, argument) if isinstance(argument, ast.Name) else argument
                for argument in node.args
            ]
    return tree


def loop_names(loop: ast.For, known: dict[str, str]) -> Iterator[dict[str, str]]:
    """Return what each turn of a loop over names that stand there makes of its variables."""
    for item in loop.iter.elts if isinstance(loop.iter, ast.Tuple | ast.List) else ():
        pairs = [(loop.target, item)]
        if isinstance(loop.target, ast.Tuple) and isinstance(item, ast.Tuple | ast.List):
            pairs = list(zip(loop.target.elts, item.elts, strict=False))
        names = {
            target.id: found
            for target, value in pairs
            if isinstance(target, ast.Name) and (found := resolve(value, known)) is not None
        }
        if names:
            yield names


def owner_of_vars(expression: ast.expr, known: dict[str, str]) -> str | None:
    """Return the dotted name of `owner` in vars(owner), if it is an import's."""
    match expression:
        case ast.Call(func=ast.Name(id="vars"), args=[owner]):
            return resolve(owner, known)
    return None


def text_of(expression: ast.expr) -> str:
    return str(expression.value) if isinstance(expression, ast.Constant) else ANY
