"""`python -m trireme` is `trireme`."""

from trireme.cli.commands import main

main()
