"""The house: imports go down, or stay within one package. And importing quintet is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "quintet"

FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"types", "clock", "protocols", "files", "recipe", "serving"}),
    frozenset({"algorithms", "models", "weights", "sandbox", "data"}),
    frozenset({"rollout", "reward", "train", "buffer"}),
    frozenset({"controller", "observe"}),
    frozenset({"config", "checks", "cluster"}),
    frozenset({"api", "cli"}),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# Neighbours on one floor of which the first leans on the second (checks.py names config's class as a type only).
SIDEWAYS = frozenset({
    ("protocols", "types"), ("recipe", "types"), ("serving", "types"),
    ("config", "checks"), ("checks", "config"), ("cluster", "config"),
    ("cli", "api"),
})  # fmt: skip


def package_of(module: str) -> str:
    """`quintet.train.worker` -> `train`; `quintet` itself -> ``."""
    return [*module.split("."), ""][1]


def imported_modules(tree: ast.AST, module: str) -> Iterator[str]:
    """Every quintet module that a file imports, at any depth (inside functions and TYPE_CHECKING too)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{name}.{alias.name}" for alias in node.names) if name == "quintet" else (name,)


def is_allowed(importer: str, imported: str) -> bool:
    if importer == imported or imported == "__version__" or (importer, imported) in SIDEWAYS:
        return True
    return FLOOR_OF[imported] < FLOOR_OF[importer]


def offences() -> list[str]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(["quintet", *path.relative_to(ROOT).with_suffix("").parts])
        importer = package_of(module)
        if importer == "__init__":
            continue  # the package's own door hands out api and config lazily
        for name in imported_modules(ast.parse(path.read_text(encoding="utf-8")), module):
            if name.startswith("quintet.") and not is_allowed(importer, package_of(name)):
                found.append(f"{path.relative_to(ROOT)} imports {name}")
    return found


def test_imports_go_to_lower_floors_or_stay_in_their_package() -> None:
    assert offences() == []


def test_every_module_has_a_floor() -> None:
    names = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or any(p.glob("*.py"))} - {"__init__", "__pycache__"}
    assert names <= set(FLOOR_OF)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("train", "algorithms", True),
        ("controller", "algorithms", True),
        ("algorithms", "types", True),
        ("cli", "api", True),
        ("api", "cli", False),
        ("config", "cluster", False),
        ("algorithms", "models", False),
        ("train", "rollout", False),
        ("rollout", "controller", False),
        ("types", "algorithms", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert is_allowed(importer, imported) is allowed


def test_relative_and_deferred_imports_are_seen() -> None:
    source = "def f():\n    from ..train import worker\n    import quintet.reward.rules\n    from quintet import api\n"
    found = set(imported_modules(ast.parse(source), "quintet.rollout.engine"))
    assert found == {"quintet.train", "quintet.reward.rules", "quintet.api"}


def test_config_modules_import_only_their_own_kind() -> None:
    """A component's options are plain pydantic classes: nothing of the component loads with them, the plain types of
    its own protocol aside."""
    for path in ROOT.glob("*/config.py"):
        if path.parent.name == "cli":
            continue
        names = set(imported_modules(ast.parse(path.read_text(encoding="utf-8")), "quintet.x.config"))
        protocol = f"quintet.{path.parent.name}.protocol"
        assert names <= {"__future__", "enum", "typing", "pydantic", "quintet.types", "collections.abc", protocol}, path


def test_importing_quintet_and_its_config_loads_nothing_heavy() -> None:
    code = (
        "import sys, quintet, quintet.config, quintet.cli.main\n"
        "quintet.config.load_config({'algorithm': {'preset': 'dapo'}})\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'tensorboard', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert done.stdout.strip() == "[]"
