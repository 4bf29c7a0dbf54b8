"""One program over several machines: JAX's own multi-controller runtime, joined with a clear error if nobody answers.

Every process runs the same script with its own number; the mesh then spans the devices of all. Nothing here knows of
stages.
"""

from __future__ import annotations

import socket
import time

import jax


def join_processes(coordinator: str, num_processes: int, process_id: int, *, timeout: int = 60) -> None:
    """Join a group of processes; must run before the first use of JAX's devices.

    On CPU devices the exchange between processes goes over gloo. If others do not come in time, JAX's runtime ends
    process 0 with DEADLINE_EXCEEDED.

    Args:
        coordinator: `host:port` of process 0, reachable from all; the same on all.
        timeout: seconds to wait for the others.

    Raises:
        ValueError: numbers or an address that make no group.
        TimeoutError: the coordinator cannot be reached.
    """
    host, port = _address(coordinator)
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id must lie in 0..{num_processes - 1} for {num_processes} processes, found {process_id}"
        )
    if process_id != 0:
        _wait_for(host, port, timeout)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator, num_processes, process_id, initialization_timeout=timeout, cluster_detection_method="deactivate"
    )


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"coordinator must be host:port of process 0, found {coordinator!r}")
    return host, int(port)


def _wait_for(host: str, port: int, timeout: int) -> None:
    """Try to reach the coordinator (the runtime's own failure to do so ends the process without a word)."""
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"process 0 does not answer at {host}:{port} within {timeout} s ({error}): start it first, and "
                    "give all processes an address of its machine that they can reach (not 127.0.0.1 across machines)"
                ) from error
            time.sleep(0.2)
