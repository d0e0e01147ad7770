"""The command line: `python -m kimi_jax COMMAND`. The commands are the modules of `kimi_jax.commands`."""

import argparse
import os
import sys

import jax

from kimi_jax import processes
from kimi_jax.commands import bench, convert, disk, explain, generate, parity, plan, tiny_k3

COMMANDS = (generate, plan, explain, parity, convert, bench, disk, tiny_k3)


def main(argv: list[str] | None = None) -> int:
    """Run one command -> its exit status. What the library or the system refuses is one line, status 2.

    Of several processes one that fails alone ends at once, so that the others see it go: status 1.
    """
    parser = argparse.ArgumentParser(prog="python -m kimi_jax", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        about = (module.__doc__ or "").partition("\n")[0]
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        command = commands.add_parser(name, help=about, description=about)
        module.arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except (ValueError, OSError) as error:
        print(f"kimi_jax {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        said = str(error).partition("\n")[0]
        if processes.alone() and isinstance(error, jax.errors.JaxRuntimeError):
            print(f"kimi_jax {args.command}: {said}", file=sys.stderr)
            return 1
        if processes.alone():
            raise
        print(f"kimi_jax {args.command}: {processes.name()} ends, it or another one failed: {said}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # the orderly end would wait for a process that may be gone


if __name__ == "__main__":
    sys.exit(main())
