"""Time prefill and decode beside what the machine allows."""

import argparse
from pathlib import Path
from typing import Any

from kimi_jax.commands.options import add_devices, add_layout, config_of, layout_of, numbers, start
from kimi_jax.config import Config

RANK_SLICE = "kimi-k3-rank-slice"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument(
        "--config", help=f"random weights of this shape: kimi-linear-48b, kimi-k3, {RANK_SLICE} or a config.json"
    )
    parser.add_argument("--checkpoint", metavar="PATH", help="time a checkpoint (default: the one in the package)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as the config says")
    parser.add_argument("--batch", type=numbers, help="batches, as 1,8,32 (default 1; scaling 1,4,16)")
    parser.add_argument(
        "--context", type=numbers, help="tokens held while decoding (default 1024; scaling 8192,131072,1048576)"
    )
    parser.add_argument("--capacity", type=int, help="tokens that a row can hold (default: what is needed)")
    parser.add_argument("--prefill", type=numbers, default=[], help="prompt lengths to time")
    parser.add_argument("--peer", choices=("transformers",), help="time transformers on the same shapes first")
    parser.add_argument("--phases", action="store_true", help="also how long each phase takes (profiler; on GPUs)")
    parser.add_argument(
        "--kernels", nargs="?", const="", metavar="NAME", help="the kernels alone, or those named so: floors and errors"
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers to a file")
    group = parser.add_argument_group("scaling")
    group.add_argument("--scaling", action="store_true", help="every (tp, cp) of the devices here; CPUs only count")
    group.add_argument(
        "--ranks", type=numbers, default=[1, 2, 4, 8], help="devices that a layout takes (default 1,2,4,8)"
    )
    group.add_argument("--layers", type=int, metavar="N", help="first N layers only (default: all, or what fits)")
    group.add_argument("--minutes", type=float, default=9, help="begin no layout that would end later (default 9)")
    add_layout(parser)
    add_devices(parser)


def run(args: argparse.Namespace) -> None:
    """Do what the options say."""
    import kimi_jax
    from kimi_jax.measuring import bench

    start(args)
    if args.scaling:
        _show(_scaling(args), args)
        return
    if args.kernels is not None:
        given = [
            name for name in ("config", "checkpoint", "peer", "prefill", "batch", "context") if getattr(args, name)
        ]
        if given:
            raise ValueError(f"--kernels times sizes of its own: no {', '.join('--' + name for name in given)} with it")
        _show(_kernels(args.kernels), args)
        return
    args.batch, args.context = args.batch or [1], args.context or [1024]
    if args.config == RANK_SLICE:
        _show(_rank_slice(args), args)
        return
    measured = _peer_times(args) if args.peer else {}
    peer = {case: seconds for case, seconds in measured.items() if seconds is not None}
    if args.config:
        model = kimi_jax.random_model(config_of(args.config), layout=layout_of(args), dtype=args.dtype)
    else:
        model = kimi_jax.load(args.checkpoint, layout=layout_of(args), dtype=args.dtype, progress=False)
    report = bench.run(
        model, batches=args.batch, contexts=args.context, capacity=args.capacity, prefills=args.prefill, peer=peer,
        phases=args.phases,
    )  # fmt: skip
    if args.peer:
        from kimi_jax.measuring.peer import described

        lost = [f"{what} {batch} x {context}: out of memory" for what, batch, context in measured.keys() - peer.keys()]
        report.peer = "; ".join([described(), *lost])
    _show(report, args)


def _show(report: Any, args: argparse.Namespace) -> None:
    print(report)
    _write(report, args)


def _write(report: Any, args: argparse.Namespace) -> None:
    if args.json:
        Path(args.json).write_text(report.to_json())


def _scaling(args: argparse.Namespace):
    """The report; it is written after each layout, so that an end that comes too early loses little."""
    from kimi_jax.measuring import scaling

    if args.peer or args.prefill or args.checkpoint or args.capacity or args.config == RANK_SLICE:
        raise ValueError(
            "--scaling times decode steps of random weights: --config, and no --peer, --prefill, --capacity"
        )
    return scaling.run(
        config_of(args.config or "kimi-linear-48b"),
        batches=args.batch or scaling.BATCHES,
        contexts=args.context or scaling.CONTEXTS,
        dtype=args.dtype,
        ranks=args.ranks,
        layers=args.layers,
        minutes=float(args.minutes),
        after_each=lambda report: _write(report, args),
    )


def _kernels(name: str):
    """The kernels whose names begin so."""
    from kimi_jax.measuring import kernels

    cases = [case for case in kernels.all_cases() if case.name.lower().startswith(name.lower())]
    if not cases:
        names = ", ".join(sorted({case.name.split(",")[0] for case in kernels.all_cases()}))
        raise ValueError(f"--kernels {name}: no kernel is called so; there are {names}")
    return kernels.run(cases)


def _rank_slice(args: argparse.Namespace):
    """One rank of K3, on 1 x 16 unless the options say another layout."""
    from kimi_jax.measuring import rank_slice

    if args.peer or args.prefill or args.checkpoint or args.capacity:
        raise ValueError(f"--config {RANK_SLICE} times decode steps of random weights alone: no --peer, no --prefill")
    args.cp = 16 if args.tp * args.cp == 1 else args.cp
    sizes = dict(batches=args.batch, contexts=args.context, dtype=args.dtype, phases=args.phases)
    return rank_slice.run(config_of("kimi-k3"), layout_of(args), **sizes)


def _peer_times(args: argparse.Namespace) -> dict[tuple[str, int, int], float | None]:
    """The peer's seconds by (what, batch, context); None where it ran out of memory."""
    from kimi_jax import loading
    from kimi_jax.measuring import peer

    config = config_of(args.config) if args.config else Config.from_hf(args.checkpoint or loading.SHIPPED)
    job = {
        "config": config.to_hf() if args.config else None,
        "checkpoint": None if args.config else str(args.checkpoint or loading.SHIPPED),
        "dtype": args.dtype or config.dtype,
        "decode": [[batch, context] for batch in args.batch for context in args.context],
        "prefill": [[batch, tokens] for batch in args.batch for tokens in args.prefill],
    }
    return {(m["what"], m["batch"], m["context"]): m["seconds"] for m in peer.measure(job)}
