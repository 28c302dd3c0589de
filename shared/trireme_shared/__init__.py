"""What two services must agree on, and the version of Trireme."""

__version__ = "0.1.0"  # as in pyproject.toml
