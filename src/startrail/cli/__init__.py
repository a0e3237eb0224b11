"""The command line, one file per command.

Every command's module has ``EXAMPLES``, ``add(commands)``, which adds its parser and options, and ``run(arguments)``,
which returns the exit code and imports what needs torch. To add a command, write such a module and list it in `app`.
May import every package. Start reading at `app.main`; `options` holds what the commands share.
"""

from startrail.cli.app import main

__all__ = ["main"]
