import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from memopt.disk_cache import cache_folder, read_json, write_json, write_text


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


def in_a_child(run: Callable[[], object]) -> int:
    """Run a function in a fork of this process; its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


OLD, NEW = {"old": list(range(20))}, {"new": list(range(100, 160))}


@pytest.mark.parametrize("size", [0, 1, 7, 64, 200, 10_000])
def test_killed_at_any_byte_the_old_file_is_there(tmp_path: Path, size: int) -> None:
    path = tmp_path / "value.json"
    write_json(path, OLD)

    def killed() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends a process whose file exceeds the limit
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        write_json(path, NEW)

    code = in_a_child(killed)
    assert code == (0 if size == 10_000 else -signal.SIGXFSZ)
    assert read_json(path) == (NEW if code == 0 else OLD)
    write_json(path, NEW)
    assert read_json(path) == NEW


def test_what_killed_processes_left_is_deleted_in_time(tmp_path: Path) -> None:
    old, fresh = tmp_path / "a.json.0123.part", tmp_path / "b.json.4567.part"
    old.write_text("half")
    fresh.write_text("under way")
    os.utime(old, (0, 0))
    write_json(tmp_path / "value.json", 1)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["b.json.4567.part", "value.json"]


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, [0] * 1000)
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            for _ in range(25):
                write_json(path, [number] * 1000)
            os._exit(0)
        children.append(child)
    seen = 0
    while children:
        value = read_json(path)
        assert value is not None
        assert value == [value[0]] * 1000
        seen += 1
        done, _ = os.waitpid(children[0], os.WNOHANG)
        children = children[1:] if done else children
    assert seen
    assert [child.name for child in tmp_path.iterdir()] == ["value.json"]


def test_a_user_without_a_home_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("MEMOPT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(OSError, match="home directory"):
        cache_folder()


def test_a_link_stays_one_and_the_usual_rights_are_given(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    write_text(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    assert (tmp_path / "file").stat().st_mode == plain.stat().st_mode
    write_text(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()
