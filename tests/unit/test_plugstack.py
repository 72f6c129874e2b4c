"""plugstack: what Slurm's list of plugins says of ours."""

from __future__ import annotations

from pathlib import Path

from slurm_plugin import contract
from slurm_plugin.plugstack import Line, arguments, first, read, site_file


def test_includes_are_read_where_they_stand(tmp_path: Path) -> None:
    """What plugstack.conf includes is part of it, each line with its place; a loop ends."""
    (tmp_path / "plugstack.conf.d").mkdir()
    path, inner = tmp_path / "plugstack.conf", tmp_path / "plugstack.conf.d" / "a.conf"
    path.write_text("# first\ninclude plugstack.conf.d/*.conf\n")
    inner.write_text("optional /x/jit_ckpt.so keep=3\n")
    assert read(str(path)) == [
        Line("# first", f"{path}:1"),
        Line("include plugstack.conf.d/*.conf", f"{path}:2"),
        Line("optional /x/jit_ckpt.so keep=3", f"{inner}:1"),
    ]
    assert read(str(tmp_path / "none")) is None
    inner.write_text("include *.conf\n")
    assert len(read(str(path)) or []) < 10


def test_arguments_are_those_of_our_plugin() -> None:
    """Another plugin's, and a comment, are not ours."""
    lines = ["#optional /x/jit_ckpt.so keep=1", "required /x/other.so keep=2", "optional jit_ckpt.so conf=/c\tkeep=3"]
    assert arguments([Line(text, str(number)) for number, text in enumerate(lines)]) == (["conf=/c", "keep=3"], "2")
    assert arguments([Line("optional /x/jit_ckpt.so", "0")]) == ([], "0")
    assert arguments([]) == ((), "")


def test_the_sites_file_is_the_plugins() -> None:
    """plugstack.conf may name another file, and its last word on that counts, as in the plugin."""
    assert site_file(["keep=3"]) == contract.SITE
    assert site_file(["conf=/a", "keep=3", "conf=/b"]) == "/b"


def test_the_one_beside_slurm_conf_comes_first(tmp_path: Path) -> None:
    """SLURM_CONF decides, as for Slurm's commands."""
    (tmp_path / "plugstack.conf").write_text("optional /x/y.so\n")
    assert first({"SLURM_CONF": str(tmp_path / "slurm.conf")})[0].text == "optional /x/y.so"
