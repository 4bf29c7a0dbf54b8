"""How many programs JAX lowers while something runs: the tests that say what must not be compiled again count them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

LOWERED = "jaxpr_to_mlir_module_duration"


@contextlib.contextmanager
def lowerings() -> Iterator[list[str]]:
    """A list that grows by one entry with every program that is lowered."""
    lowered: list[str] = []

    def listen(event: str, seconds: float, **facts: Any) -> None:
        if event.endswith(LOWERED):
            lowered.append(str(facts))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lowered
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
