"""The command line: `python -m kimi_jax COMMAND`. The commands are the modules of `kimi_jax.commands`."""

import argparse
import sys

from kimi_jax.commands import bench, convert, disk, explain, generate, plan

COMMANDS = (generate, plan, explain, convert, bench, disk)


def main(argv: list[str] | None = None) -> int:
    """Run one command -> its exit status. A ValueError of the library is printed as one line, status 2."""
    parser = argparse.ArgumentParser(prog="python -m kimi_jax", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        about = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(module.__name__.rpartition(".")[2], help=about, description=about)
        module.arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except ValueError as error:
        print(f"kimi_jax {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
