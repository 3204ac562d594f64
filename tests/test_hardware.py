"""How many threads: what is given, or the cores of this process, hyper-threads counted once."""

import ctypes
import os

import pytest

from support.tables import rows
from tinygpt import hardware
from tinygpt.hardware import thread_count


def test_default_is_one_for_each_core_that_this_process_may_use():
    assert 1 <= thread_count() == thread_count(None) <= os.cpu_count()


def write(path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A system whose cores are told by a table: core -> the text of its siblings' file, or None for no such file."""

    def build(siblings: dict[int, str | None]):
        for cpu, text in siblings.items():
            if text is not None:
                write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(siblings), raising=False)
        monkeypatch.setattr(hardware.sys, "platform", "linux")
        monkeypatch.setattr(hardware, "ROOT", tmp_path)
        return tmp_path

    return build


def test_hyper_threads_count_once(machine):
    machine({0: "0,4\n", 1: "1,5\n", 4: "0,4\n", 5: "1,5\n"})
    assert thread_count() == 2


def test_only_allowed_cores_count(machine):
    machine({2: "2,6\n", 3: "3,7\n", 7: "3,7\n"})
    assert thread_count() == 2


def test_cores_of_a_system_that_does_not_tell_siblings(machine):
    machine({0: None, 1: None, 2: None})
    assert thread_count() == 3


@pytest.mark.parametrize(("count", "expected"), [(6, 6), (None, 1)])
def test_a_system_without_affinity(monkeypatch, count, expected):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert thread_count() == expected


EIGHT = {cpu: f"{cpu}\n" for cpu in range(8)}


def test_only_fast_cores_of_a_hybrid_cpu_count(machine):
    """Two fast cores of two threads each, four slow ones of one."""
    root = machine(
        {0: "0-1\n", 1: "0-1\n", 2: "2-3\n", 3: "2-3\n", **{cpu: f"{cpu}\n" for cpu in range(4, 8)}}
    )
    write(root / "sys/devices/cpu_core/cpus", "0-3\n")
    write(root / "sys/devices/cpu_atom/cpus", "4-7\n")
    assert thread_count() == 2
    assert hardware.linux_cores({4, 5, 6}, root) == 3  # it may run on slow ones alone
    assert hardware.linux_cores({1, 5}, root) == 1


def test_only_fast_cores_of_a_hybrid_arm_cpu_count(machine):
    """As Linux tells their capacities: four fast cores, one of which may clock higher, and four slow ones."""
    root = machine({cpu: f"{cpu}\n" for cpu in range(8)})
    for cpu, capacity in enumerate([414, 414, 414, 414, 930, 930, 930, 1024]):
        write(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", f"{capacity}\n")
    assert thread_count() == 4
    assert hardware.linux_cores({0, 1, 4}, root) == 1
    assert hardware.linux_cores({0, 1, 2}, root) == 3  # it may run on slow ones alone


SHARES = rows(r"""
"0::/\n" | {"cpu.max": "200000 100000\n"} | 2
"0::/\n" | {"cpu.max": "max 100000\n"} | 8
"0::/\n" | {"cpu.max": "350000 100000\n"} | 3
"0::/\n" | {"cpu.max": "50000 100000\n"} | 1
"0::/\n" | {"cpu.max": "6400000 100000\n"} | 8
"0::/a/b\n" | {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"} | 3
"0::/a/b\n" | {"a/cpu.max": "max 100000\n", "a/b/cpu.max": "400000 100000\n"} | 4
"0::/host/path\n" | {"cpu.max": "200000 100000\n"} | 2
"4:cpu,cpuacct:/\n0::/\n" | {"cpu.max": "200000 100000\n"} | 2
"" | {} | 8
""")  # of 3.5, a fourth thread would be held up, and hold up all


@pytest.mark.parametrize(("cgroup", "files", "expected"), SHARES)
def test_a_containers_share_of_time_limits_the_count(machine, cgroup, files, expected):
    root = machine(EIGHT)
    write(root / "proc/self/cgroup", cgroup)
    for name, text in files.items():
        write(root / "sys/fs/cgroup" / name, text)
    assert thread_count() == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    rows("""
{"perflevel0": 4, "": 10} | 4
{"": 6} | 6
{} | 3
"""),
)
def test_only_fast_cores_of_a_mac_count(monkeypatch, told, expected):
    class Libc:
        def sysctlbyname(self, name, count, size, new, new_size):
            key = name.decode().removeprefix("hw.").removesuffix("physicalcpu").rstrip(".")
            count._obj.value = told.get(key, 0)
            return 0 if key in told else -1

    monkeypatch.setattr(hardware.sys, "platform", "darwin")
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: Libc())
    monkeypatch.setattr(hardware, "logical_cores", lambda: 3)
    assert thread_count() == expected


def test_the_cpus_name(machine, tmp_path, monkeypatch):
    """Of x86, of 64-bit ARM, whose /proc/cpuinfo has no name, and of a Mac."""
    machine({0: None})
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "neoverse-n1")
    write(
        tmp_path / "proc/cpuinfo",
        "processor\t: 0\nmodel name\t: AMD EPYC 9R14\n\nmodel name\t: AMD EPYC 9R14\n",
    )
    assert hardware.cpu_name() == "AMD EPYC 9R14"
    write(tmp_path / "proc/cpuinfo", "processor\t: 0\nBogoMIPS\t: 243.75\nCPU implementer\t: 0x41\n")
    assert hardware.cpu_name() == "neoverse-n1"

    class Mac:
        @staticmethod
        def sysctlbyname(name, value, size, new, new_size):
            if name != b"machdep.cpu.brand_string":
                return -1
            ctypes.memmove(value, b"Apple M2\0", 9)
            return 0

    monkeypatch.setattr(hardware.sys, "platform", "darwin")
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: Mac)
    assert hardware.cpu_name() == "Apple M2"
