"""The peer of the benchmark: the same shapes through transformers, in a process of its own. Needs the `parity` extra.

Run as a program it prints one JSON line a measurement; `measure` starts it and reads them.
"""

import json
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

REPEATS = 3
STEPS = 16


def measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Time transformers on a job -> a dict for each measurement, with `what`, `batch`, `context` and `seconds`.

    job: config (a hub config) or checkpoint (a folder), dtype, decode and prefill (lists of [batch, tokens]). seconds:
    None where the device's memory was not enough.

    Raises ValueError with the end of its error output if the peer fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", "kimi_jax.measuring.peer", json.dumps(job)], capture_output=True, text=True
    )
    if done.returncode:
        if "No module named" in done.stderr:
            raise ValueError("--peer transformers needs torch and transformers: pip install 'kimi_jax[parity]'")
        raise ValueError(f"the peer (transformers) failed: {done.stderr.strip()[-600:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def described() -> str:
    """What `measure` runs here, with versions."""
    kernels = "with" if find_spec("fla") else "without"
    return f"transformers {version('transformers')}, torch {version('torch')}, {kernels} fla's kernels"


def main(job: dict[str, Any]) -> None:
    """Build the model and print its times."""
    import torch  # pyright: ignore[reportMissingImports]  (the parity extra)
    from transformers import KimiLinearConfig, KimiLinearForCausalLM  # pyright: ignore[reportMissingImports]  (the parity extra)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, job["dtype"])
    if job.get("checkpoint"):
        model = KimiLinearForCausalLM.from_pretrained(job["checkpoint"], dtype=dtype).to(device).eval()  # pyright: ignore[reportArgumentType]
    else:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = KimiLinearForCausalLM(KimiLinearConfig(**job["config"])).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.02)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def timed(call) -> float:
        call()
        taken = []
        for _ in range(REPEATS):
            wait()
            began = time.perf_counter()
            call()
            wait()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def prefill(ids) -> float:
        return timed(lambda: model(ids, use_cache=True, logits_to_keep=1))

    def decode(ids) -> float:
        out = model(ids, use_cache=True, logits_to_keep=1)
        held = {"token": out.logits[:, -1:].argmax(-1), "cache": out.past_key_values}

        def steps() -> None:
            for _ in range(STEPS):
                out = model(held["token"], past_key_values=held["cache"], use_cache=True)
                held["token"], held["cache"] = out.logits[:, -1:].argmax(-1), out.past_key_values

        return timed(steps) / STEPS

    with torch.inference_mode():
        for what, run in (("prefill", prefill), ("decode", decode)):
            for batch, context in job[what]:
                ids = torch.randint(0, model.config.vocab_size, (batch, context), device=device)
                try:
                    seconds = run(ids)
                except torch.OutOfMemoryError:
                    seconds = None
                    torch.cuda.empty_cache()
                print(json.dumps({"what": what, "batch": batch, "context": context, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
