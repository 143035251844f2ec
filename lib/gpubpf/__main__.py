# PYTHON_ARGCOMPLETE_OK
"""gpubpf   Commands about this machine and about results, beside the tools that measure.

USAGE: gpubpf check [options]
       gpubpf query [options] SQL DIR...
       gpubpf diff [options] A B
       gpubpf report [options] -o FILE DIR...
       gpubpf exporter [options]
       gpubpf mcp [options] [DIR...]
"""

from __future__ import annotations

import sys

from gpubpf.check import command as check
from gpubpf.exporter import command as exporter
from gpubpf.mcp import command as mcp
from gpubpf.query import command as query
from gpubpf.query import difference_command as diff
from gpubpf.report import command as report
from gpubpf.show import cli
from gpubpf.show.command_line import HelpFormatter

TOOL = "gpubpf"
EXAMPLES = """examples:
    gpubpf check                    what the tools can do on this machine
    gpubpf check --json             the same for scripts
    gpubpf check -p 1234            what each tool would measure in a process
    gpubpf query 'FROM slowest_launches' DIR
                                    questions about what --parquet DIR kept
    gpubpf diff before after        what got slower between two measurements
    gpubpf report DIR -o report.html
                                    one page about what --parquet DIR kept
    sudo gpubpf exporter            serve metrics to Prometheus
    gpubpf mcp                      serve the tools to assistants
"""
# Each has DESCRIPTION, EXAMPLES, add_options(parser) and run(arguments, parser).
COMMANDS = {
    "check": check,
    "query": query,
    "diff": diff,
    "report": report,
    "exporter": exporter,
    "mcp": mcp,
}


def build_parser() -> cli.Parser:
    """Return the parser of the command and its subcommands."""
    made = cli.parser(
        TOOL, "Commands about this machine and about results.", EXAMPLES, f"{TOOL} COMMAND [options]"
    )
    commands = made.add_subparsers(
        dest="subcommand", metavar="COMMAND", required=True, prog=TOOL, parser_class=cli.SubcommandParser
    )
    for name, module in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=module.DESCRIPTION[0].lower() + module.DESCRIPTION[1:].removesuffix("."),
            description=module.DESCRIPTION,
            epilog=module.EXAMPLES,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        module.add_options(own)
        own.set_defaults(parser=own)
    return made


@cli.command(TOOL)
def main(argv: list[str] | None = None) -> int:
    """Run a subcommand, and return the exit status."""
    made = build_parser()
    args = cli.parse_subcommand(made, argv)
    return COMMANDS[args.subcommand].run(args, args.parser)


if __name__ == "__main__":
    sys.exit(main())
