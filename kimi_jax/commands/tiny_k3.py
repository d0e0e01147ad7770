"""Write a small random K3 checkpoint and its bf16 twin, to test a port of K3 with."""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("path", metavar="PATH", help="folder to write; the twin goes to PATH-bf16")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    """Do what the options say."""
    from kimi_jax.testing import write_tiny_k3

    for folder in write_tiny_k3(args.path, seed=args.seed):
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{folder}: {len(list(folder.glob('*.safetensors')))} files of weights, {size:,} bytes in all")
