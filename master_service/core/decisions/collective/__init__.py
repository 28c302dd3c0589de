"""Decisions about jobs with the collective strategy, where trainers have the parameters."""
