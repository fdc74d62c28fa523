from pathlib import Path

import pytest

from memopt.disk_cache import cache_folder, read_json, write_json


def test_the_folder_is_the_users_where_one_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("MEMOPT_CACHE_DIR", "")
    assert cache_folder() == tmp_path / "other" / "memopt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "memopt"
    assert not (tmp_path / "other").exists()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "value.json"
    write_json(path, {"rates": [1.5, 2]})
    write_json(path, {"rates": [2.5]})
    assert read_json(path) == {"rates": [2.5]}
    assert [child.name for child in path.parent.iterdir()] == ["value.json"]


@pytest.mark.parametrize("damage", [b"", b'{"rates": [1.5', b"\xff\xfe\x00", b"[" * 100_000])
def test_damaged_files_read_as_none(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "value.json"
    path.write_bytes(damage)
    assert read_json(path) is None


def test_missing_files_and_folders_read_as_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "none.json") is None
    assert read_json(tmp_path) is None


def test_a_value_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, 1)
    with pytest.raises(TypeError):
        write_json(path, {"value": object()})
    assert read_json(path) == 1


def test_a_write_that_breaks_off_leaves_the_old_file_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "value.json"
    write_json(path, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, 2)
    assert read_json(path) == 1
    assert [child.name for child in tmp_path.iterdir()] == ["value.json"]
