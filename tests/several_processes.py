"""One of several processes of a test: does one job on its share of the devices and writes down what came of it.

python -m tests.several_processes JOB FOLDER PROCESS PROCESSES DEVICES PORT
"""

import json
import sys
from pathlib import Path

import jax

import kimi_jax
from kimi_jax import processes
from sharding_rules import Layout, helix
from tests.layouts import PROMPTS, factorings

NEW_TOKENS = 12
SEED = 7


def spoken(model, prompts=PROMPTS) -> list:
    """Greedy and seeded tokens."""
    greedy = kimi_jax.generate(model, prompts, max_new_tokens=NEW_TOKENS)
    drawn = kimi_jax.generate(model, prompts, max_new_tokens=NEW_TOKENS, sampling=kimi_jax.Temperature(0.8), seed=SEED)
    return [[row.tokens for row in rows] for rows in (greedy, drawn)]


def load(folder: Path, layout: Layout):
    return kimi_jax.load(folder, layout=layout, dtype="float32", progress=False)


def refused(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def talk(folder: Path) -> dict:
    """Greedy tokens, bytes read, and what differs between the processes."""
    model, me = load(folder / "model", helix(2, 4, tokens_per_block=4)), jax.process_index()
    calls = (lambda: kimi_jax.random_model(model.config), lambda: kimi_jax.generate(model, [[5]]))
    return {
        "tokens": [row.tokens for row in kimi_jax.generate(model, PROMPTS, max_new_tokens=NEW_TOKENS)],
        "read": model.report.bytes_read,
        "other prompt": refused(lambda: kimi_jax.generate(model, [[5 + me]])),
        "other call": refused(calls[me]),
    }


def states(folder: Path) -> dict:
    """What follows a state: continued, saved and loaded, moved to another layout."""
    model, other = (load(folder / "model", layout) for layout in (helix(2, 4, tokens_per_block=4), helix(8, 1)))
    _, state = model.prefill([[3, 1, 4, 1, 5]], None, model.new_state(1, 32))
    path = folder / f"state-{jax.process_count()}"
    kimi_jax.save_state(state, path)
    back = kimi_jax.load_state(model, path)
    pairs = ((model, state), (model, back), (other, back.to(other.layout)))
    return {"tokens": [kimi_jax.generate(m, [[9]], max_new_tokens=NEW_TOKENS, state=s)[0].tokens for m, s in pairs]}


def every_layout(folder: Path) -> dict:
    """Tokens on every mesh of eight."""
    layouts = [helix(tp, cp, tokens_per_block=4) for tp, cp in factorings(8)]
    return {f"{layout.tp}x{layout.cp}": spoken(load(folder / "model", layout)) for layout in layouts}


def save(folder: Path) -> dict:
    """Load, save, and read back what another number of processes saved."""
    model = load(folder / "model", helix(2, 4))
    kimi_jax.save(model, folder / f"saved-{jax.process_count()}", progress=False)
    kimi_jax.export_safetensors(model, folder / f"exported-{jax.process_count()}", progress=False)
    return {"tokens": spoken(load(folder / "saved-1", helix(4, 2)))}


def other_checkpoint(folder: Path) -> dict:
    """Process 1 is given another checkpoint."""
    own = folder / ("model" if jax.process_index() == 0 else "other")
    return {"refused": refused(lambda: load(own, helix(2, 4)))}


JOBS = {job.__name__: job for job in (talk, states, every_layout, save, other_checkpoint)}


def main(job: str, folder: str, process: str, count: str, devices: str, port: str) -> None:
    jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    kimi_jax.simulate_devices(int(devices))
    processes.join(f"127.0.0.1:{port}", int(count), int(process))
    said = JOBS[job](Path(folder))
    (Path(folder) / f"{job}-{process}-of-{count}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
