"""Bytes and collectives of a layout, with no device."""

import argparse

from kimi_jax.commands.options import add_layout, config_of, layout_of


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--config", default="kimi-linear-48b", help="kimi-linear-48b, kimi-k3, a folder or config.json")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--fits", metavar="DEVICE", help="list the layouts that fit A100, H100, H200 or B200")
    parser.add_argument("--max-ranks", type=int, default=64, help="most ranks that --fits looks at")
    parser.add_argument("--compile", action="store_true", help="check the formula against the compiled decode step")
    parser.add_argument("--json", action="store_true")
    add_layout(parser)


def run(args: argparse.Namespace) -> None:
    """Do what the options say."""
    from kimi_jax.planning.compile_check import compile_command
    from kimi_jax.planning.plan import fits_command, plan_command

    config, layout = config_of(args.config), layout_of(args)
    sizes = dict(batch=args.batch, context=args.context, dtype=args.dtype, as_json=args.json)
    if args.fits:
        print(fits_command(config, args.fits, layout=layout, max_ranks=args.max_ranks, **sizes))
    else:
        print((compile_command if args.compile else plan_command)(config, layout, **sizes))
