"""What nvidia-smi, rocm-smi and slurm.conf say of GPUs; the texts have the form of the real tools'."""

from __future__ import annotations

import pytest

from slurm_plugin import gpu
from slurm_plugin.evidence import BAD, SUSPECT

HEAD = """
==============NVSMI LOG==============

Timestamp                                 : Sun Nov 29 20:00:00 2026
Driver Version                            : 570.158.01
CUDA Version                              : 12.8

Attached GPUs                             : {count}
"""
HOPPER = """GPU 00000000:{bus}:00.0
    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            SRAM Uncorrectable Parity     : {parity}
            SRAM Uncorrectable SEC-DED    : 0
            DRAM Correctable              : 12
            DRAM Uncorrectable            : {dram}
        Aggregate
            SRAM Correctable              : 0
            SRAM Uncorrectable Parity     : 0
            SRAM Uncorrectable SEC-DED    : 0
            DRAM Correctable              : 177
            DRAM Uncorrectable            : 3
            SRAM Threshold Exceeded       : {sram}
        Aggregate Uncorrectable SRAM Sources
            SRAM L2                       : 0
            SRAM SM                       : 0
    Remapped Rows
        Correctable Error                 : 1
        Uncorrectable Error               : 3
        Pending                           : {pending}
        Remapping Failure Occurred        : {failure}
        Bank Remap Availability Histogram
            Max                           : 639 bank(s)
            None                          : 0 bank(s)

"""
VOLTA = """GPU 00000000:{bus}:00.0
    ECC Errors
        Volatile
            Single Bit
                Device Memory             : 4
                Total                     : 4
            Double Bit
                Device Memory             : {double}
                L2 Cache                  : 0
                Total                     : {double}
        Aggregate
            Double Bit
                Device Memory             : 9
                Total                     : 9
    Retired Pages
        Single Bit ECC                    : 0
        Double Bit ECC                    : 1
        Pending Page Blacklist            : {pending}
    Remapped Rows                         : N/A
"""
CONSUMER = """GPU 00000000:{bus}:00.0
    ECC Mode
        Current                           : N/A
    ECC Errors
        Volatile
            SRAM Uncorrectable Parity     : N/A
            DRAM Uncorrectable            : N/A
    Remapped Rows                         : N/A
"""
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n\n"
)


def hopper(bus: str, **values: object) -> str:
    """One GPU of today, fine unless told otherwise."""
    return HOPPER.format(
        **{"bus": bus, "parity": 0, "dram": 0, "sram": "No", "pending": "No", "failure": "No", **values}
    )


def whole(*gpus: str) -> str:
    """What nvidia-smi prints for these."""
    return HEAD.format(count=len(gpus)) + "".join(gpus)


def told(text: str, code: int | None = 0, expected: int = 0) -> list[tuple[str, str]]:
    """Grade and words of what is found."""
    return [(f.grade, f.what) for f in gpu.nvidia(text, code, expected)]


def test_healthy_gpus_of_every_age_are_fine() -> None:
    """Corrected errors, errors of former days and rows remapped long ago are no evidence, nor is a GPU without ECC."""
    text = whole(hopper("17"), VOLTA.format(bus="3B", double=0, pending="No"), CONSUMER.format(bus="65"))
    assert told(text, expected=3) == []


def test_uncorrectable_errors_since_the_last_reset_are_bad() -> None:
    """In new GPUs and in old ones, summed up, and by the name of the GPU."""
    text = whole(hopper("17", dram=2, parity=1), hopper("2A"), VOLTA.format(bus="3B", double=5, pending="No"))
    assert told(text) == [
        (BAD, "GPU 00000000:17:00.0: 3 uncorrectable ECC errors"),
        (BAD, "GPU 00000000:3B:00.0: 5 uncorrectable ECC errors"),
    ]


def test_memory_that_cannot_be_repaired_is_bad_and_a_repair_to_come_a_suspicion() -> None:
    """A remapping that failed, or too many SRAM errors: bad. One that waits for a reset: the job may run."""
    assert told(whole(hopper("17", failure="Yes", pending="Yes")))[0][0] == BAD
    assert told(whole(hopper("17", sram="Yes")))[0][0] == BAD
    assert [
        g for g, _ in told(whole(hopper("17", pending="Yes"), VOLTA.format(bus="3B", double=0, pending="Yes")))
    ] == [
        SUSPECT,
        SUSPECT,
    ]


def test_a_gpu_that_slurm_counts_on_is_missed() -> None:
    """Fewer than the node should have; more, or an unknown number, is fine."""
    text = whole(hopper("17"), hopper("2A"))
    assert told(text, expected=8) == [(BAD, "2 of 8 GPUs answer")]
    assert told(text, expected=2) == told(text, expected=1) == told(text) == []


@pytest.mark.parametrize(
    "line",
    [
        "Unable to determine the device handle for GPU3: 0000:5F:00.0: Unknown Error",
        "Unable to determine the device handle for GPU 0000:04:00.0: GPU is lost.  Reboot the system",
    ],
)
@pytest.mark.parametrize("code", [0, 15])
def test_a_gpu_that_the_driver_has_lost_is_bad(line: str, code: int) -> None:
    """Whatever the exit code, and told once."""
    ((grade, what),) = told(line + "\n" + whole(hopper("17")), code, expected=2)
    assert grade == BAD
    assert what == line


def test_a_driver_that_does_not_work_is_bad_only_where_gpus_are_expected() -> None:
    """The tool is often installed on nodes without a GPU."""
    assert told(NO_DRIVER, 9) == told("No devices were found\n", 6) == []
    ((grade, what),) = told(NO_DRIVER, 9, expected=4)
    assert grade == BAD
    assert what.startswith("0 of 4 GPUs answer (NVIDIA-SMI has failed")


def test_no_answer_in_time_is_a_suspicion() -> None:
    """A driver without persistence mode may be that slow."""
    assert told("", None, expected=4) == [(SUSPECT, "nvidia-smi does not answer")]
    assert told("", None) == []


AMD = "".join(f"GPU[{n}]\t\t: Device Name: \t\tAMD Instinct MI250X\nGPU[{n}]\t\t: GUID: \t\t{n}\n" for n in range(4))


def test_amd_gpus_are_counted_and_their_errors_read() -> None:
    """The driver's own counters tell uncorrectable errors."""
    fine = {"card0/umc": "ue: 0\nce: 7\n", "card1/gfx": ""}
    assert gpu.amd(AMD, 0, fine, 4) == []
    (found,) = gpu.amd(AMD, 0, {**fine, "card1/umc": "ue: 2\nce: 0\n"}, 4)
    assert (found.grade, found.what) == (BAD, "GPU card1/umc: 2 uncorrectable errors")
    (found,) = gpu.amd(AMD, 0, {}, 8)
    assert found.what == "4 of 8 GPUs answer"
    assert [f.grade for f in gpu.amd("", None, {}, 8)] == [SUSPECT]
    assert gpu.amd("ERROR:root:Driver not initialized (amdgpu not found in modules)\n", 1, {}, 0) == []


SLURM_CONF = """
ClusterName=x
GresTypes=gpu
NodeName=DEFAULT Gres=gpu:a100:4 CPUs=8
NodeName=n[1-8] State=UNKNOWN
nodename=fat1 Gres=gpu:h100:8(S:0-1),nvme:2 \\
    CPUs=96
NodeName=mixed Gres=gpu:a100:2,gpu:v100:1
NodeName=plain Gres=nvme:1
NodeName=one Gres=gpu
NodeName=mig Gres=gpu:1g.10gb:7,gpu:h100:1
#NodeName=old Gres=gpu:9
NodeName=bad[1- Gres=gpu:1
PartitionName=main Nodes=ALL
"""


@pytest.mark.parametrize(
    ("node", "gpus"),
    [("n7", 4), ("fat1", 8), ("mixed", 3), ("plain", 0), ("one", 1), ("mig", 0), ("old", 0), ("n9", 0), ("bad1", 0)],
)
def test_slurm_conf_tells_the_nodes_gpus(node: str, gpus: int) -> None:
    """By name or in a list, with types, sockets and defaults; slices of GPUs (MIG) cannot be counted."""
    assert gpu.of_node(SLURM_CONF, node) == gpus


@pytest.mark.parametrize(
    ("given", "gpus"), [("0", 1), ("2,7", 8), ("", 0), ("GPU-abc", 0), ("0,", 0), ("1 2", 0), ("٣", 0)]
)
def test_the_jobs_gpus_must_be_there(given: str, gpus: int) -> None:
    """The highest index tells the least number; what is no list of indices tells nothing."""
    assert gpu.of_job({"SLURM_JOB_GPUS": given}) == gpus
    assert gpu.of_job({"CUDA_VISIBLE_DEVICES": given}) == gpus
    assert gpu.of_job({}) == 0
    assert gpu.of_job({"SLURM_JOB_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"}) == 6
