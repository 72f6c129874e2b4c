"""expedite: which requeue a job asks for, from what is known of the cluster."""

from __future__ import annotations

import pytest

from slurm_plugin.expedite import Cluster, choose, version

ON = "cloud_dns, enable_expedited_requeue"


@pytest.mark.parametrize(
    ("cluster", "choice"),
    [
        (Cluster("slurm 25.11.0", ON), "expedite"),
        (Cluster("slurm 26.05.1-2", "Enable_Expedited_Requeue"), "expedite"),
        (Cluster("slurm 25.05.4", ON), "plain"),  # older: sbatch would refuse the word
        (Cluster("slurm 22.05.8", ""), "plain"),
        (Cluster("slurm 25.11.0", "(null)"), "plain"),  # not enabled: slurmctld would refuse the job
        (Cluster("slurm 25.11.0", "not_enable_expedited_requeue"), "plain"),
        (Cluster("slurm 25.11.0", ON, said=True), ""),
        (Cluster("slurm 25.11.0", ON, epilog=False), "plain"),
        (Cluster("unknown", ON), "plain"),
    ],
)
def test_expedited_only_where_it_works_and_was_not_decided(cluster: Cluster, choice: str) -> None:
    """Version, site, the user's word and a working epilog all have a say."""
    assert choose(cluster) == choice


def test_versions_are_compared_as_numbers() -> None:
    """9.1 is older than 25.11."""
    assert version("slurm 9.1") < version("slurm 25.11.0-rc1") == (25, 11)
