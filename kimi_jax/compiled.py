"""What is compiled, and how: a model's steps, and arrays that are born where they live. jit lives here alone.

Steps are compiled once for each shape and kept with the model; the parameters are passed as a pure dict with each
call, the graph of modules is closed over.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding
from jax.typing import DTypeLike

from kimi_jax import processes
from kimi_jax.config import Config
from kimi_jax.state import Cache, cache_shapes, cache_shardings
from sharding_rules import DeviceMesh, Layout

STEP, BORN = "jit_run", "jit_born"  # what XLA and its profiler call what is compiled here


@partial(jax.jit, static_argnums=(0, 1, 2))
def born(make: Callable, about: Any, sharding: Sharding, *arrays: Any) -> Any:
    """make(about, *arrays), new arrays, or trees of them, born on `sharding`; compiled once for each `about`."""
    return jax.lax.with_sharding_constraint(make(about, *arrays), sharding)


@lru_cache(maxsize=64)
def empty(
    config: Config, layout: Layout, mesh: DeviceMesh, batch: int, capacity: int, dtype: DTypeLike
) -> Callable[[], Cache]:
    """What makes an empty cache, born sharded: compiled here, run by whoever calls it."""
    shapes = cache_shapes(config, layout, batch, capacity, dtype)
    make = jax.jit(
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
        out_shardings=cache_shardings(config, layout, mesh),
    )
    return make.lower().compile()


class Compiled:
    """One step of a model, compiled once for each shape of its arguments and kept: nothing is traced twice.

    graph: the model's modules; their parameters are given with each call, of the same shapes and places every time.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        layout: Layout,
        mesh: DeviceMesh,
        step: Callable,
        *,
        out: Any,
        donate: Sequence[str] = (),
        static: Sequence[str] = (),
    ):
        def run(params: Any, *args: Any, **kwargs: Any):
            decoder = nnx.merge(graph, params)
            decoder.run_blocks(_alike())
            with jax.default_matmul_precision("highest"):  # of float32 products; those of bfloat16 are exact anyway
                return step(decoder, *args, **kwargs)

        self.mesh, self.whole = mesh, layout.sharding(mesh)
        self.executables: dict[Any, Any] = {}
        names = list(inspect.signature(step).parameters)  # the first is the module, made from the parameters
        self._jit = jax.jit(
            run,
            donate_argnums=tuple(names.index(name) for name in donate),
            static_argnames=static,
            out_shardings=out,
        )

    def __call__(self, params: Any, *args: Any, **static: Any) -> Any:
        """Run on these parameters."""
        args = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else processes.put(x, self.whole), args)
        return self.compile(params, *args, **static)(params, *args)

    def compile(self, params: Any, *args: Any, **static: Any) -> Any:
        """The executable for parameters and arguments (arrays or ShapeDtypeStructs) of these shapes; nothing runs.

        Raises ValueError if there are no parameters.
        """
        if params is None:
            raise ValueError("the model has no parameters: kimi_jax.load or kimi_jax.random_model makes one that has")
        leaves, structure = jax.tree.flatten(args)
        key = (structure, tuple((np.shape(x), jnp.result_type(x)) for x in leaves), tuple(static.items()))
        if key not in self.executables:
            args = jax.tree.map(self._placed, args)
            with jax.set_mesh(self.mesh):
                self.executables[key] = self._jit.lower(params, *args, **static).compile()
        return self.executables[key]

    def _placed(self, x: Any) -> Any:
        """An argument with a placement: on every device, unless it has one."""
        if isinstance(x, jax.Array) or getattr(x, "sharding", None) is not None:
            return x
        return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=self.whole)


def _alike() -> Callable[..., Any]:
    """run(module, *args) = module(*args), traced and lowered once for all modules that differ in their values only.

    XLA puts what is shared back in its place. A new function for each program: JAX keeps what it traced by function,
    and a change to a layer's code is to be seen by the next program.
    """

    @partial(jax.jit, static_argnums=0)
    def layer(graph: nnx.GraphDef, arrays: nnx.State, *args: Any) -> Any:
        return nnx.merge(graph, arrays)(*args)

    return lambda module, *args: layer(*nnx.split(module), *args)
