"""kimi_jax: Kimi Linear and Kimi K3 in JAX, spread over devices by the rules of `sharding_rules`.

model = kimi_jax.load()                       # the small trained checkpoint in the package, on one device
kimi_jax.generate(model, "In the beginning")[0].text
"""

from typing import Any

from kimi_jax import config
from kimi_jax.checkpoints.states import save_state
from kimi_jax.comparing.parity import Parity, parity
from kimi_jax.config import Config
from kimi_jax.convert import convert, dry_run
from kimi_jax.drawing.draw import draw
from kimi_jax.generation.completion import Completion, Piece
from kimi_jax.generation.generate import generate, stream
from kimi_jax.loading import export_safetensors, load, load_state, random_model, save
from kimi_jax.planning.explain import Explanation, explain, explain_diff
from kimi_jax.planning.plan import Plan, layouts_that_fit, plan
from kimi_jax.runtime import Model
from kimi_jax.sampling import Greedy, MinP, Temperature, TopK, TopP
from kimi_jax.state import State
from kimi_jax.testing import simulate_devices
from kimi_jax.version import __version__

__all__ = [
    "KIMI_K3",
    "KIMI_LINEAR_48B",
    "Completion",
    "Config",
    "Explanation",
    "Greedy",
    "MinP",
    "Model",
    "Parity",
    "Piece",
    "Plan",
    "State",
    "Temperature",
    "TopK",
    "TopP",
    "__version__",
    "convert",
    "draw",
    "dry_run",
    "explain",
    "explain_diff",
    "export_safetensors",
    "generate",
    "layouts_that_fit",
    "load",
    "load_state",
    "parity",
    "plan",
    "random_model",
    "save",
    "save_state",
    "simulate_devices",
    "stream",
]


def __getattr__(name: str) -> Any:
    """The published configurations, read when first asked for."""
    if name in ("KIMI_K3", "KIMI_LINEAR_48B"):
        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
