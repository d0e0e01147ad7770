"""Turn a hub checkpoint into an orbax save, or back; or check one without reading it."""

import argparse
import sys

from kimi_jax.commands.options import mesh


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("src", metavar="SRC", help="folder of safetensors as the hub has them, or of kimi_jax.save")
    parser.add_argument("dst", metavar="DST", nargs="?", help="folder to write; it appears when it is complete")
    parser.add_argument("--to", choices=("orbax", "safetensors"), help="kind of DST (default: the one SRC is not)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the numbers (default: as config.json says); packed experts stay as they are",
    )
    parser.add_argument(
        "--layout",
        type=mesh,
        metavar="TPxCP",
        help="cut an orbax DST as the ranks of helix(TP, CP) hold it, a file a shard, so that each rank reads whole "
        "files (default: a file a parameter); any layout loads it either way. With --dry-run: whose ranks would read",
    )
    parser.add_argument("--shard-size", metavar="SIZE", default="5GB", help="of safetensors files (default 5GB)")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="read headers only and write nothing: bytes each device would read, names that are missing, unexpected or "
        "misshapen; status 1 if SRC would not load",
    )


def run(args: argparse.Namespace) -> int:
    """Do what the options say -> the exit status."""
    import kimi_jax
    from kimi_jax.checkpoints import folders
    from kimi_jax.config import Config
    from kimi_jax.model import guard
    from sharding_rules import helix

    layout = None if args.layout is None else helix(*args.layout)
    if layout is not None:
        guard(Config.from_hf(folders.locate(args.src)), layout)  # before any device is made
    kimi_jax.simulate_devices(1 if layout is None else layout.ranks)  # files to files: no accelerator is wanted
    if args.dry_run:
        found = kimi_jax.dry_run(args.src, layout=layout, dtype=args.dtype)
        print(found)
        return 0 if found.ok else 1
    if args.dst is None:
        raise ValueError("DST is missing: a folder to write, or --dry-run, was wanted")
    report = kimi_jax.convert(
        args.src,
        args.dst,
        to=args.to,
        dtype=args.dtype,
        layout=layout,
        shard_size=args.shard_size,
        progress=sys.stderr.isatty(),
    )
    print(f"{report}\nwrote {args.dst}")
    return 0
