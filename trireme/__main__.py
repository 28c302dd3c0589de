"""`python -m trireme` is `trireme`."""

from trireme.cli.app import main

main()
