"""Times of phases: a timeline made by hand, read by the text of a step that XLA compiled."""

from collections import Counter

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

from kimi_jax.measuring import phases
from kimi_jax.measuring.floors import Cost, decode_costs
from kimi_jax.measuring.machine import Machine
from kimi_jax.measuring.phases import Event, Instructions, phase_times, profiled, read_events
from kimi_jax.measuring.timing import Decoding
from tests import layouts

MACHINE = Machine("test", 1, copy_rate=100.0, matrix_rate=1e9, versions={})
TEXT = """HloModule jit_run, is_scheduled=true

%fused_computation.1 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %neg.1 = f32[8]{0} negate(%p), metadata={op_name="jit(run)/layer_1/route/neg"}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %loop_fusion.2 = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused_computation.1
  %gemm.4 = f32[8]{0} fusion(%a), calls=%x, metadata={op_name="jit(run)/layer_0/kda_output/dot" deduplicated_name="gemm.4"}
  %gemm.5 = f32[8]{0} fusion(%a), calls=%x, metadata={op_name="jit(run)/layer_1/mla_output/dot" deduplicated_name="gemm.4"}
  %mul.1 = f32[8]{0} fusion(%a), calls=%x, metadata={op_name="jit(run)/layer_1/mul"}
  ROOT %call = f32[8]{0} custom-call(%a), metadata={op_name="jit(run)/layer_1/experts/cond/few_up/pallas_call"}
}
"""  # noqa: E501


def _times(*kernels: str, steps: int = 1, costs=None, seconds: float = 1.0):
    events = [Event("GPU:0", name, "command_buffer_1", float(i), 1e9 * (i + 1)) for i, name in enumerate(kernels)]
    rows = phase_times(events, TEXT, steps=steps, seconds=seconds, costs=costs or {}, machine=MACHINE)
    return {row.name: row for row in rows}


def test_one_kernel_in_several_places_takes_turns():
    line = '  %call.{0} = f32[8] custom-call(%a), metadata={{op_name="jit(run)/layer_{0}/{1}/norm_rows/pallas_call"}}\n'
    calls = line.format(0, "kda_mix") + line.format(1, "experts")
    instructions, turns = Instructions("ENTRY %main (a: f32[8]) -> f32[8] {\n" + calls + "}\n"), Counter()
    names = "norm_rows", "norm_rows__1", "norm_rows_mosaic_gpu_0"  # of two shapes, and as Mosaic calls it
    found = [instructions.phase(Event("GPU:0", name, "command_buffer_1", 0.0, 1.0), turns) for name in names]
    assert found == ["KDA mix", "experts", "KDA mix"]


def test_kernels_are_found_by_instruction_by_what_was_fused_and_by_the_name_of_a_pallas_call():
    found = _times("loop_fusion_2", "few_up")
    assert (found["route"].seconds, found["experts"].seconds) == (1, 2)


def test_equal_fusions_that_share_a_kernel_take_turns():
    found = _times("gemm_4", "gemm_4", "gemm_4", "gemm_4")
    assert (found["KDA projections"].seconds, found["MLA projections"].seconds) == (1 + 3, 2 + 4)
    assert found["KDA projections"].kernels == 2


def test_an_unknown_kernel_takes_the_phase_around_it_or_behind_a_norm():
    assert _times("few_up", "nvjet_tst", "few_up")["experts"].kernels == 3
    assert _times("mul_1", "nvjet_tst", "few_up")["experts"].kernels == 2
    assert _times("loop_fusion_2", "nvjet_tst", "few_up")[phases.UNKNOWN].seconds == 2


@pytest.mark.parametrize(
    "name", ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", "all_to_all_3", "AllGatherKernel", "psum_7"]
)
def test_collectives_are_a_phase_of_their_own(name):
    """NCCL's kernels, and those that XLA writes itself, which are called after JAX's function."""
    assert _times("few_up", name, "few_up")[phases.COLLECTIVES].kernels == 1


def test_steps_devices_and_floors_are_divided_out():
    events = [Event(f"GPU:{d}", "few_up", "", float(i), 2e9) for d in range(2) for i in range(6)]
    costs = {"experts": Cost(bytes=100.0, operations=5.0)}
    (row, idle) = phase_times(events, TEXT, steps=3, seconds=5.0, costs=costs, machine=MACHINE)
    assert (row.seconds, row.kernels, row.floor, row.share) == (4, 2, 1, 0.8)
    assert (idle.name, idle.seconds) == (phases.BETWEEN, 1)


def test_every_phase_of_a_compiled_decode_step_is_found_in_its_text():
    model = layouts.one_device()
    found = set(Instructions(Decoding(model, 4, 64).text()).own.values())
    config = model.config
    assert set(decode_costs(config, model.layout, "float32", 4, 64, 8.0)) - {"norms and sums"} <= found


def test_streams_of_gpus_are_read_and_other_modules_left_out():
    plane = """planes { name: "/device:GPU:0"
      event_metadata { key: 1 value { id: 1 name: "few_up" } }
      stat_metadata { key: 1 value { id: 1 name: "hlo_module" } }
      lines { name: "Stream #13" timestamp_ns: 5
        events { metadata_id: 1 offset_ps: 1000 duration_ps: 2000 stats { metadata_id: 1 str_value: "jit_run" } }
        events { metadata_id: 1 offset_ps: 9000 duration_ps: 2000 stats { metadata_id: 1 str_value: "jit_other" } } }
      lines { name: "Steps" events { metadata_id: 1 duration_ps: 7000 } } }
      planes { name: "/host:CPU" lines { name: "Stream" events { duration_ps: 1 } } }"""
    data = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(plane))
    assert [(e.device, e.name, e.duration) for e in read_events(data, "jit_run")] == [("/device:GPU:0", "few_up", 2)]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a device with a timeline")
def test_cpus_have_no_timeline():
    assert profiled(lambda: np.zeros(1), "jit_run") == []
