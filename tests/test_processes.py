"""Several processes under jax.distributed say what one says, read their share, and never wait for ever."""

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import kimi_jax
from kimi_jax import processes
from sharding_rules import helix
from tests import layouts, several_processes

ROOT = Path(__file__).parent.parent
SPLITS = [(2, 4), (4, 2)]  # processes, devices in each


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def together(job: str, folder: Path, count: int, devices: int) -> list[dict]:
    """Run a job of `several_processes` -> what each process wrote down."""
    port = str(free_port())
    command = [sys.executable, "-m", "tests.several_processes", job, str(folder)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    started = [
        subprocess.Popen([*command, str(i), str(count), str(devices), port], cwd=ROOT, **pipes) for i in range(count)
    ]
    printed = [process.communicate(timeout=900)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0] * count, "\n".join(text[-3000:] for text in printed)
    return [json.loads((folder / f"{job}-{i}-of-{count}.json").read_text()) for i in range(count)]


@pytest.fixture
def command():
    """command(port, process, *options) -> `python -m kimi_jax generate` as one of two processes; none outlives the
    test."""
    started = []

    def start(port: int, process: int, *options: str) -> subprocess.Popen:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "kimi_jax", "generate", "--cp", "8", "--devices", "4",
                 "--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id", str(process), *options],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def spoken_text(printed: str) -> str:
    """What generate printed, without what gloo does."""
    return re.sub(r"\[Gloo\][^\n]*\n", "", printed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The small model of `layouts`, saved as `model`."""
    folder = tmp_path_factory.mktemp("processes")
    kimi_jax.save(layouts.one_device(), folder / "model", progress=False)
    return folder


def test_two_processes_say_what_one_says_and_notice_when_they_differ(folder):
    said, alone = together("talk", folder, 2, 4), layouts.one_device()
    wanted = [row.tokens for row in kimi_jax.generate(alone, layouts.PROMPTS, max_new_tokens=len(said[0]["tokens"][0]))]
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(alone.params))
    for process, one in enumerate(said):
        assert one["tokens"] == wanted
        assert one["read"] < 0.8 * whole  # half of what is split, all of what every device holds
        assert one["other prompt"].startswith("generate: prompts is not the same on every process: process 1 differs")
        assert f"this is process {process} of 2" in one["other prompt"]
        assert "the call itself is not the same on every process" in one["other call"]


def test_arguments_that_cannot_be_meant_are_refused_before_jax_starts():
    for wrong, message in [
        (("localhost", 2, 0), "coordinator='localhost': HOST:PORT of process 0 was wanted"),
        (("localhost:1", 2, 2), "process_id=2: a whole number from 0 to 1 is wanted"),
    ]:
        with pytest.raises(ValueError, match=message):
            processes.join(*wrong)


def test_one_process_agrees_with_itself_and_fetches_what_it_has():
    processes.agree("a call", anything=object())
    layout = helix(2, 4)
    values = np.arange(24.0).reshape(8, 3)
    placed = processes.put(values, layout.sharding(layout.mesh(), "kda_heads", None))
    assert len({str(shard.index) for shard in placed.addressable_shards}) == 8
    assert (processes.fetch(placed) == values).all()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # every process compiles every layout, on the same cores
@pytest.mark.parametrize("config", [layouts.SMALL, layouts.SMALL_K3], ids=["linear", "k3"])
@pytest.mark.parametrize(("count", "devices"), SPLITS)
def test_every_layout_of_every_split_says_what_one_process_says(tmp_path, config, count, devices):
    """Of checkpoints as the hub has them."""
    kimi_jax.export_safetensors(layouts.one_device(config), tmp_path / "model", progress=False)
    said = together("every_layout", tmp_path, count, devices)
    wanted = several_processes.every_layout(tmp_path)
    assert all(one == wanted for one in said)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), SPLITS)
def test_a_state_goes_on_saved_and_moved(folder, count, devices):
    wanted = kimi_jax.generate(layouts.one_device(), [[3, 1, 4, 1, 5, 9]], max_new_tokens=several_processes.NEW_TOKENS)
    assert all(one["tokens"] == [wanted[0].tokens] * 3 for one in together("states", folder, count, devices))


@pytest.mark.slow
def test_what_four_processes_save_one_loads_and_back(folder):
    kimi_jax.save(layouts.one_device(), folder / "saved-1", progress=False)
    wanted = several_processes.spoken(layouts.one_device())
    assert all(one["tokens"] == wanted for one in together("save", folder, 4, 2))
    for kind in ("saved-4", "exported-4"):
        assert several_processes.spoken(several_processes.load(folder / kind, helix(1, 8))) == wanted


@pytest.mark.slow
def test_another_checkpoint_on_one_process_is_refused_by_all(folder):
    kimi_jax.save(kimi_jax.random_model(layouts.SMALL, dtype="float32", seed=9), folder / "other", progress=False)
    for one in together("other_checkpoint", folder, 2, 4):
        assert "load: checkpoint is not the same on every process" in one["refused"]


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other_with_a_reason(command):
    port, long = free_port(), ("--prompt", "In the beginning", "--max-new-tokens", "4000")
    first, second = command(port, 0, *long), command(port, 1, *long)
    printed = ""
    while "In the beginning of" not in spoken_text(printed):
        printed += (more := first.stdout.read(1))
        assert more, f"ended with {printed!r}: {first.stderr.read()}"
    second.kill()
    began = time.monotonic()
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 1 and time.monotonic() - began < 60
    assert "process 0 of 2 ends, it or another one failed" in errors


@pytest.mark.slow
def test_another_prompt_on_one_process_ends_both_with_status_2(command):
    port = free_port()
    for process in [command(port, i, "--prompt", f"In the {i}") for i in range(2)]:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 2 and "prompts is not the same on every process" in errors


@pytest.mark.slow
def test_a_late_process_is_waited_for_by_name(command):
    port, prompt = free_port(), ("--prompt", "In the beginning", "--max-new-tokens", "5")
    first = command(port, 0, *prompt)
    assert any(
        "process 0 of 2 waits for process 1 to come to" in line for line in first.stderr
    )  # reads until it says so
    second = command(port, 1, *prompt)
    text, _ = first.communicate(timeout=300)
    assert first.returncode == 0
    assert "In the beginning of t" in spoken_text(text)
    assert "beginning" not in second.communicate(timeout=60)[0]  # the first prints


@pytest.mark.slow
def test_a_wrong_coordinator_is_an_error_with_its_address(command):
    process = command(free_port(), 1, "--prompt", "x", "--start-timeout", "5")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "waits for process 0 at 127.0.0.1" in errors and "process 0 did not answer" in errors
