"""What has to be settled before JAX makes its devices: which they are, how long XLA waits, where programs are kept.

The one place that touches JAX's process-wide settings. Everything here must run before the first use of a device;
values only, nothing of stages.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from spd_jax.parallel.processes import join_processes

# A simulated device that is late to a collective waits for a busy core; it is not stuck, as XLA would soon suppose. It
# would end the process with pages of addresses: whether a program is stuck is the business of `parallel.watch`.
XLA_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 3600,
    "xla_cpu_collective_call_terminate_timeout_seconds": 86400,
}


def set_up_platform(
    *,
    devices: int | None = None,
    compilation_cache: str | None = None,
    coordinator: str | None = None,
    num_processes: int = 1,
    process_id: int = 0,
) -> None:
    """Prepare JAX for a run, and let it make its devices.

    Args:
        devices: simulate so many devices on the CPU; None takes what JAX finds.
        compilation_cache: folder where compiled programs are kept for the next run.
        coordinator: `host:port` of process 0 of several; the other two say how many and which.

    Raises:
        ValueError, TimeoutError: as `join_processes`.
        RuntimeError: as `simulate_devices` and `find_devices`.
    """
    given = os.environ.get("XLA_FLAGS", "")
    ours = [f"--{name}={seconds}" for name, seconds in XLA_FLAGS.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([*ours, given]).strip()
    if compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", compilation_cache)
    if coordinator is not None:
        join_processes(coordinator, num_processes, process_id)
    if devices is not None:
        simulate_devices(devices)
    find_devices()


def find_devices() -> list[Any]:
    """JAX's devices; the first call makes them, and finds out whether what JAX was told to use is there.

    Raises:
        RuntimeError: it is not; names the platform and how to get the CPU.
    """
    asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return jax.devices()
    except (AssertionError, RuntimeError) as error:  # jax 0.10 asserts where a GPU is asked for and none is there
        why = str(error).partition("(set JAX_PLATFORMS")[0].strip() or "JAX finds no such device"
        raise RuntimeError(
            f"JAX was told to run on {asked or 'what there is'} (JAX_PLATFORMS) and cannot: {' '.join(why.split())}. "
            "Give JAX_PLATFORMS=cpu for the CPU, or --devices N for N simulated devices on it"
        ) from error


def simulate_devices(count: int) -> None:
    """Ask for `count` simulated CPU devices; must run before the first use of JAX's devices.

    Raises:
        RuntimeError: JAX has already made its devices and there are fewer.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if len(jax.devices()) < count:
            raise RuntimeError(
                f"{count} simulated devices were asked for after JAX had started with {len(jax.devices())}: ask before "
                "the first use of JAX, or set jax_num_cpu_devices when the program starts"
            ) from error
    if len(jax.devices()) < count:
        raise RuntimeError(f"asked for {count} simulated devices, JAX made {len(jax.devices())}")
