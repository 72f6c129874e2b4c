"""The kernel's log: which messages count, for what, and from where on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slurm_plugin import kernel_log
from slurm_plugin.evidence import BAD, SUSPECT

BAD_TEXTS = (
    "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 95, pid=7194, Uncontained: FBHUB. RST: Yes, D-RST: No",
    "NVRM: Xid (PCI:0000:8b:00): 48, pid=7194, name=python, An uncorrectable double bit error (DBE) has been detected",
    "NVRM: Xid (PCI:0000:3b:00): 119, pid=1234, name=nvidia-smi, Timeout after 6s of waiting for RPC response",
    "NVRM: The NVIDIA GPU 0000:b3:00.0 NVRM: (PCI ID: 10de:26b5) installed in this system has NVRM: fallen off the bus",
    "NVRM: GPU 0000:06:00.0: GPU has fallen off the bus.",
    "amdgpu 0000:03:00.0: amdgpu: 1 uncorrectable hardware errors detected in umc block",
    "mce: [Hardware Error]: CPU 17: Machine Check Exception: 5 Bank 7: be00000000010090",
    "mce: Uncorrected hardware memory error in user-access at 3f2b4c000",
    "Memory failure: 0x3f2b4c: recovery action for dirty LRU page: Recovered",
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x3f2b4c)",
    "{3}[Hardware Error]: event severity: recoverable",
)
SUSPECT_TEXTS = (
    "blk_update_request: I/O error, dev sda, sector 2405881784 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 0",
    "I/O error, dev nvme0n1, sector 1213 op 0x1:(WRITE) flags 0x0 phys_seg 1 prio class 2",
    "critical medium error, dev sdb, sector 99 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
    "Buffer I/O error on dev dm-3, logical block 12, async page read",
    "EXT4-fs error (device sda2): ext4_find_entry:1682: inode #2: comm systemd: reading directory lblock 0",
    'XFS (nvme0n1p2): metadata I/O error in "xfs_da_read_buf+0xd9/0x120" at daddr 0x8 len 8 error 5',
    "nvme nvme1: I/O 12 QID 3 timeout, aborting",
    "nvme nvme1: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10",
    "pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:01:00.0",
)
FINE_TEXTS = (
    "NVRM: Xid (PCI:0000:c1:00): 31, pid=99, name=python, Ch 00000008, MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0",
    "NVRM: Xid (PCI:0000:c1:00): 13, pid=99, name=python, Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0)",
    "NVRM: Xid (PCI:0000:c1:00): 43, pid=99, name=python, Ch 00000010",
    "NVRM: Xid (PCI:0000:c1:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping",
    "NVRM: Xid (PCI:0000:c1:00): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No",
    "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build",
    "mce: [Hardware Error]: Machine check events logged",
    "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0)",
    "{1}[Hardware Error]: event severity: corrected",
    "I/O error, dev loop0, sector 12", "I/O error, dev fd0, sector 0", "EXT4-fs error (device loop3): x",
    "Out of memory: Killed process 1234 (python) total-vm:1kB",
    "python[99]: segfault at 0 ip 0 sp 0 error 4 in libc.so",
    "oops: NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus.",
)  # fmt: skip


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_broken_hardware_is_bad(text: str) -> None:
    """GPUs that are lost or corrupt memory, and errors of the node's own memory."""
    found = kernel_log.judge(text)
    assert found is not None
    assert found.grade == BAD


@pytest.mark.parametrize("text", SUSPECT_TEXTS)
def test_disks_and_file_systems_are_a_suspicion(text: str) -> None:
    """An error there may also be another machine's: a SAN's, a disk server's."""
    found = kernel_log.judge(text)
    assert found is not None
    assert found.grade == SUSPECT


@pytest.mark.parametrize("text", FINE_TEXTS)
def test_programs_errors_and_corrected_ones_say_nothing(text: str) -> None:
    """What a user's program can cause, what was corrected, and devices that users have."""
    assert kernel_log.judge(text) is None


@pytest.mark.parametrize("text", BAD_TEXTS + SUSPECT_TEXTS)
def test_no_user_can_write_such_a_message(text: str) -> None:
    """A process and a library may have any name; the kernel writes both when the process crashes."""
    for length in range(1, 16):
        for there in (text, text[length:], text[15:]):
            assert (
                kernel_log.judge(f"{text[:length]}[123]: segfault at 0 ip 0 sp 0 error 4 in {there}[5000+1000]") is None
            )
    assert kernel_log.judge(f"traps: {text}[123] general protection fault ip:0 sp:0 error:0 in {text}") is None


def test_a_fatal_xid_is_told_by_gpu_and_number() -> None:
    """So that whoever reads the reason knows which card."""
    found = kernel_log.judge(BAD_TEXTS[0])
    assert found is not None
    assert found.what == "GPU 0000:c1:00 Xid 79: fallen off the bus"


@pytest.fixture
def kmsg() -> Iterator[tuple[str, int]]:
    """A log as /dev/kmsg gives it: one record a read. Its path, and where to write records."""
    reader, writer = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    yield f"/proc/self/fd/{reader}", writer
    os.close(reader)
    os.close(writer)


def test_only_what_the_kernel_wrote_after_the_beginning_counts(kmsg: tuple[str, int]) -> None:
    """Not what was there before, not what programs wrote, not what cannot be read; the same message once."""
    path, writer = kmsg
    for raw in (
        f"4,10,5000,-;{BAD_TEXTS[0]}\n SUBSYSTEM=pci\n",
        f"12,11,6000,-;{BAD_TEXTS[1]}\n",  # a program of root's
        "no record",
        f"6,12,7000,-;{FINE_TEXTS[0]}\n",
        f"4,13,8000,-;{SUSPECT_TEXTS[0]}\n",
        f"4,14,8000,-;{SUSPECT_TEXTS[0]}\n",
        "6,15,9000,-;eth0: link becomes ready\n",
    ):
        os.write(writer, raw.encode())
    found, last = kernel_log.read(10, path)
    assert [f.grade for f in found] == [SUSPECT]
    assert last == 15
    os.write(writer, f"4,16,9000,-;{BAD_TEXTS[0]}\n".encode())
    assert [f.grade for f in kernel_log.read(15, path)[0]] == [BAD]
    assert kernel_log.end(path) == 0  # all of it is read


@pytest.mark.parametrize("text", [b"", b"x", b"abc -1\n", b"abc 1 2\n", b"../etc 1\n", b"a" * 70 + b" 1\n"])
def test_positions_are_read_back_and_damage_is_none(text: bytes) -> None:
    """A place in the log belongs to one boot."""
    position = kernel_log.Position("f3b92e9a-c611", 4711)
    assert kernel_log.parse_position(kernel_log.write_position(position)) == position
    assert kernel_log.parse_position(text) is None
