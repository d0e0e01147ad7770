"""Where every weight lives, and why."""

import argparse
import json
import re

from kimi_jax.commands.options import add_layout, config_of, layout_of
from kimi_jax.planning.explain import explain, explain_diff
from sharding_rules import helix


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--config", default="kimi-linear-48b", help="kimi-linear-48b, kimi-k3, a folder or config.json")
    parser.add_argument(
        "--diff", metavar="TP,CP[,shard]", help="what changes on another mesh, ',shard' with shard_qkv_a"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--json", action="store_true")
    add_layout(parser)


def run(args: argparse.Namespace) -> None:
    """Do what the options say."""
    config, layout = config_of(args.config), layout_of(args)
    said = explain(config, layout, dtype=args.dtype)
    if args.diff:
        if not (found := re.fullmatch(r"(\d+),(\d+)(,shard)?", args.diff)):
            raise ValueError(f"--diff {args.diff}: TP,CP or TP,CP,shard was wanted")
        tp, cp, shard = int(found[1]), int(found[2]), found[3] is not None
        other = helix(tp, cp, shard_qkv_a=shard, tokens_per_block=args.tokens_per_block)
        said = explain_diff(said, explain(config, other, dtype=args.dtype))
    print(json.dumps(said.to_json(), indent=2) if args.json else said)
