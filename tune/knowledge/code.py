"""A digest of the code that a task or a training function is made of, from its files: nothing is imported."""

import ast
import contextlib
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

_OWN = ("trainers", "tune", "cluster")


def task_digest(named: str, path: Sequence[str]) -> str:
    """Return a digest of the module of `module:name` and of what it imports from the directories in `path`.

    Comments and layout do not count. Empty where the module's file cannot be found or read.
    """
    module, found = named.partition(":")[0], dict[str, str]()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = _file(name, path, is_first=name == module)
        if name in found or file is None:
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        found[name] = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
        waiting += _imports(tree, name, file.name == "__init__.py")
    if module not in found:
        return ""
    own = found.pop(module)  # whose name does not count: a notebook's is made anew
    text = "".join([own, *(f" {name} {digest}" for name, digest in sorted(found.items()))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _file(module: str, path: Sequence[str], is_first: bool) -> Path | None:
    """Return the file of a module in one of the directories; of the first module of all, of an installed one, too."""
    if module.partition(".")[0] in _OWN:
        return None
    for root in path:
        base = Path(root).joinpath(*module.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            with contextlib.suppress(OSError):
                if file.is_file():
                    return file
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(module) if is_first else None
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            return Path(spec.origin)
    return None


def _imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    parts = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from [base] * bool(base)
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
