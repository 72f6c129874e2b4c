"""`jit-ckpt config`: what counts, and where it comes from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_plugin import contract
from slurm_plugin.effective import DEFAULT, effective, main
from slurm_plugin.site import Site, SiteError, parse

FILE = parse(b"enable = gpu\nkeep = 3\nrequeues = 50\nmax-requeues = 20\nmax-spares = 2\nhang = off\n")


def table(site: Site, **environ: str) -> dict[str, tuple[str, str]]:
    """Key -> (value, origin)."""
    return {row.key: (row.value, row.origin) for row in effective(site, environ, "/f")}


def test_without_anything_the_defaults_count() -> None:
    """Each key with a default is there and says so."""
    rows = table(Site())
    assert {origin for _, origin in rows.values()} == {DEFAULT}
    assert rows["dir"][0] == "./jit-ckpt"
    assert rows["hang-floor"][0] == "300"
    assert rows["shim"][0] == "on"
    assert rows["check-patience"][0] == "5"
    assert {"resume", "default-partition", "mounts"} == {*contract.ALLOWED, *contract.SITE_ALLOWED} - rows.keys()


def test_each_layer_is_named() -> None:
    """File with its line, variable, default; the variable wins key by key."""
    rows = table(FILE, SBATCH_JIT_CKPT="keep=5,resume=/d/m3-r0")
    assert rows["keep"] == ("5", "SBATCH_JIT_CKPT")
    assert rows["hang"] == ("off", "/f:6")
    assert rows["settle"] == ("30", DEFAULT)
    assert rows["resume"] == ("/d/m3-r0", "SBATCH_JIT_CKPT")


def test_limits_cut_defaults_and_refuse_wishes() -> None:
    """As sbatch does."""
    assert table(FILE)["requeues"] == ("20", "/f:4")
    with pytest.raises(contract.OptionError, match="key 'spares' is '3': this site allows at most 2"):
        table(FILE, SBATCH_JIT_CKPT="spares=3")


def test_the_plugins_arguments_win_over_the_file() -> None:
    """As in the plugin, limits too; what is not a key is left out, what it refuses is refused."""
    words = ("conf=/f", "keep=7", "shim-dir=/s", "shim=off", "max-requeues=5")
    rows = {row.key: (row.value, row.origin) for row in effective(FILE, {}, "/f", words, "/p:2")}
    assert (rows["keep"], rows["shim"]) == (("7", "/p:2"), ("off", "/p:2"))
    assert (rows["requeues"], rows["hang"]) == (("5", "/p:2"), ("off", "/f:6"))
    for word in ("kep=3", "keep=0", "python=/usr/bin/python3", "keep"):
        with pytest.raises(SiteError, match=f"^/p:2: cannot use key '{word.partition('=')[0]}'"):
            effective(FILE, {}, "/f", [word], "/p:2")


def test_the_plugins_line_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`jit-ckpt config` reads plugstack.conf beside slurm.conf, with the site's file that it names."""
    (tmp_path / "plugstack.conf").write_text(f"optional /x/jit_ckpt.so conf={tmp_path}/site.conf keep=9\n")
    (tmp_path / "site.conf").write_text("requeues = 3\n")
    assert main(["config", "--json"], {"SLURM_CONF": str(tmp_path / "slurm.conf")}) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["keep"] == {"value": "9", "from": f"{tmp_path}/plugstack.conf:1"}
    assert shown["requeues"] == {"value": "3", "from": f"{tmp_path}/site.conf:1"}


@pytest.mark.parametrize(("wish", "said"), [("off", "off"), ("", "on"), ("keep=1", "on")])
def test_the_variable_turns_the_option_on_and_off(wish: str, said: str) -> None:
    """Set means given, as with Slurm's own variables."""
    assert table(FILE)["enable"] == ("gpu", "/f:1")
    assert table(FILE, SBATCH_JIT_CKPT=wish)["enable"] == (said, "SBATCH_JIT_CKPT")


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table for people, JSON for scripts, one line and 1 for a file or a variable that cannot be used."""
    conf = tmp_path / "site.conf"
    conf.write_text("keep = 3\n")
    assert main(["config", "--conf", str(conf)], {}) == 0
    assert ["keep", "3", f"{conf}:1"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main(["config", "--json", "--conf", str(conf)], {}) == 0
    assert json.loads(capsys.readouterr().out)["keep"] == {"value": "3", "from": f"{conf}:1"}
    assert main(["config", "--conf", str(conf)], {contract.ENV_WISHES: "kep=3"}) == 1
    assert capsys.readouterr().err.startswith("jit-ckpt: SBATCH_JIT_CKPT: unknown key 'kep'")
    conf.write_text("kep = 3\n")
    assert main(["config", "--conf", str(conf)], {}) == 1
    assert capsys.readouterr().err.startswith(f"jit-ckpt: {conf}:1: cannot use key 'kep'")


def test_it_runs_with_a_bare_interpreter() -> None:
    """`jit-ckpt config` imports neither torch nor h5py nor numpy nor mpi4py."""
    code = (
        "import sys; from jitmpi import cli; cli.main(['config', '--conf', '/nonexistent']);"
        "print(sorted({'torch', 'h5py', 'numpy', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
