"""A process that reads for a trainer: see process.py."""

from trainer_agent.reading.process import main

main()
