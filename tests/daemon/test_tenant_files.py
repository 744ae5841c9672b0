"""The files of a tenant in the home, which are searched while the daemon writes to others."""

from pathlib import Path

from covenant.daemon.tenant_files import HomeFiles


def test_a_file_that_is_deleted_during_a_search_is_passed_over(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("client@acme")
    search = HomeFiles(tmp_path)._search("acme", ["K" * 44])
    first = next(search)
    (tmp_path / "b").unlink()  # as the daemon replaces a task log or a temporary file
    assert [first.place, *(found.place for found in search)] == ["a", "c"]
