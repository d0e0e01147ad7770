"""The bench of the kernels alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from kimi_jax.measuring import kernels
from kimi_jax.measuring.machine import Machine
from tests.helpers import lowered_for_a_gpu

MACHINE = Machine("test", 1, copy_rate=1e9, matrix_rate=1e9, versions={})
SMALL = {
    "MLA decode": lambda: kernels.mla_decode(4, 512),
    "MLA prefill": lambda: kernels.mla_prefill(2, 128),
    "KDA step": lambda: kernels.kda(2, 1, 1),
    "KDA chunks": lambda: kernels.kda(2, 1, 70),
}


def test_cases_are_timed_and_compared_with_float32(monkeypatch):
    monkeypatch.setattr(kernels, "measure_machine", lambda dtype: MACHINE)
    monkeypatch.setattr(kernels, "CACHES", 1_000_000)
    report = kernels.run(make() for make in SMALL.values())
    assert [line.name.split(",")[0] for line in report.lines] == list(SMALL)
    for line in report.lines:
        assert line.seconds > 0 and line.floor > 0
        assert 0 < line.error < 1e-2
    assert len(json.loads(report.to_json())["lines"]) == len(SMALL)


def test_every_kernel_has_its_cases():
    names = [case.name for case in kernels.all_cases()]
    assert len(names) == len(set(names)) == 4 + 1 + 4 + 1 + 4 + 1


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # by JAX 0.12
@pytest.mark.parametrize("case", list(kernels.all_cases()), ids=lambda case: case.name)
def test_every_kernel_lowers_for_cuda_with_this_jax(case):
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    assert "triton" in lowered_for_a_gpu(case.call, *shapes)


@pytest.mark.parametrize(("tokens", "hit"), [(1, 8), (4096, 256)])
def test_experts_hit_are_those_that_random_choices_reach(tokens, hit):
    assert kernels.routed(tokens).bytes == pytest.approx(6 * 1024 * 2304 * hit, rel=1e-3)


def test_a_loop_calls_every_set_on_the_states_that_it_gave_back():
    def call(x, state):
        return x + state, state + 1

    sets = [(jnp.full((2,), n), jnp.float32(10 * n)) for n in (1.0, 2.0)]
    found = kernels._looped((call, (1,), SingleDeviceSharding(jax.devices()[0])), *sets)
    for (x, state), (out, last) in zip(sets, found, strict=True):
        np.testing.assert_array_equal(last, state + kernels.ROUNDS)
        np.testing.assert_array_equal(out, x + state + kernels.ROUNDS - 1)
