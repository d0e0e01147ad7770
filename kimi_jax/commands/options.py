"""Options that several commands have, and what they say."""

import argparse
import os
import re
import sys

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
    """The options that say on which devices to run: simulated ones, those of several processes."""
    group = parser.add_argument_group("devices")
    group.add_argument("--devices", type=int, metavar="N", help="simulate N host devices (CPU) in this process")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="be one of several processes; 'auto' with Slurm, MPI")
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process-id", type=int, metavar="I", help="which this is, from 0; 0 listens at HOST:PORT")
    group.add_argument("--start-timeout", type=int, default=300, metavar="S", help="wait S seconds for the others")


def start(args: argparse.Namespace) -> None:
    """Start JAX on the devices that the options say; of several processes only the first prints."""
    import jax

    from kimi_jax import processes, simulate_devices

    if args.devices is not None:
        simulate_devices(args.devices)
    if args.coordinator is None:
        if args.processes is not None or args.process_id is not None:
            raise ValueError("--processes and --process-id need --coordinator HOST:PORT, the address of process 0")
        return
    if args.coordinator == "auto":
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise ValueError("--coordinator auto: no Slurm and no MPI started this process; give HOST:PORT") from error
    elif args.processes is None or args.process_id is None:
        raise ValueError(f"--coordinator {args.coordinator} needs --processes N and --process-id I")
    else:
        processes.join(args.coordinator, args.processes, args.process_id, timeout=args.start_timeout)
    if not processes.is_first():
        sys.stdout = open(os.devnull, "w")


def numbers(text: str) -> list[int]:
    """ "1,8,32" -> [1, 8, 32]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers, as 3,1,4, were wanted") from None


def mesh(text: str) -> tuple[int, int]:
    """ "2x4" -> (2, 4)."""
    if not (found := re.fullmatch(r"(\d+)x(\d+)", text)):
        raise argparse.ArgumentTypeError(f"{text!r}: TPxCP, such as 2x4, was wanted")
    return int(found[1]), int(found[2])


def meshes(text: str) -> list[tuple[int, int]]:
    """ "1x8,2x4" -> [(1, 8), (2, 4)]."""
    return [mesh(part) for part in text.split(",")]
