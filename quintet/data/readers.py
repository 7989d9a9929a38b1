"""Files and Hugging Face data sets as rows. Every error names the file, and the line where there is one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from quintet.data.rows import Row, as_rows, row_of
from quintet.types import QuintetError

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
_UNREADABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".gz", ".zip", ".arrow", ".yaml", ".yml")


def read_file(path: str) -> list[Row]:
    """Rows of a JSONL, JSON or Parquet file.

    Raises QuintetError when the file is missing, empty, broken or not UTF-8.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise QuintetError(
            f"data: the file {path!r} does not exist (looked in {Path.cwd()}).\nCheck data.source or data.eval_source."
        )
    reader = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}[file.suffix]
    rows = reader(path, file)
    if not rows:
        raise QuintetError(f"data: {path!r} is empty: it holds no row.\nCheck data.source or data.eval_source.")
    return rows


def _read_jsonl(path: str, file: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise QuintetError(
                f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start}.\nSave the file as UTF-8."
            ) from error
        except json.JSONDecodeError as error:
            raise QuintetError(
                f"{path}:{number}: not JSON: {error.msg} at column {error.colno}.\n"
                "A .jsonl file has one JSON object per line."
            ) from error
        rows.append(row_of(path, number, record))
    return rows


def _read_json(path: str, file: Path) -> list[Row]:
    try:
        records = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise QuintetError(
            f"{path}: not UTF-8: {error.reason} at byte {error.start}.\nSave the file as UTF-8."
        ) from error
    except json.JSONDecodeError as error:
        raise QuintetError(
            f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}.\n"
            "A .json file holds one list of objects; name a file with one object per line .jsonl."
        ) from error
    if not isinstance(records, list):
        raise QuintetError(
            f"{path}: expected a list of objects, found {type(records).__name__}.\nUse .jsonl for one object per line."
        )
    return as_rows(path, records)


def _read_parquet(path: str, file: Path) -> list[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise QuintetError(f"{path}: not a Parquet file: {str(error).splitlines()[0][:200]}") from error
    return as_rows(path, table.to_pylist())


def read_dataset(name: str, split: str, args: dict[str, Any]) -> list[Row]:
    """Rows of a Hugging Face data set: a hub id, a folder of data files, or a folder that `save_to_disk` wrote.

    `args` go to `datasets.load_dataset`. Raises QuintetError when the library is missing, or the data
    set or its split cannot be had.
    """
    suffix = Path(name).suffix
    if suffix in _UNREADABLE_SUFFIXES:
        raise QuintetError(f"data: {suffix} files are not read ({name!r}). Use one of {', '.join(FILE_SUFFIXES)}.")
    if importlib.util.find_spec("datasets") is None:
        raise QuintetError(
            f"data: {name!r} is read by the datasets library.\nInstall with: pip install 'quintet[datasets]'"
        )
    rows = as_rows(name, _load(name, split, args))
    if not rows:
        raise QuintetError(f"data: the split {split!r} of {name!r} is empty.")
    return rows


def _load(name: str, split: str, args: dict[str, Any]) -> Any:
    import datasets

    folder = Path(name).expanduser()
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    try:
        data = datasets.load_from_disk(str(folder), **args) if saved else datasets.load_dataset(name, **args)
    except (OSError, ValueError, TypeError, datasets.exceptions.DatasetsError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise QuintetError(
            f"data: the data set {name!r} cannot be loaded: {first[:300]}\n"
            "Give a file (.jsonl, .json, .parquet), a folder, a hub id that this machine can reach, or task:NAME."
        ) from error
    if isinstance(data, datasets.Dataset):  # save_to_disk of one split
        return data
    if split not in data:
        raise QuintetError(
            f"data: {name!r} has no split {split!r}; there are {', '.join(data)}.\nSet data.split or data.eval_split."
        )
    return data[split]
