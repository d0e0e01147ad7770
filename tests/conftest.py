"""Test session: eight simulated devices, strict promotion, a compilation cache that is kept, shared folders."""

import gc
import os
import signal
from pathlib import Path

# Most of the suite's time is compiling: one LLVM module a program and no LLVM passes take a third of the time.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0"
)

import jax
import pytest

ROOT = Path(__file__).parent

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update(
    "jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT.parent / ".jax_cache"))
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_finish():
    """Look for garbage less often and not in what was imported: tracing makes much, and nearly all of it stays."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def ctrl_c():
    """Python's own answer to SIGINT, which a process that a shell starts in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of test data: small checkpoints and their golden files."""
    return ROOT / "data"


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The trained checkpoint that ships in the package."""
    return ROOT.parent / "kimi_jax" / "assets" / "kimi-linear-tiny"


@pytest.fixture(scope="session")
def models(data, tiny):
    """models(name) -> that checkpoint in float32 on one device, loaded once a session."""
    import kimi_jax

    loaded = {}

    def get(name):
        if name not in loaded:
            folder = tiny if name == tiny.name else data / name
            loaded[name] = kimi_jax.load(folder, dtype="float32", progress=False)
        return loaded[name]

    return get
