"""Which part of the Python package may import which, and that no imports go round in a circle.

Read from the source: imports inside functions, under TYPE_CHECKING and by importlib.import_module count like all
others. The package's own face, gatedelta/__init__.py, imports the public parts at first use (``__getattr__``): these
count as imports of the face. The face is no exception. It is free of circles because no part imports anything from it:
what parts take of one another they import from the part itself, and the face runs before them without importing any.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGE = "gatedelta"
FACE = PACKAGE

# A part is a folder or a file of the package. It may import the parts listed here, from the lowest to the highest.
PARTS = {
    "_lib": [],
    "_extras": [],
    "numpy": ["_extras", "_lib"],
    "_operators": ["_lib"],
    "context_parallel": ["_extras", "_lib", "_operators"],
    "torch": ["_extras", "_lib", "_operators", "context_parallel"],
    # plug-ins: what they share, and one part each
    "_plugins": ["_lib"],
    "fla": ["_operators", "_plugins", "torch"],
    "flash_qla": ["_extras", "_lib", "_operators", "_plugins", "torch"],
    "flashinfer": ["_extras", "_lib", "_plugins", "torch"],
    "sglang": ["_plugins", "torch"],
    "transformers": ["_plugins", "torch"],
    "vllm": ["_plugins", "torch"],
    # on top
    FACE: ["_lib", "context_parallel", "numpy", "torch"],
    "_selftest": ["_lib", "torch"],
    "__main__": [FACE, "_selftest"],
}

MAX_LINES = 500
MAX_LINES_OF = {"context_parallel": 200}


def modules_of(folder: Path) -> dict[str, str]:
    """{"gatedelta.torch._norm": source}; a package has the name of its folder."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = (PACKAGE, *path.relative_to(folder).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def part_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") else FACE


@functools.cache
def names_in(module: str, is_package: bool, text: str) -> frozenset[str]:
    """What a module imports, with absolute names: of modules, or of what is in them."""
    names: set[str] = set()
    tree = ast.parse(text)
    home = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), home)
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and "import_module" in (getattr(node.func, x, None) for x in ("id", "attr")):
            names |= {importlib.util.resolve_name(name, home) for name in requested(node.args[0], tree)}
    return frozenset(names)


def requested(argument: ast.expr, tree: ast.Module) -> list[str]:
    """What import_module() may be asked for: a constant, a constant's name, or f".{name}" of the face's _MODULES."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if isinstance(argument, ast.JoinedStr) and "_MODULES" in constants:
        return [f".{name}" for name in ast.literal_eval(constants["_MODULES"])]
    if isinstance(argument, ast.Name) and argument.id in constants:
        argument = constants[argument.id]
    return [argument.value] if isinstance(argument, ast.Constant) else []  # a name of another library's


class Imports:
    """Who imports whom among some modules."""

    def __init__(self, sources: dict[str, str], packages: set[str]) -> None:
        self._modules = set(sources)
        self.graph = {
            module: self._targets(module, names_in(module, module in packages, text))
            for module, text in sources.items()
        }

    def _targets(self, module: str, names: Iterable[str]) -> set[str]:
        targets = set(map(self._resolve, names))
        # Importing a.b.c runs a.b first, unless the importer is a part of a.b itself, which then runs already.
        for target in list(targets):
            while "." in (target := target.rpartition(".")[0]):
                if not f"{module}.".startswith(f"{target}."):
                    targets.add(target)
        return targets & self._modules - {module}

    def _resolve(self, name: str) -> str:
        """The module of a name: the name itself, or what it is an attribute of."""
        while name and name not in self._modules:
            name = name.rpartition(".")[0]
        return name

    def circles(self) -> list[list[str]]:
        """Modules that import one another, directly or through others."""
        reached = {module: self._reach(module) for module in self.graph}
        found = {tuple(sorted(m for m in reached[module] if module in reached[m])) for module in self.graph}
        return [list(circle) for circle in sorted(found) if circle]

    def _reach(self, module: str) -> set[str]:
        seen: set[str] = set()
        ahead = [module]
        while ahead:
            for target in self.graph[ahead.pop()] - seen:
                seen.add(target)
                ahead.append(target)
        return seen

    def between_parts(self) -> set[tuple[str, str]]:
        edges = {(part_of(module), part_of(target)) for module, targets in self.graph.items() for target in targets}
        return {(part, target) for part, target in edges if part != target}


def violations(imports: Imports) -> list[str]:
    return [
        f"{part} imports {target}, which it may not"
        for part, target in sorted(imports.between_parts())
        if target not in PARTS.get(part, ())
    ]


@pytest.fixture(scope="module")
def folder(root) -> Path:
    return root / "python" / PACKAGE


@pytest.fixture(scope="module")
def sources(folder) -> dict[str, str]:
    return modules_of(folder)


@pytest.fixture(scope="module")
def packages(folder) -> set[str]:
    return {".".join((PACKAGE, *path.parent.relative_to(folder).parts)) for path in folder.rglob("__init__.py")}


@pytest.fixture(scope="module")
def imports(sources, packages) -> Imports:
    return Imports(sources, packages)


def test_no_imports_go_round_in_a_circle(imports):
    assert imports.circles() == []


def test_every_import_is_allowed(imports):
    assert violations(imports) == []


def test_the_table_has_no_circle():
    assert [part for i, part in enumerate(PARTS) if not set(PARTS[part]) <= set(list(PARTS)[:i])] == []


def test_every_part_is_there(sources):
    assert set(map(part_of, sources)) == set(PARTS)


def test_every_permission_is_used(imports):
    """A permission that no import needs is a hole in a wall."""
    allowed = {(part, target) for part, targets in PARTS.items() for target in targets}
    assert sorted(allowed - imports.between_parts()) == []


def test_the_face_imports_nothing_at_once(sources):
    """Every import of a part runs the face first."""
    at_once = [node for node in ast.parse(sources[FACE]).body if isinstance(node, ast.Import | ast.ImportFrom)]
    roots = {alias.name for node in at_once if isinstance(node, ast.Import) for alias in node.names}
    roots |= {"." * node.level + (node.module or "") for node in at_once if isinstance(node, ast.ImportFrom)}
    assert roots <= sys.stdlib_module_names | {"__future__"}


@pytest.mark.parametrize(
    ("module", "line", "circle"),
    [
        ("numpy.arrays", "from . import conv1d", {"numpy.arrays", "numpy.conv1d"}),
        ("numpy.arrays", "def f():\n    from .rule import forward", {"numpy.arrays", "numpy.rule"}),
        ("context_parallel.layout", "if TYPE_CHECKING:\n    from .context import Context", {"context_parallel.layout"}),
        ("_operators.stages", "def f():\n    from .. import context_parallel", {"_operators.stages"}),
        ("_lib", "import gatedelta.torch", {"_lib", "torch"}),
        ("_operators.ops", "from .. import info", {"_operators.ops", ""}),  # of the face
        ("_lib", 'importlib.import_module("gatedelta.numpy")', {"_lib", "numpy"}),
        ("torch._functional", "from .. import rms_norm_gated", {"torch._functional", ""}),
    ],
)
def test_a_planted_circle_is_found(sources, packages, module, line, circle):
    module = f"{PACKAGE}.{module}"
    planted = Imports({**sources, module: f"{sources[module]}\n{line}\n"}, packages)
    assert any({f"{PACKAGE}.{name}".rstrip(".") for name in circle} <= set(found) for found in planted.circles())


@pytest.mark.parametrize(
    ("module", "line", "refused"),
    [
        ("numpy.rule", "from .. import torch", "numpy imports torch"),
        ("_plugins.limits", "def f():\n    from ..transformers import patch", "_plugins imports transformers"),
        ("torch._norm", "from .. import numpy", "torch imports numpy"),
        ("context_parallel.rule", "from ..torch import causal_conv1d", "context_parallel imports torch"),
        ("vllm.layer", "from gatedelta.sglang import options", "vllm imports sglang"),
    ],
)
def test_a_forbidden_import_is_found(sources, packages, module, line, refused):
    module = f"{PACKAGE}.{module}"
    planted = Imports({**sources, module: f"{sources[module]}\n{line}\n"}, packages)
    assert f"{refused}, which it may not" in violations(planted)


def test_files_stay_short(folder):
    lengths = {path.relative_to(folder): path.read_text().count("\n") for path in folder.rglob("*.py")}
    assert {str(path): n for path, n in lengths.items() if n > MAX_LINES_OF.get(path.parts[0], MAX_LINES)} == {}
