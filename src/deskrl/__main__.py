"""`python -m deskrl`: the same as the `deskrl` command."""

from deskrl.cli import main

main()
