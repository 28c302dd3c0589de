"""Evaluations while a job trains: their course, and what to do if the checkpoint of one is lost."""
