import json
import os
from pathlib import Path

import pytest

from awpo.files import keep_rows, write_atomically


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_atomically(target, "old")

    def broken(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_rows_that_are_kept_may_hold_ends_of_lines_that_json_leaves(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"step": 1, "text": "a\u2028b"}, {"step": 2, "text": "c\u0085d\u2029"}, {"step": 3, "text": "e"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_text(text + "7\n" + '{"step": 1, "te', "utf-8", newline="")
    keep_rows(file, lambda row: int(row["step"]) < 3)
    assert [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]] == rows[:2]
    keep_rows(tmp_path / "none.jsonl", lambda row: True)
    assert not (tmp_path / "none.jsonl").exists()
