"""Where every weight lives, and why."""

import argparse

from kimi_jax.commands.options import add_layout, config_of, layout_of


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
    from kimi_jax.planning.explain import explain_command
    from sharding_rules import helix

    other = None
    if args.diff:
        tp, cp, *shard = args.diff.split(",")
        other = helix(int(tp), int(cp), shard_qkv_a=shard == ["shard"], tokens_per_block=args.tokens_per_block)
    config, layout = config_of(args.config), layout_of(args)
    print(explain_command(config, layout, other=other, dtype=args.dtype, as_json=args.json))
