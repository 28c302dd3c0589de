"""`python -m trireme` is `trireme`."""

from trireme.cli import main

main()
