"""Files and data sets as rows; every error names the file, and the line where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from quintet.data.readers import read_dataset, read_file
from quintet.types import QuintetError
from tests.data_pkg.helpers import write_jsonl

RECORDS = [{"prompt": "求 1+1 的值", "answer": "2"}, {"prompt": "ß → ?", "answer": "ss"}]


def test_the_three_file_kinds_give_the_same_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", RECORDS)
    (tmp_path / "d.json").write_text(json.dumps(RECORDS), encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "d.parquet")
    for suffix in ("jsonl", "json", "parquet"):
        rows = read_file(str(tmp_path / f"d.{suffix}"))
        assert [r.values for r in rows] == RECORDS
        assert [r.number for r in rows] == [1, 2]


def test_jsonl_row_number_is_the_line_and_blank_lines_and_bom_pass(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n\r\n{"prompt": "c"}')
    rows = read_file(str(path))
    assert [(r.number, r.values["prompt"]) for r in rows] == [(1, "a\u2028b"), (3, "c")]
    assert rows[1].where == f"{path}:3"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"a": 1}\n{"a": \n', r"d\.jsonl:2: not JSON: Expecting value at column"),
        ("d.jsonl", b'{"a": 1}\n[1]\n', r"d\.jsonl:2: expected an object with named columns, found list"),
        ("d.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"d\.jsonl:2: not UTF-8: .* at byte 7"),
        ("d.jsonl", b"\n\n", r"d\.jsonl' is empty"),
        ("d.json", b'[{"a": 1},\n{"a" 1}]', r"d\.json:2: not JSON"),
        ("d.json", b'{"a": 1}', r"expected a list of objects, found dict"),
        ("d.json", b"[]", r"d\.json' is empty"),
        ("d.parquet", b"not parquet at all", r"d\.parquet: not a Parquet file"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(QuintetError, match=message) as error:
        read_file(str(tmp_path / name))
    assert len(str(error.value).splitlines()) <= 3


def test_missing_file_is_named() -> None:
    with pytest.raises(QuintetError, match=r"'no/such\.jsonl' does not exist"):
        read_file("no/such.jsonl")


def test_unsupported_suffix_is_refused() -> None:
    with pytest.raises(QuintetError, match=r"\.csv files are not read"):
        read_dataset("table.csv", "train", {})


def test_folder_that_save_to_disk_wrote(tmp_path: Path) -> None:
    splits = {"train": datasets.Dataset.from_list(RECORDS), "test": datasets.Dataset.from_list(RECORDS[:1])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "d"))
    assert [r.values for r in read_dataset(str(tmp_path / "d"), "test", {})] == RECORDS[:1]
    with pytest.raises(QuintetError, match="no split 'dev'; there are train, test"):
        read_dataset(str(tmp_path / "d"), "dev", {})


def test_folder_of_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d").mkdir()
    write_jsonl(tmp_path / "d" / "train.jsonl", RECORDS)
    rows = read_dataset(str(tmp_path / "d"), "train", {"cache_dir": str(tmp_path / "cache")})
    assert [r.values for r in rows] == RECORDS


def test_data_set_that_cannot_be_had_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, **kwargs: object) -> None:
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(QuintetError, match="'org/set' cannot be loaded: Couldn't reach 'org/set' on the Hub\n"):
        read_dataset("org/set", "train", {})


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(QuintetError, match=r"pip install 'quintet\[datasets\]'"):
        read_dataset("org/set", "train", {})
