"""The command line: `python -m kimi_jax COMMAND`. Each command parses its arguments and calls the library."""

import argparse
import sys
from collections.abc import Callable

from kimi_jax.config import Config


def main(argv: list[str] | None = None) -> int:
    """Run one command -> its exit status. A ValueError of the library is printed as one line, status 2."""
    parser = argparse.ArgumentParser(prog="python -m kimi_jax", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (about, arguments, run) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        arguments(command)
        command.set_defaults(run=run)
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except ValueError as error:
        print(f"kimi_jax {args.command}: {error}", file=sys.stderr)
        return 2


def add_layout(parser: argparse.ArgumentParser) -> None:
    """The options that make a layout."""
    group = parser.add_argument_group("layout")
    group.add_argument("--tp", type=int, default=1, help="ranks that split the MLA heads (default 1)")
    group.add_argument("--cp", type=int, default=1, help="ranks that split the latent cache (default 1)")
    group.add_argument("--shard-qkv-a", action="store_true", help="split the merged q_a|kv_a projection by columns")
    group.add_argument("--tokens-per-block", type=int, default=64, help="positions a stripe takes in turn (default 64)")
    group.add_argument("--pad-heads", action="store_true", help="pad MLA heads that the ranks do not divide")


def layout_of(args: argparse.Namespace):
    """The layout that the options say."""
    from sharding_rules import helix

    return helix(
        args.tp,
        args.cp,
        shard_qkv_a=args.shard_qkv_a,
        tokens_per_block=args.tokens_per_block,
        pad_heads=args.pad_heads,
    )


def config_of(name: str) -> Config:
    """A configuration by published name, or from a folder or config.json."""
    return Config.named(name) if name in ("kimi-linear-48b", "kimi-k3") else Config.from_hf(name)


def add_devices(parser: argparse.ArgumentParser) -> None:
    """The option that simulates host devices."""
    parser.add_argument("--devices", type=int, metavar="N", help="simulate N host devices (CPU)")


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", metavar="PATH", help="checkpoint folder (default: the one in the package)")
    parser.add_argument("--prompt", action="append", required=True, help="text to continue; may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as the checkpoint says")
    parser.add_argument("--temperature", type=float, help="sample at this temperature (default: greedy)")
    parser.add_argument("--top-p", type=float, help="sample from the smallest set of this probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="text that ends a row; may be given several times")
    add_layout(parser)
    add_devices(parser)


def _generate(args: argparse.Namespace) -> None:
    import kimi_jax

    if args.devices:
        kimi_jax.simulate_devices(args.devices)
    model = kimi_jax.load(args.checkpoint, layout=layout_of(args), dtype=args.dtype, progress=sys.stderr.isatty())
    options = dict(max_new_tokens=args.max_new_tokens, sampling=_sampling(args), seed=args.seed, stop=args.stop)
    if len(args.prompt) == 1:
        print(args.prompt[0], end="")
        for piece in kimi_jax.stream(model, args.prompt[0], **options):
            print(_shown(piece), end="", flush=True)
        print()
    else:
        for prompt, completion in zip(args.prompt, kimi_jax.generate(model, args.prompt, **options), strict=True):
            print(f"{prompt}{_shown(completion)}\n")


def _shown(part) -> str:
    return f" {part.tokens}" if part.text is None else part.text


def _sampling(args: argparse.Namespace):
    from kimi_jax.sampling import Greedy, Temperature, TopP

    if args.top_p is not None:
        return TopP(args.top_p, args.temperature if args.temperature is not None else 1.0)
    return Greedy() if args.temperature is None else Temperature(args.temperature)


Command = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int | None]]


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="time random weights of this shape: kimi-linear-48b, kimi-k3 or a config.json")
    parser.add_argument("--checkpoint", metavar="PATH", help="time a checkpoint (default: the one in the package)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as the config says")
    parser.add_argument("--batch", type=_numbers, default=[1], help="batches, as 1,8,32 (default 1)")
    parser.add_argument("--context", type=_numbers, default=[1024], help="tokens held while decoding (default 1024)")
    parser.add_argument("--capacity", type=int, help="tokens that a row can hold (default: what is needed)")
    parser.add_argument("--prefill", type=_numbers, default=[], help="prompt lengths to time")
    parser.add_argument("--peer", choices=("transformers",), help="time transformers on the same shapes first")
    parser.add_argument("--json", metavar="FILE", help="write all numbers to a file")
    add_layout(parser)
    add_devices(parser)


def _bench(args: argparse.Namespace) -> None:
    import kimi_jax
    from kimi_jax import bench

    if args.devices:
        kimi_jax.simulate_devices(args.devices)
    peer = _peer_times(args) if args.peer else {}
    if args.config:
        model = kimi_jax.random_model(config_of(args.config), layout=layout_of(args), dtype=args.dtype)
    else:
        model = kimi_jax.load(args.checkpoint, layout=layout_of(args), dtype=args.dtype, progress=False)
    report = bench.run(
        model, batches=args.batch, contexts=args.context, capacity=args.capacity, prefills=args.prefill, peer=peer
    )
    print(report)
    if args.json:
        from pathlib import Path

        Path(args.json).write_text(report.to_json())


def _peer_times(args: argparse.Namespace) -> dict[tuple[str, int, int], float]:
    from kimi_jax import loading, peer

    config = config_of(args.config) if args.config else Config.from_hf(args.checkpoint or loading.SHIPPED)
    job = {
        "config": config.to_hf() if args.config else None,
        "checkpoint": None if args.config else str(args.checkpoint or loading.SHIPPED),
        "dtype": args.dtype or config.dtype,
        "decode": [[batch, context] for batch in args.batch for context in args.context],
        "prefill": [[batch, tokens] for batch in args.batch for tokens in args.prefill],
    }
    return {(m["what"], m["batch"], m["context"]): m["seconds"] for m in peer.measure(job)}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="kimi-linear-48b", help="kimi-linear-48b, kimi-k3, a folder or config.json")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--fits", metavar="DEVICE", help="list the layouts that fit A100, H100, H200 or B200")
    parser.add_argument("--max-ranks", type=int, default=64, help="most ranks that --fits looks at")
    parser.add_argument("--compile", action="store_true", help="check the formula against the compiled decode step")
    parser.add_argument("--json", action="store_true")
    add_layout(parser)


def _plan(args: argparse.Namespace) -> None:
    from kimi_jax.compile_check import compile_command
    from kimi_jax.plan import fits_command, plan_command

    config, layout = config_of(args.config), layout_of(args)
    sizes = dict(batch=args.batch, context=args.context, dtype=args.dtype, as_json=args.json)
    if args.fits:
        print(fits_command(config, args.fits, layout=layout, max_ranks=args.max_ranks, **sizes))
    else:
        print((compile_command if args.compile else plan_command)(config, layout, **sizes))


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="kimi-linear-48b", help="kimi-linear-48b, kimi-k3, a folder or config.json")
    parser.add_argument(
        "--diff", metavar="TP,CP[,shard]", help="what changes on another mesh, ',shard' with shard_qkv_a"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--json", action="store_true")
    add_layout(parser)


def _explain(args: argparse.Namespace) -> None:
    from kimi_jax.explain import explain_command
    from sharding_rules import helix

    other = None
    if args.diff:
        tp, cp, *shard = args.diff.split(",")
        other = helix(int(tp), int(cp), shard_qkv_a=shard == ["shard"], tokens_per_block=args.tokens_per_block)
    config, layout = config_of(args.config), layout_of(args)
    print(explain_command(config, layout, other=other, dtype=args.dtype, as_json=args.json))


COMMANDS: dict[str, Command] = {
    "generate": ("continue a prompt", _generate_arguments, _generate),
    "plan": ("bytes and collectives of a layout, with no device", _plan_arguments, _plan),
    "explain": ("where every weight lives, and why", _explain_arguments, _explain),
    "bench": ("time prefill and decode beside what the machine allows", _bench_arguments, _bench),
}

if __name__ == "__main__":
    sys.exit(main())
