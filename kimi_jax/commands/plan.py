"""Bytes and collectives of a layout, with no device."""

import argparse
import json

from kimi_jax.commands.options import add_layout, config_of, layout_of
from kimi_jax.config import Config
from kimi_jax.planning.compile_check import check_apart, collective_table
from kimi_jax.planning.devices import usable
from kimi_jax.planning.plan import Plan, fits_table, layouts_that_fit, plan
from kimi_jax.tables import human
from sharding_rules import Layout


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
    config, layout = config_of(args.config), layout_of(args)
    if args.fits:
        _print_fits(args, config, layout)
        return
    made = plan(config, layout, batch=args.batch, context=args.context, dtype=args.dtype)
    if args.compile:
        _print_compiled(args, config, made)
    else:
        print(json.dumps(made.to_json(), indent=2) if args.json else made)


def _print_fits(args: argparse.Namespace, config: Config, layout: Layout) -> None:
    """Every layout that fits the device, the smallest first."""
    sizes = dict(batch=args.batch, context=args.context, dtype=args.dtype)
    plans = layouts_that_fit(config, args.fits, layout=layout, max_ranks=args.max_ranks, **sizes)
    room = human(usable(args.fits))
    if args.json:
        print(json.dumps([p.to_json() for p in plans], indent=2))
    elif plans:
        print(f"{args.fits}: {room} usable; batch {args.batch}, context {args.context:,}, {args.dtype}\n")
        print(fits_table(plans, args.fits))
    else:
        print(f"no layout of up to {args.max_ranks} ranks fits {args.fits} ({room} usable)")


def _print_compiled(args: argparse.Namespace, config: Config, made: Plan) -> None:
    """The plan, the compiled step's collectives, the verdict."""
    found = check_apart(made)
    if args.json:
        print(json.dumps({**made.to_json(), "compiled": found.to_json()}, indent=2))
    else:
        print(made.table(), collective_table(found, config), found, sep="\n\n")
