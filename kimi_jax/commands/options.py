"""Options that several commands have, and what they say."""

import argparse

from kimi_jax.config import Config


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


def numbers(text: str) -> list[int]:
    """ "1,8,32" -> [1, 8, 32]."""
    return [int(part) for part in text.split(",")]
