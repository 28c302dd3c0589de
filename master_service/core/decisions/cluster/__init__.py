"""Decisions about the jobs of a cluster and its pool that users or time ask for: submit, pause, cron, drain, what becomes of an ended job."""
