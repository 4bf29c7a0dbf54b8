"""Memory that malloc keeps: in a process of its own, since the setting stays until it ends."""

import subprocess
import sys

import pytest

from spd_jax.training.allocator import keep_freed_memory

# Three times a large array is made and dropped; the pages that the kernel hands out are counted.
PROGRAM = """
import platform, resource, sys
import numpy as np
from spd_jax.training.allocator import keep_freed_memory
if platform.libc_ver()[0] != "glibc":
    print("no glibc"); sys.exit()
assert not sys.argv[1:] or keep_freed_memory()
faults = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.full(1 << 24, 1.0, np.float32)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""


def faults(*arguments: str) -> int:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()
    if shown == "no glibc":
        pytest.skip("another C library")
    return int(shown)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is on Linux")
def test_a_large_array_takes_the_memory_of_the_one_before():
    assert faults() > 20
    assert faults("keep") < 5


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
