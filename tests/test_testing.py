"""Simulated devices, each claim in a Python of its own: JAX counts its devices only once."""

import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

from kimi_jax.testing import simulate_devices

ROOT = Path(__file__).parent.parent


def python(code, *args):
    """The last line of stdout, or of stderr if the code raises."""
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *args], cwd=ROOT, capture_output=True, text=True)
    return (ran.stderr if ran.returncode else ran.stdout).strip().splitlines()[-1]


def test_a_fresh_process_gets_its_devices_and_keeps_them_when_asked_for_fewer():
    code = """
        import jax
        from kimi_jax.testing import simulate_devices
        simulate_devices(3)
        simulate_devices(6)
        simulate_devices(2)
        print(len(jax.devices()), jax.default_backend(), end=" ")
        simulate_devices(6)
        simulate_devices(1)
        print(len(jax.devices()), jax.numpy.ones(6).sum())
    """
    assert python(code) == "6 cpu 6 6.0"


def test_a_count_that_was_configured_before_is_kept_if_it_is_enough():
    code = """
        import jax
        from kimi_jax.testing import simulate_devices
        jax.config.update("jax_num_cpu_devices", 5)
        simulate_devices(4)
        print(jax.device_count())
    """
    assert python(code) == "5"


def test_asking_too_late_says_how_to_ask_in_time():
    code = """
        import jax
        from kimi_jax.testing import simulate_devices
        jax.devices()
        simulate_devices(4)
    """
    said = python(code)
    assert said.startswith("RuntimeError: n=4 devices: JAX has already started, with 1 cpu device(s); restart Python")


def test_asking_does_not_start_jax():
    code = """
        import jax
        from kimi_jax.testing import simulate_devices
        simulate_devices(4)
        jax.config.update("jax_num_cpu_devices", 7)
        print(jax.device_count())
    """
    assert python(code) == "7"


def test_this_session_has_its_devices_already():
    assert jax.device_count() == 8
    simulate_devices(8)
    with pytest.raises(RuntimeError, match="n=99 devices: JAX has already started, with 8 cpu"):
        simulate_devices(99)


@pytest.mark.parametrize("n", [0, -2])
def test_no_devices_is_an_error(n):
    with pytest.raises(ValueError, match=f"n={n} devices: wanted 1 or more"):
        simulate_devices(n)


def test_the_fixture_gives_the_devices(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "from kimi_jax.testing import simulated_devices\ndevices = simulated_devices(3)\n"
    )
    (tmp_path / "test_it.py").write_text("def test_it(devices):\n    assert len(devices) == 3\n")
    code = """
        import sys, pytest
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", sys.argv[1], sys.argv[1]]))
    """
    assert python(code, str(tmp_path)).startswith("1 passed")
