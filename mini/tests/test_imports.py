"""Standard library only, and no import between this package and the main one, in either direction."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

MINI = Path(__file__).parents[1]
PACKAGE = MINI / "rl_post_training_mini"
MAIN = MINI.parent / "quintet"


def imported(path: Path) -> set[str]:
    """Top-level names of the absolute imports of a file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_the_package_imports_the_standard_library_only():
    files = sorted(PACKAGE.glob("*.py"))
    assert len(files) >= 13
    for path in files:
        assert imported(path) <= set(sys.stdlib_module_names), path.name


def test_the_main_package_does_not_import_this_one():
    if not MAIN.is_dir():
        pytest.skip("installed without the main package beside it")
    for path in MAIN.rglob("*.py"):
        if "rl_post_training_mini" in path.read_text(encoding="utf-8"):  # naming it is allowed, importing it is not
            assert "rl_post_training_mini" not in imported(path), path


def test_it_imports_without_site_packages():
    code = "import sys, rl_post_training_mini.demo; assert not {'quintet', 'torch', 'numpy'} & set(sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(MINI)}
    subprocess.run([sys.executable, "-S", "-c", code], check=True, env=env, cwd=MINI.parent)


def test_functions_are_short():
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 40, f"{path.name}: {node.name}"
