"""The benchmark of checkpoints: it times what it says, and leaves nothing behind."""

import json

import pytest

from kimi_jax.__main__ import main
from kimi_jax.measuring import disk
from kimi_jax.placement import weight_bytes
from sharding_rules import SINGLE, helix


def test_a_run_times_everything_beside_the_disk_and_cleans_up(tmp_path, monkeypatch, capsys):
    small = disk.replace(disk.sized(1), hidden_size=64, intermediate_size=64, moe_intermediate_size=32, vocab_size=64)
    monkeypatch.setattr(disk, "sized", lambda nbytes: small)
    forgotten = []
    monkeypatch.setattr(disk, "forget", forgotten.append)
    work = tmp_path / "work"
    work.mkdir()
    assert main(["disk", str(work), "--size", "1MB", "--rounds", "2", "--cold", "--json", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out").read_text())
    rows = {row["what"]: row for row in report["rows"]}
    assert list(rows) == ["read", "read and keep", "copy", "load", "load a save", "save", "export"]
    for row in rows.values():
        assert row["slowest"] <= row["rate"] <= row["fastest"]
        assert len(row["share"]) == 3
    assert all(rows[own]["share"][own] == 1 for own in disk.OWN)
    assert report["cold"] and report["rounds"] == 2 and report["nbytes"] > 1 << 20
    assert len(set(forgotten)) > 50  # those of the saves too
    assert not list(work.iterdir())
    assert "of copy" in capsys.readouterr().out


def test_the_checkpoint_has_about_the_size_that_was_asked_for():
    for nbytes in (10**9, 5 * 10**9):
        config = disk.sized(nbytes)
        assert abs(weight_bytes(config, SINGLE, config.dtype) - nbytes) < 0.1 * nbytes
        assert config.num_experts % 8 == 0


def test_copies_are_whole_and_a_forgotten_file_reads_the_same(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(bytes(range(256)) * 100)
    disk.forget(file)
    disk.copy([file], tmp_path / "copied")
    assert (tmp_path / "copied" / "a").read_bytes() == bytes(range(256)) * 100


def test_a_folder_without_room_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"left; four times 909\.49 TiB was wanted"):
        disk.run(tmp_path, nbytes=10**15, layout=helix(1, 1))
