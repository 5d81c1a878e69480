"""Tests of builds are skipped if they have passed with the same sources, and only then."""

import json
import types

import proofs
import pytest


@pytest.fixture
def item(tmp_path, monkeypatch):
    """A test that has passed, and depends on one source."""
    monkeypatch.setattr(proofs, "FOLDER", tmp_path / "known")
    monkeypatch.setattr(proofs, "RECORD", tmp_path / "proofs.json")
    monkeypatch.setattr(proofs, "recorded", proofs.recorded.__wrapped__)
    monkeypatch.setattr(proofs, "digest_of", proofs.digest_of.__wrapped__)
    for name in ("test_it.py", "source.h"):
        (tmp_path / name).write_text("1")
    made = types.SimpleNamespace(
        nodeid="tests/test_it.py::test_it",
        path=tmp_path / "test_it.py",
        fixturenames=[],
        user_properties=[("proves", ("natively", "a kernel"))],
        marked=[],
        iter_markers=lambda name: [types.SimpleNamespace(args=(tmp_path / "source.h",))],
    )
    made.add_marker = made.marked.append
    proofs.note(made)
    made.user_properties = []
    return made


def is_skipped(item):
    item.marked.clear()
    proofs.skip_what_is_proved([item])
    return bool(item.marked)


def test_a_test_is_skipped_until_something_changes(item, tmp_path, monkeypatch):
    assert is_skipped(item)
    assert item.user_properties == [("proves", ("natively", "a kernel"))]
    for name in ("test_it.py", "source.h"):
        (tmp_path / name).write_text("2")
        assert not is_skipped(item)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(proofs, "surroundings", lambda: b"another compiler")
    assert not is_skipped(item)


def test_what_runs_on_a_card_and_where_nothing_is_kept_is_not_skipped(item, monkeypatch):
    item.fixturenames.append("gpu")
    assert not is_skipped(item)
    item.fixturenames.clear()
    monkeypatch.setattr(proofs, "FOLDER", None)
    assert not is_skipped(item)


def test_the_record_keeps_what_is_current(item, tmp_path, monkeypatch):
    proofs.record([item])
    (name,) = json.loads(proofs.RECORD.read_text())
    sources, surroundings = name.split()
    others = {
        f"{sources} elsewhere": {"day": "2026-01-01", "test": item.nodeid},
        f"outdated {surroundings}": {"day": "2025-01-01", "test": item.nodeid},
    }
    proofs.RECORD.write_text(json.dumps(json.loads(proofs.RECORD.read_text()) | others))
    monkeypatch.setattr(proofs, "FOLDER", tmp_path / "a new clone's")
    assert is_skipped(item)
    proofs.record([item])
    assert sorted(json.loads(proofs.RECORD.read_text())) == sorted([name, f"{sources} elsewhere"])
