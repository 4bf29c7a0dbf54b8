"""Several processes on one machine: the same tokens as one process, and a clear error when nobody answers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spd_jax.parallel.processes import join_processes

SCRIPT = Path(__file__).with_name("two_processes.py")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(process: int, processes: int, port: int, devices: int) -> subprocess.Popen[str]:
    arguments = [str(process), str(processes), f"127.0.0.1:{port}", str(devices)]
    return subprocess.Popen([sys.executable, str(SCRIPT), *arguments], stdout=subprocess.PIPE, text=True)


def last_line(process: subprocess.Popen[str]) -> object:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(out.strip().splitlines()[-1])


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one() -> None:
    """Q08: a mesh over two processes on loopback."""
    port = free_port()
    alone = last_line(start(0, 1, port, 4))
    together = [start(process, 2, port, 2) for process in range(2)]
    assert [last_line(process) for process in together] == [alone, alone]


def test_a_coordinator_that_does_not_answer_is_named_soon() -> None:
    """Q08: a wrong address fails within the time-out, with the address and what to do."""
    port, begin = free_port(), time.monotonic()
    with pytest.raises(TimeoutError, match=rf"process 0 does not answer at 127.0.0.1:{port} within 1 s"):
        join_processes(f"127.0.0.1:{port}", 2, 1, timeout=1)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("address", ["localhost", "host:", ":80", "host:http"])
def test_an_address_without_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        join_processes(address, 2, 1)


def test_a_process_number_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0..1 for 2 processes, found 2"):
        join_processes("127.0.0.1:1", 2, 2)
