"""Time loading, saving and exporting beside the disk's own reads and copies."""

import argparse

from kimi_jax.commands.options import add_devices, add_layout, layout_of, start


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("folder", metavar="FOLDER", help="where on the disk to work; what is written is deleted")
    parser.add_argument("--size", default="2GB", help="of the random checkpoint (default 2GB); four of them must fit")
    parser.add_argument("--rounds", type=int, default=5, help="times that everything is done (default 5)")
    parser.add_argument("--cold", action="store_true", help="drop files from the system's memory before each reading")
    parser.add_argument("--json", metavar="FILE", help="write all numbers to a file")
    add_layout(parser)
    add_devices(parser)


def run(args: argparse.Namespace) -> None:
    """Do what the options say."""
    from kimi_jax.checkpoints.hub_write import parse_size
    from kimi_jax.measuring import disk

    start(args)
    report = disk.run(
        args.folder, nbytes=parse_size(args.size), rounds=args.rounds, cold=args.cold, layout=layout_of(args)
    )
    print(report)
    if args.json:
        from pathlib import Path

        Path(args.json).write_text(report.to_json() + "\n")
