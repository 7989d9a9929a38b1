"""A recipe file as data that remembers its lines, so that every complaint can name file and line.

YAML 1.2's plain scalars, not PyYAML's 1.1 defaults: `1e-5` is a number, `no` and `on` are words, `010` is
text. A key written twice is refused instead of the last one silently winning. Left out: `!tags` and more
than one document in a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from quintet.types import QuintetError

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 core scalars."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    ("float", r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
     "-+.0123456789"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"^<<$", "<"),
):  # fmt: skip
    # `0…` digits with a leading zero match the float pattern, so the text rule must come before it
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))
_LEADING_ZERO = re.compile(r"^[-+]?0[0-9]+$")


@dataclass(frozen=True)
class Recipe:
    """`data` as nested dicts and lists; `where` maps a key path to `file:line`, or to the flag it came from."""

    data: dict[str, Any]
    where: dict[KeyPath, str] = field(default_factory=dict)
    origin: str = "config"

    def locate(self, path: Sequence[str | int]) -> str:
        """Where the deepest known part of `path` was written."""
        for end in range(len(path), 0, -1):
            if (found := self.where.get(tuple(path[:end]))) is not None:
                return found
        return self.origin


def read_recipe(path: str | Path) -> Recipe:
    """Parse a YAML file. Raises QuintetError for a missing, empty, broken or non-mapping file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise QuintetError(f"{path}: no such recipe file{_sibling_hint(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise QuintetError(f"{path}: cannot be read as a recipe: {error}") from None
    return parse_recipe(text, origin=str(path))


def parse_recipe(text: str, *, origin: str) -> Recipe:
    """As `read_recipe`, from text; `origin` is the name that messages use."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise QuintetError(f"{origin}: the recipe is empty; `quintet config --defaults` prints every option")
        where: dict[KeyPath, str] = {}
        data = _build(loader, node, (), where, origin)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise QuintetError(f"{origin}{line}: broken YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise QuintetError(f"{origin}: broken YAML: {error}") from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise QuintetError(
            f"{origin}:{node.start_mark.line + 1}: a recipe is `key: value` lines, this is a {type(data).__name__}"
        )
    return Recipe(data, where, origin)


def _build(loader: _Loader, node: yaml.Node, path: KeyPath, where: dict[KeyPath, str], origin: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(loader, node, path, where, origin)
    if isinstance(node, yaml.SequenceNode):
        items: list[Any] = []
        for i, child in enumerate(node.value):
            where[(*path, i)] = f"{origin}:{child.start_mark.line + 1}"
            items.append(_build(loader, child, (*path, i), where, origin))
        return items
    if isinstance(node, yaml.ScalarNode) and node.style is None and _LEADING_ZERO.match(node.value):
        return node.value
    return loader.construct_object(node, deep=True)


def _build_mapping(
    loader: _Loader, node: yaml.MappingNode, path: KeyPath, where: dict[KeyPath, str], origin: str
) -> dict[str, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        line = key_node.start_mark.line + 1
        if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
            key, first = key_node.value, seen[key_node.value]
            raise QuintetError(f"{origin}:{line}: key '{key}' is given twice (first on line {first}); delete one")
        seen[str(key_node.value)] = line
    loader.flatten_mapping(node)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        where[(*path, key)] = f"{origin}:{key_node.start_mark.line + 1}"
        result[key] = _build(loader, value_node, (*path, key), where, origin)
    return result


def with_overrides(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """A new recipe with `a.b=c` settings applied in order; the value is read as YAML. Raises QuintetError."""
    data, where = _copy(recipe.data), dict(recipe.where)
    for text in overrides:
        dotted, equals, raw = text.partition("=")
        keys: KeyPath = tuple(dotted.strip().split("."))
        if not equals or not all(keys):
            raise QuintetError(f"--set {text}: expected KEY=VALUE with a dotted key, e.g. --set train.lr=1e-5")
        parent = _descend(data, keys, text)
        parent[keys[-1]] = _parse_value(raw, text)
        where = {k: v for k, v in where.items() if k[: len(keys)] != keys}
        where[keys] = f"--set {text}"
    return Recipe(data, where, recipe.origin)


def _parse_value(raw: str, text: str) -> Any:
    loader = _Loader(raw)
    try:
        node = loader.get_single_node()
        return None if node is None else _build(loader, node, (), {}, "--set")
    except yaml.YAMLError as error:
        raise QuintetError(f"--set {text}: the value is not YAML ({str(error).splitlines()[0]}); quote it") from None
    finally:
        loader.dispose()


def _descend(data: dict[str, Any], keys: KeyPath, text: str) -> Any:
    """The container that holds the last key; missing levels are made, list positions are numbers."""
    here: Any = data
    for depth, key in enumerate(keys[:-1]):
        if isinstance(here, list):
            raise QuintetError(f"--set {text}: '{'.'.join(map(str, keys[:depth]))}' is a list; set it as a whole")
        child = here.get(key)
        if isinstance(child, str) and key == "model":  # `model: NAME` is short for `model: {name: NAME}`
            child = {"name": child}
        if not isinstance(child, dict | list):
            child = {}
        here[key] = child
        here = child
    if isinstance(here, list):
        raise QuintetError(f"--set {text}: '{'.'.join(map(str, keys[:-1]))}' is a list; set it as a whole")
    return here


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` was most likely meant to be; None when nothing is close."""
    pool = sorted(set(candidates))
    exact = [c for c in pool if _squash(c) == _squash(word)]
    if exact:
        return exact[0]
    close = get_close_matches(word, pool, n=1, cutoff=0.6)
    if close:
        return close[0]
    parts = set(word.split("_"))
    shared = [c for c in pool if len(parts & set(c.split("_"))) * 2 >= len(parts)]
    return shared[0] if shared else None


def _squash(word: str) -> str:
    return word.replace("_", "").replace("-", "").lower()


def _sibling_hint(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return ""
    close = nearest(path.name, (p.name for p in folder.iterdir() if p.suffix in {".yaml", ".yml"}))
    return f"; did you mean {folder / close}?" if close else ""
