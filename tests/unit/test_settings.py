"""testbed/settings.py: the texts of a cluster's configuration, without a cluster."""

from __future__ import annotations

import pytest

from testbed import TestbedError
from testbed.jobs import parse_record
from testbed.settings import Settings, cgroup_conf, environment, hosts_file, slurm_conf


def test_settings_survive_the_disk() -> None:
    """What `up` saves is what the next verb reads."""
    settings = Settings("other", 3, 2, ("KillWait=5",), plugin=True, controller_hook=True, site="keep = 3\n")
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize("bad", [{"name": "../x"}, {"name": "a.b"}, {"nodes": 0}, {"nodes": 201}, {"conf": ("x",)}])
def test_bad_settings_are_refused(bad: dict[str, object]) -> None:
    """A name that could leave its folder, too many nodes or a malformed line never becomes a cluster."""
    with pytest.raises(TestbedError, match=r"allowed|Key=Value"):
        Settings(**bad)


def test_conf_replaces_and_adds() -> None:
    """A key replaces its default whatever its case; partitions add up."""
    text = slurm_conf(Settings(nodes=2, conf=("slurmdtimeout=7", "PartitionName=b Nodes=n1")), memory_mib=100)
    lines = text.splitlines()
    assert [line for line in lines if line.lower().startswith("slurmdtimeout")] == ["slurmdtimeout=7"]
    assert [line.split()[0] for line in lines if line.startswith("P") and "Name" in line] == [
        "PartitionName=main",
        "PartitionName=b",
    ]


def test_every_host_has_its_own_address() -> None:
    """No two hosts share an address, and /etc/hosts names them all."""
    settings = Settings(nodes=200)
    addresses = {h.address for h in settings.hosts}
    assert len(addresses) == 201
    assert all(f"{h.address} {h.name}\n" in hosts_file(settings) for h in settings.hosts)


def test_cgroups_are_off_where_slurm_knows_how() -> None:
    """Slurm 22.05 rejects the line that 24.11 needs."""
    assert cgroup_conf((22, 5)) == ""
    assert cgroup_conf((24, 11)) == "CgroupPlugin=disabled\n"


def test_environment_forgets_the_callers_job() -> None:
    """A command on a host does not take itself for part of the job or MPI world the caller runs in."""
    env = environment({"SLURM_JOB_ID": "7", "OMPI_COMM_WORLD_RANK": "1", "PATH": "/bin", "KEEP": "1"}, ("/v",), "root")
    assert "SLURM_JOB_ID" not in env
    assert "OMPI_COMM_WORLD_RANK" not in env
    assert env["KEEP"] == "1"
    assert env["PATH"].split(":")[:2] == ["/v", "/bin"]
    assert environment({}, (), "jituser")["HOME"] == "/home/jituser"


def test_records_may_hold_spaces() -> None:
    """Values of scontrol with spaces and equal signs are read whole."""
    fields = parse_record("JobId=3 JobName=a b TRES=cpu=4,node=2 Command=/x y Restarts=0")
    assert fields == {"JobId": "3", "JobName": "a b", "TRES": "cpu=4,node=2", "Command": "/x y", "Restarts": "0"}
