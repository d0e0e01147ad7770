"""Continue a prompt."""

import argparse
import sys

from kimi_jax.commands.options import add_devices, add_layout, layout_of, numbers, start


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--checkpoint", metavar="PATH", help="checkpoint folder (default: the one in the package)")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", dest="prompts", action="append", help="text to continue; may be given again")
    prompts.add_argument(
        "--ids",
        dest="prompts",
        action="append",
        type=numbers,
        help="token ids to continue, as 3,1,4; also several times",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else as stored")
    parser.add_argument("--temperature", type=float, help="sample at this temperature (default: greedy)")
    parser.add_argument("--top-p", type=float, help="sample from the smallest set of this probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="text that ends a row; may be given several times")
    add_layout(parser)
    add_devices(parser)


def run(args: argparse.Namespace) -> None:
    """Do what the options say."""
    import jax

    import kimi_jax

    start(args)
    # CPUs compute bfloat16 by way of float32: no faster, and near ties part the layouts.
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else None)
    model = kimi_jax.load(args.checkpoint, layout=layout_of(args), dtype=dtype, progress=sys.stderr.isatty())
    options = dict(max_new_tokens=args.max_new_tokens, sampling=_sampling(args), seed=args.seed, stop=args.stop)
    if len(args.prompts) == 1:
        pieces = kimi_jax.stream(model, args.prompts[0], **options)
        print(_asked(args.prompts[0]), end="")
        for piece in pieces:
            print(_shown(piece), end="", flush=True)
        print()
    else:
        for prompt, completion in zip(args.prompts, kimi_jax.generate(model, args.prompts, **options), strict=True):
            print(f"{_asked(prompt)}{_shown(completion)}\n")


def _asked(prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else f"{prompt} "


def _shown(part) -> str:
    return f" {part.tokens}" if part.text is None else part.text


def _sampling(args: argparse.Namespace):
    from kimi_jax.sampling import Greedy, Temperature, TopP

    if args.top_p is not None:
        return TopP(args.top_p, args.temperature if args.temperature is not None else 1.0)
    return Greedy() if args.temperature is None else Temperature(args.temperature)
