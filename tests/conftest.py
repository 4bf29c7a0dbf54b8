"""One place that says what machine the tests run on: twelve simulated CPU devices, strict promotion, no network.

Everything here has to happen before JAX makes its first backend, so it happens on import, before any test module is.
"""

import gc
import os
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

from spd_jax.parallel.platform import set_up_platform

NUM_DEVICES = 12  # the largest mesh in the gate has 9 ranks; the rest lets a test place a mesh off device 0

os.environ["HF_HUB_OFFLINE"] = "1"  # a test that would fetch anything fails at once
os.environ["MPLBACKEND"] = "Agg"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its thread pool and fork do not mix, and the cores are busy

# A test has no watch: XLA itself ends a process that hangs in a collective.
_HANGS = "--xla_cpu_collective_call_terminate_timeout_seconds=900"
os.environ["XLA_FLAGS"] = f"{_HANGS} {os.environ.get('XLA_FLAGS', '')}".strip()

set_up_platform(devices=NUM_DEVICES)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Identical programs come up again and again, within a run and between runs. The size limit also makes JAX lock the
# folder, so that several runs may share it. Not the folder of the scripts: an entry that is written without a limit has
# no time of use, and with one such entry nothing can be written any more.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".cache" / "jax_tests"))
jax.config.update("jax_compilation_cache_max_size", 2**30)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

# The shapes in the library's signatures are checked while a function is traced; compiled code pays nothing.
install_import_hook("spd_jax", "beartype.beartype")


# By the seconds that they take, so that no process begins a long file when the other has nothing left to do.
HEAVIEST = (
    "models/test_families.py",
    "decode/test_layer_kinds.py",
    "test_defaults.py",
    "decode/test_verify.py",
    "decode/test_ends.py",
    "test_bad_input.py",
    "decode/test_sampled_text.py",
    "decode/test_faults.py",
    "decode/test_tree.py",
    "test_naive.py",
    "speculation/test_module.py",
    "infer/test_generate_errors.py",
    "decode/test_lossless.py",
    "cache/test_rollback.py",
    "decode/test_published.py",
    "infer/test_generate.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first; the order within a file and among the others stays."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(HEAVIEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Leave modules out of garbage collections: what was imported stays, and each full collection walks it."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart() -> None:
    """Stop with a reason if something made a backend first, since the settings above would then be silently ignored."""
    if len(jax.devices()) != NUM_DEVICES or jax.default_backend() != "cpu":
        raise RuntimeError(
            f"tests need {NUM_DEVICES} simulated CPU devices but JAX has {len(jax.devices())} of kind "
            f"{jax.default_backend()!r}: something used JAX before tests/conftest.py was read"
        )
