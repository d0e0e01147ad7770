"""Check layouts against one device; for people who change a rule."""

import argparse
import json
import sys

from kimi_jax.commands.options import add_devices, meshes, numbers, start


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--checkpoint", metavar="PATH", help="checkpoint folder (default: the one in the package)")
    parser.add_argument(
        "--layouts", type=meshes, metavar="TPxCP,...",
        help="meshes, as 1x8,2x4, each with shard_qkv_a off and on (default: every mesh of the devices)",
    )  # fmt: skip
    parser.add_argument("--tokens-per-block", type=int, default=4, help="positions a stripe takes in turn (default 4)")
    parser.add_argument("--pad-heads", action="store_true", help="pad MLA heads that the ranks do not divide")
    parser.add_argument(
        "--rule", action="append", default=[], metavar="AXIS=MESH,...",
        help="edit a rule of these layouts, as latent_moe=tp,cp or vocab= (replicated); may be given several times",
    )  # fmt: skip
    parser.add_argument("--golden", metavar="FILE", help="compare with this .npz in place of one device")
    parser.add_argument("--prompt", action="append", help="text to use; may be given several times (default: random)")
    parser.add_argument("--chunks", type=numbers, default=(16,), help="columns of a call, as 16,64 (default 16)")
    parser.add_argument("--paddings", type=numbers, default=(0, 11), help="how many of them are junk (default 0,11)")
    parser.add_argument("--batches", type=numbers, default=(3,), help="rows of a call, as 1,3 (default 3)")
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    add_devices(parser)


def run(args: argparse.Namespace) -> int:
    """Do what the options say -> 0 if every case passes, 1 if not."""
    import kimi_jax

    start(args)
    found = kimi_jax.parity(
        args.checkpoint, _layouts(args), prompts=args.prompt, golden=args.golden, chunks=args.chunks,
        paddings=args.paddings, batches=args.batches, max_new_tokens=args.max_new_tokens,
        progress=sys.stderr.isatty(),
    )  # fmt: skip
    print(json.dumps(found.to_json(), indent=2) if args.json else found)
    return 0 if found.ok else 1


def _layouts(args: argparse.Namespace):
    """The meshes asked for, or all of these devices, with the edited rules."""
    import jax

    from kimi_jax.comparing.parity import both_ways, every_layout
    from kimi_jax.config import Config
    from kimi_jax.loading import SHIPPED
    from sharding_rules import helix

    config = Config.from_hf(args.checkpoint or SHIPPED)
    rules = dict(_rule(text) for text in args.rule)
    standard = helix(tokens_per_block=args.tokens_per_block, pad_heads=args.pad_heads).replace(**rules)
    if not args.layouts:
        return every_layout(config, len(jax.devices()), standard)
    return [layout for mesh in args.layouts for layout in both_ways(config, standard.resized(*mesh))]


def _rule(text: str) -> tuple[str, tuple[str, ...]]:
    axis, equals, mesh = text.partition("=")
    if not equals:
        raise ValueError(f"--rule {text!r}: AXIS=MESH,... was wanted, as latent_moe=tp,cp")
    return axis, tuple(part for part in mesh.split(",") if part)
